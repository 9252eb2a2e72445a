-- Counts a latch down; at zero it is open, and gone.
--
-- KEYS[1]  the latch: the count
-- ARGV     by how much, channel
-- Returns  the count that is left
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
    -- First: if it is refused, nothing has been changed.
    redis.call('PUBLISH', ARGV[2], 0)
end
redis.call('DEL', KEYS[1])
return 0
