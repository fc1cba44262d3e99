-- counts() -> {META as pairs, issued, leased, delivered, REASONS as pairs}
-- Writes only what expiry writes.
expire()
return {
  redis.call('HGETALL', META), redis.call('ZCARD', ISSUED), redis.call('ZCARD', LEASES),
  redis.call('ZCARD', ARRIVED), redis.call('HGETALL', REASONS),
}
