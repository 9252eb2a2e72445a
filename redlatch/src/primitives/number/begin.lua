-- Sets a number if there is none, or none that counts. What publishes stands first here and elsewhere: if that is
-- refused, nothing has been changed.
--
-- KEYS[1]  the number
-- ARGV     the number to set, its time to live in ms (0: for ever), channel, what to publish there,
--          1 if only a number above zero counts
-- Returns  1, or 0 if there was one already
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
