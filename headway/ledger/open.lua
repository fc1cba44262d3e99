-- open(config, field, value, ...): creates the ledger or finds it again.
-- META hash: the settings, checked to be the same.
local config = redis.call('HGET', META, 'config')
if not config then
  redis.call('HSET', META, 'config', ARGV[1], unpack(ARGV, 2))
elseif config ~= ARGV[1] then
  return refuse('CONFLICT', 'the ledger was opened with other settings: ' .. config)
end
