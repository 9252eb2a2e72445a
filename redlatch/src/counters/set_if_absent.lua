-- Sets a counter if it does not exist, or if its value may be overwritten.
--
-- KEYS[1]  the counter
-- ARGV[1]  value to set
-- ARGV[2]  time to live in ms; 0: forever
-- ARGV[3]  channel
-- ARGV[4]  message to publish
-- ARGV[5]  1: a value of zero or less is overwritten, 0: no value is overwritten
-- Returns  1: set, 0: not set, because the counter exists
local value, kind_error = read_counter(KEYS[1])
if kind_error then
    return kind_error
end
if value and (value > 0 or ARGV[5] == '0') then
    return 0
end
-- PUBLISH comes first: if it is refused, nothing has changed.
redis.call('PUBLISH', ARGV[3], ARGV[4])
if ARGV[2] == '0' then
    redis.call('SET', KEYS[1], ARGV[1])
else
    redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
end
return 1
