-- withdraw(node): the node serves the job no longer. MEMBERS hash, MEMBERS_UNTIL zset.
redis.call('HDEL', MEMBERS, ARGV[1])
redis.call('ZREM', MEMBERS_UNTIL, ARGV[1])
