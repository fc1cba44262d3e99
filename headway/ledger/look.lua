-- look() -> {META as pairs, issued, leases, DEADLINES as pairs, ARRIVED in order}
-- A lease is {id, start version, microseconds held, microseconds left, node, attempt}.
-- Writes nothing.
local time, leases = now(), {}
local flat = redis.call('ZRANGE', LEASES, 0, -1, 'WITHSCORES')
for i = 1, #flat, 2 do
  local id = flat[i]
  local _, start, since, node = holder(id)
  local attempt = tonumber(redis.call('HGET', ATTEMPTS, id))
  leases[#leases + 1] = {tonumber(id), start, time - since, tonumber(flat[i + 1]) - time, node, attempt}
end
return {
  redis.call('HGETALL', META), redis.call('ZCARD', ISSUED), leases,
  redis.call('HGETALL', DEADLINES), redis.call('ZRANGE', ARRIVED, 0, -1),
}
