-- commit(step, ids joined by commas): the step trained on these groups.
-- META hash; BATCHES hash is read.
local step, next_commit = tonumber(ARGV[1]), setting('next_commit')
if step < setting('trimmed') then return 0 end
local record = redis.call('HGET', BATCHES, step)
if not record then
  return refuse('VIOLATION', 'step ' .. step .. ' cannot be committed: it was never taken')
end
local ids = record:match('^[^;]*')
if ids ~= ARGV[2] then
  return refuse('VIOLATION', 'step ' .. step .. ' took the tickets ' .. ids .. ', not ' .. ARGV[2])
end
if step > next_commit then
  return refuse('VIOLATION', 'step ' .. step .. ' is out of order: the next to commit is ' .. next_commit)
end
if step < next_commit then return 0 end
local _, commas = ids:gsub(',', '')
count('next_commit')
count('taken', -(commas + 1))
count('consumed', commas + 1)
return 1
