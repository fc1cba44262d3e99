-- fail(id, token, reason) -> 1, or 0 when the lease is no longer held.
-- LEASES, ISSUED zsets; HOLDERS, DEADLINES, ATTEMPTS, TICKETS, META, REASONS hashes; LATE set.
expire()
if not held(ARGV[1], ARGV[2]) then return 0 end
count('failed')
retry_or_abandon(ARGV[1], ARGV[3])
return 1
