-- members() -> the JSON of each node whose time is not up. MEMBERS hash, MEMBERS_UNTIL zset.
for _, node in ipairs(redis.call('ZRANGEBYSCORE', MEMBERS_UNTIL, '-inf', now())) do
  redis.call('HDEL', MEMBERS, node)
  redis.call('ZREM', MEMBERS_UNTIL, node)
end
return redis.call('HVALS', MEMBERS)
