-- Decrements a latch's count; at zero it is open, and its key is deleted.
--
-- KEYS[1]  the latch: the count
-- ARGV     the amount, channel
-- Returns  the new count
local value, wrong = number(KEYS[1])
if wrong then
    return wrong
end
local left = (value or 0) - tonumber(ARGV[1])
if left > 0 then
    redis.call('DECRBY', KEYS[1], ARGV[1])
    return left
end
if value and value > 0 then
    -- First: if it is refused, nothing has changed.
    redis.call('PUBLISH', ARGV[2], 0)
end
redis.call('DEL', KEYS[1])
return 0
