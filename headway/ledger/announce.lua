-- announce(node, JSON, microseconds): the node serves the job for so long.
-- MEMBERS hash, MEMBERS_UNTIL zset.
redis.call('HSET', MEMBERS, ARGV[1], ARGV[2])
redis.call('ZADD', MEMBERS_UNTIL, now() + ARGV[3], ARGV[1])
