-- Adds a signed number to the available permits; the result may be negative.
--
-- KEYS[1]  the semaphore: the number of available permits
-- ARGV[1]  permits to add; negative: remove
-- ARGV[2]  1: only if the semaphore exists
-- ARGV[3]  channel
-- ARGV[4]  maximum absolute value of the result
-- Returns  { available permits after the addition }
--          0: the semaphore does not exist
--          -1: the result would exceed the maximum, nothing changed
local value, kind_error = read_counter(KEYS[1])
if kind_error then
    return kind_error
end
if not value and ARGV[2] == '1' then
    return 0
end
local added, max = tonumber(ARGV[1]), tonumber(ARGV[4])
local sum = (value or 0) + added
if (added > 0 and sum > max) or (added < 0 and sum < -max) then
    return -1
end
if added > 0 then
    -- PUBLISH comes first: if it is refused, nothing has changed.
    redis.call('PUBLISH', ARGV[3], sum)
end
redis.call('INCRBY', KEYS[1], ARGV[1])
return { sum }
