-- renew(id, token, ...) -> the positions, from 0, of those still held, now for a whole lease more.
-- LEASES zset; HOLDERS hash is read; expiry may write the rest.
local time, kept = expire(), {}
for i = 1, #ARGV, 2 do
  if held(ARGV[i], ARGV[i + 1]) then
    redis.call('ZADD', LEASES, time + setting('lease_us'), ARGV[i])
    kept[#kept + 1] = (i - 1) / 2
  end
end
return kept
