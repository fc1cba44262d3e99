-- take(step) -> {1 taken | 2 taken before, record}
--            or {0, groups arrived, {id, start version, microseconds held, node}, ...}
-- ARRIVED zset; BATCHES, DEADLINES, ARRIVED_AT, META hashes; LATE set. A straggler that
-- is dropped also leaves LEASES zset, HOLDERS, TICKETS, ATTEMPTS and enters REASONS hash.
-- The rule is fill() and give_up() in headway/rl/schedule.py.
local step, next_take = tonumber(ARGV[1]), setting('next_take')
if step < next_take then
  local record = redis.call('HGET', BATCHES, step)
  if record then return {2, record} end
  return refuse('NOTFOUND', 'step ' .. step .. ' was trimmed: a later checkpoint covers it')
elseif step > next_take then
  return refuse('VIOLATION', 'step ' .. step .. ' is out of order: the next step to take is ' .. next_take)
end
local time, batch = expire(), setting('batch_groups')
local arrived = redis.call('ZRANGE', ARRIVED, 0, -1)

-- Per deadline: how many groups have started, and how many of them are here.
local deadlines, started, here, days = {}, {}, {}, {}
local flat = redis.call('HGETALL', DEADLINES)
for i = 1, #flat, 2 do
  local id, day = flat[i], tonumber(flat[i + 1])
  if not started[day] then
    days[#days + 1], started[day], here[day] = day, 0, 0
  end
  deadlines[id], started[day] = day, started[day] + 1
end
table.sort(days)
local is_here = {}
for _, id in ipairs(arrived) do
  local day = deadlines[id]
  is_here[id] = true
  if day then here[day] = here[day] + 1 end
end

-- The latest deadline whose need the arrived groups cannot meet.
local function blocking()
  local num_started, num_here, unmet = 0, 0, nil
  for _, day in ipairs(days) do
    num_started, num_here = num_started + started[day], num_here + here[day]
    if num_here < num_started - batch * (day - step) then unmet = day end
  end
  return unmet
end

local stragglers = {}
for id, day in pairs(deadlines) do
  if not is_here[id] then stragglers[#stragglers + 1] = {day, tonumber(id), id} end
end
table.sort(stragglers, function(a, b)
  if a[1] ~= b[1] then return a[1] < b[1] end
  return a[2] < b[2]
end)

local unmet, on_late = blocking(), redis.call('HGET', META, 'on_late')
local given_up = {}
if #arrived >= batch and unmet and on_late ~= 'wait' then
  for _, straggler in ipairs(stragglers) do
    if not unmet then break end
    given_up[#given_up + 1] = straggler[3]
    started[straggler[1]] = started[straggler[1]] - 1
    unmet = blocking()
  end
end

if #arrived < batch or unmet then
  if unmet and #arrived >= batch and redis.call('HGET', META, 'stalled_step') ~= ARGV[1] then
    redis.call('HSET', META, 'stalled_step', step)
    count('stalled')
  end
  local answer = {0, #arrived}
  table.sort(stragglers, function(a, b) return a[2] < b[2] end)
  for _, straggler in ipairs(stragglers) do
    if unmet and straggler[1] <= unmet then
      local _, start, since, node = holder(straggler[3])
      answer[#answer + 1] = {straggler[2], start, time - since, node}
    end
  end
  return answer
end

for _, id in ipairs(given_up) do
  if on_late == 'drop' then
    unlease(id)
    end_counted(id, 'dropped', 'late')
  else
    redis.call('HDEL', DEADLINES, id)
    redis.call('SADD', LATE, id)
    count('late')
  end
end

local needs, num_started = {}, 0
for i, day in ipairs(days) do
  num_started = num_started + started[day]
  needs[i] = num_started - batch * (day - step)
end
local chosen = {}
for _, id in ipairs(arrived) do
  local left, fits, deadline = batch - #chosen - 1, true, deadlines[id] or math.huge
  for i, day in ipairs(days) do
    if day < deadline and needs[i] > left then fits = false end
  end
  if fits then
    chosen[#chosen + 1] = tonumber(id)
    for i, day in ipairs(days) do
      if deadline <= day then needs[i] = needs[i] - 1 end
    end
    if left == 0 then break end
  end
end
table.sort(chosen)

local late, queued = {}, {}
for i, id in ipairs(chosen) do
  if redis.call('SISMEMBER', LATE, id) == 1 then late[#late + 1] = id end
  queued[i] = string.format('%.0f', time - redis.call('HGET', ARRIVED_AT, id))
  count('bytes', 0 - redis.call('HSTRLEN', PAYLOADS, id))
  forget_deadline(id)
  redis.call('ZREM', ARRIVED, id)
  redis.call('HDEL', ARRIVED_AT, id)
end
local record = table.concat(chosen, ',') .. ';' .. table.concat(late, ',') .. ';' .. table.concat(queued, ',')
redis.call('HSET', BATCHES, step, record)
count('next_take')
count('taken', #chosen)
return {1, record}
