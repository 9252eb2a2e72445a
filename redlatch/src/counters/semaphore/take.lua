-- Takes permits, if enough are available.
--
-- KEYS[1]  the semaphore: the number of available permits
-- ARGV[1]  number of requested permits
-- Returns  { remaining time to live of the semaphore in ms; -1: forever }: taken
--          0: too few are available, -1: no permits are set
local value, kind_error = read_counter(KEYS[1])
if kind_error then
    return kind_error
end
if not value then
    return -1
end
if value < tonumber(ARGV[1]) then
    return 0
end
redis.call('DECRBY', KEYS[1], ARGV[1])
return { redis.call('PTTL', KEYS[1]) }
