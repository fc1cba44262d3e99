-- close(seconds): no more claims; every key goes after so many seconds.
redis.call('HSET', META, 'closed', 1)
for _, key in ipairs(KEYS) do redis.call('EXPIRE', key, ARGV[1]) end
