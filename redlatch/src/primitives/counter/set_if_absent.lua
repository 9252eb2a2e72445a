-- Sets a number if there is none, or one that may be overwritten. Here and elsewhere PUBLISH comes
-- first: if it is refused, nothing has changed.
--
-- KEYS[1]  the number
-- ARGV     the number to set, its time to live in ms (0: forever), channel, the message to publish,
--          1 if a number of zero or less is overwritten
-- Returns  1: the number was set; 0: there already was one
local value, wrong = number(KEYS[1])
if wrong then
    return wrong
end
if value and (value > 0 or ARGV[5] == '0') then
    return 0
end
redis.call('PUBLISH', ARGV[3], ARGV[4])
if ARGV[2] == '0' then
    redis.call('SET', KEYS[1], ARGV[1])
else
    redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
end
return 1
