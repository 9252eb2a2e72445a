-- Deletes a number.
--
-- KEYS[1]  the number
-- ARGV     channel and the message to publish; an empty channel publishes nothing
-- Returns  1, or 0 if there was none
local value, wrong = number(KEYS[1])
if wrong then
    return wrong
end
if not value then
    return 0
end
if ARGV[1] ~= '' then
    redis.call('PUBLISH', ARGV[1], ARGV[2])
end
return redis.call('DEL', KEYS[1])
