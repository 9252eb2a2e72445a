-- Takes all permits that there are; what was owed is owed no more.
--
-- KEYS[1]  the semaphore: the number of permits available
-- Returns  how many there were
local value, wrong = number(KEYS[1])
if wrong then
    return wrong
end
if value then
    redis.call('SET', KEYS[1], 0, 'KEEPTTL')
end
return value or 0
