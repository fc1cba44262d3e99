-- announce(node, JSON, microseconds): the node serves the job for so long.
-- MEMBERS hash, MEMBERS_UNTIL zset: gone when the last announcement is, also after `close`.
redis.call('HSET', MEMBERS, ARGV[1], ARGV[2])
redis.call('ZADD', MEMBERS_UNTIL, now() + ARGV[3], ARGV[1])
local ttl = math.ceil(ARGV[3] / 1000)
for _, key in ipairs({MEMBERS, MEMBERS_UNTIL}) do
  if redis.call('PTTL', key) < ttl then redis.call('PEXPIRE', key, ttl) end
end
