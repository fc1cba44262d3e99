-- trim(step) -> groups freed: those of every step before `step`.
-- PAYLOADS, BATCHES, META hashes.
local step, freed = tonumber(ARGV[1]), 0
if step > setting('next_commit') then
  return refuse('VIOLATION', 'cannot trim to step ' .. step .. ': the next to commit is ' .. setting('next_commit'))
end
for done = setting('trimmed'), step - 1 do
  for id in redis.call('HGET', BATCHES, done):match('^[^;]*'):gmatch('%d+') do
    count('held_bytes', 0 - redis.call('HSTRLEN', PAYLOADS, id))
    redis.call('HDEL', PAYLOADS, id)
    freed = freed + 1
  end
  redis.call('HDEL', BATCHES, done)
  redis.call('HSET', META, 'trimmed', done + 1)
end
return freed
