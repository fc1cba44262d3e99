-- release(id, token) -> 1, or 0 when the lease is no longer held.
-- LEASES, ISSUED zsets; HOLDERS, DEADLINES, ATTEMPTS hashes; LATE set.
local id = ARGV[1]
expire()
if not held(id, ARGV[2]) then return 0 end
unlease(id)
forget_deadline(id)
redis.call('HINCRBY', ATTEMPTS, id, -1)
redis.call('ZADD', ISSUED, id, id)
return 1
