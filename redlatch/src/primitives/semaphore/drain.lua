-- Takes all available permits. A negative number becomes zero.
--
-- KEYS[1]  the semaphore: the number of permits available
-- Returns  how many permits were available
local value, wrong = number(KEYS[1])
if wrong then
    return wrong
end
if value then
    redis.call('SET', KEYS[1], 0, 'KEEPTTL')
end
return value or 0
