-- claim(node, version, limit) -> {refusal or '', {id, token, attempt, packed ticket}, ...}
-- ISSUED, LEASES zsets; HOLDERS, ATTEMPTS, DEADLINES, META hashes; TICKETS is read.
local node, version, limit = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local step, batch, deadline = setting('next_take'), setting('batch_groups'), version + setting('max_policy_lag')
if version < 0 or version > step then
  return refuse('VIOLATION', 'node ' .. node .. ' claims at version ' .. version .. ', which no step has made: the next step is ' .. step)
end
if closed() then return {'closed'} end
local time = expire()
if deadline < step then return {'stale_version'} end
local ids = redis.call('ZRANGE', ISSUED, 0, limit - 1)
if #ids == 0 then return {'empty'} end

-- Full of bytes: no more than one batch may be started, or training could stop.
if setting('bytes') >= setting('max_outstanding_bytes') then
  limit = math.min(limit, batch - redis.call('ZCARD', LEASES) - redis.call('ZCARD', ARRIVED))
  if limit <= 0 then return {'bytes'} end
end

-- The lag rule: room() in headway/rl/schedule.py.
local started, days = {}, {}
for _, text in ipairs(redis.call('HVALS', DEADLINES)) do
  local day = math.max(tonumber(text), deadline)
  if not started[day] then days[#days + 1] = day end
  started[day] = (started[day] or 0) + 1
end
table.sort(days)
local room, sum = batch * (deadline - step + 1), 0
for _, day in ipairs(days) do
  sum = sum + started[day]
  room = math.min(room, batch * (day - step + 1) - sum)
end
limit = math.min(limit, room)
if limit <= 0 then return {'lag'} end

local granted = {''}
for i = 1, math.min(limit, #ids) do
  local id = ids[i]
  local token = redis.call('HINCRBY', META, 'token', 1)
  local attempt = redis.call('HINCRBY', ATTEMPTS, id, 1)
  redis.call('ZREM', ISSUED, id)
  redis.call('ZADD', LEASES, time + setting('lease_us'), id)
  redis.call('HSET', HOLDERS, id, string.format('%d:%d:%.0f:%s', token, version, time, node))
  redis.call('HSET', DEADLINES, id, deadline)
  granted[#granted + 1] = {tonumber(id), token, attempt, redis.call('HGET', TICKETS, id)}
end
return granted
