-- deliver(id, token, filter reason or '', payload) -> 1, or 0 when refused.
-- LEASES, ARRIVED zsets; HOLDERS, TICKETS, ATTEMPTS, ARRIVED_AT, PAYLOADS, META,
-- REASONS, DEADLINES hashes; LATE set.
local id, reason, payload = ARGV[1], ARGV[3], ARGV[4]
local time = expire()
if closed() or not held(id, ARGV[2]) then
  count('refused')
  return 0
end
unlease(id)
if reason ~= '' then
  end_counted(id, 'filtered', reason)
  return 1
end
end_ticket(id)
redis.call('ZADD', ARRIVED, redis.call('HINCRBY', META, 'arrivals', 1), id)
redis.call('HSET', ARRIVED_AT, id, time)
redis.call('HSET', PAYLOADS, id, payload)
count('bytes', #payload)
count('held_bytes', #payload)
return 1
