-- Records the outcome of a run.
--
-- KEYS[1]  the record
-- ARGV[1]  id of the run
-- ARGV[2]  outcome
-- Returns  1: recorded, also if this is a repetition; 0: the record has expired, or is that of a later run
if redis.call('HGET', KEYS[1], 'run') ~= ARGV[1] then
    return 0
end
if redis.call('HEXISTS', KEYS[1], 'ended') == 0 then
    local time = redis.call('TIME')
    local now = time[1] * 1000 + math.floor(time[2] / 1000)
    redis.call('HSET', KEYS[1], 'ended', string.format('%d', now), 'outcome', ARGV[2])
end
return 1
