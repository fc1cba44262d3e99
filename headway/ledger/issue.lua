-- issue(first id, packed ticket, ...) -> tickets accepted, those issued before included.
-- META hash, TICKETS hash, ISSUED zset; LEASES and ARRIVED zsets are read.
local first, total = tonumber(ARGV[1]), setting('issued_total')
if first > total then
  return refuse('VIOLATION', 'ticket ' .. first .. ' leaves a gap: the next id is ' .. total)
end
local outstanding = redis.call('ZCARD', ISSUED) + redis.call('ZCARD', LEASES) + redis.call('ZCARD', ARRIVED)
local room = closed() and 0 or math.max(0, setting('max_outstanding_groups') - outstanding)
local last = math.min(first + #ARGV - 1, total + room) - 1
for id = total, last do
  redis.call('HSET', TICKETS, id, ARGV[id - first + 2])
  redis.call('ZADD', ISSUED, id, id)
end
if last >= total then count('issued_total', last - total + 1) end
return last - first + 1
