-- Decrements a latch's count; at zero it is open, and its key is deleted.
--
-- KEYS[1]  the latch: the count
-- ARGV[1]  number to subtract
-- ARGV[2]  channel
-- Returns  the new count
local value, kind_error = read_counter(KEYS[1])
if kind_error then
    return kind_error
end
local left = (value or 0) - tonumber(ARGV[1])
if left > 0 then
    redis.call('DECRBY', KEYS[1], ARGV[1])
    return left
end
if value and value > 0 then
    -- PUBLISH comes first: if it is refused, nothing has changed.
    redis.call('PUBLISH', ARGV[2], 0)
end
redis.call('DEL', KEYS[1])
return 0
