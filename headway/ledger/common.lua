-- Put before every transition, after the line that names the keys (see keys.py).
-- No transition writes before it has made all its checks.

local function setting(field) return tonumber(redis.call('HGET', META, field) or 0) end
local function count(field, by) redis.call('HINCRBY', META, field, by or 1) end
local function closed() return redis.call('HEXISTS', META, 'closed') == 1 end
local function refuse(kind, text) return redis.error_reply(kind .. ' ' .. text) end

-- Microseconds of the server's clock, the only one that judges leases.
local function now()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

-- The holder of a lease: token, start version, time of the claim, node.
local function holder(id)
  local text = redis.call('HGET', HOLDERS, id)
  if not text then return nil end
  local token, start, since, node = text:match('^(%d+):(%d+):(%d+):(.*)$')
  return tonumber(token), tonumber(start), tonumber(since), node
end

local function held(id, token) return holder(id) == tonumber(token) end

-- Takes the lease away; the deadline stays with the group.
local function unlease(id)
  redis.call('ZREM', LEASES, id)
  redis.call('HDEL', HOLDERS, id)
end

local function forget_deadline(id)
  redis.call('HDEL', DEADLINES, id)
  redis.call('SREM', LATE, id)
end

-- The ticket can never be claimed again.
local function end_ticket(id)
  redis.call('HDEL', TICKETS, id)
  redis.call('HDEL', ATTEMPTS, id)
end

local function end_counted(id, state, reason)
  end_ticket(id)
  forget_deadline(id)
  count(state)
  redis.call('HINCRBY', REASONS, reason, 1)
end

local function retry_or_abandon(id, reason)
  unlease(id)
  if tonumber(redis.call('HGET', ATTEMPTS, id)) >= setting('max_attempts') then
    end_counted(id, 'abandoned', reason)
  else
    forget_deadline(id)
    redis.call('ZADD', ISSUED, id, id)
  end
end

-- Ends the leases whose time is up; returns the time.
local function expire()
  local time = now()
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', LEASES, '-inf', time)) do
    count('expired')
    retry_or_abandon(id, 'lease_expired')
  end
  return time
end

local function opened() return redis.call('HEXISTS', META, 'config') == 1 end
if not opened() and not MAY_BE_UNOPENED then
  return refuse('NOTFOUND', 'this job has no ledger: it was never opened, or Redis lost its data')
end
