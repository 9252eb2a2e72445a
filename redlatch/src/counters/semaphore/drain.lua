-- Takes all available permits. A negative number becomes zero.
--
-- KEYS[1]  the semaphore: the number of available permits
-- Returns  the number of available permits before
local value, kind_error = read_counter(KEYS[1])
if kind_error then
    return kind_error
end
if value then
    redis.call('SET', KEYS[1], 0, 'KEEPTTL')
end
return value or 0
