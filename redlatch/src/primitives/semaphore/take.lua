-- Takes permits, if enough are available.
--
-- KEYS[1]  the semaphore: the number of permits available
-- ARGV[1]  requested permits
-- Returns  { the semaphore's remaining time to live in ms, -1: forever }
--          else 0: there are too few
local value, wrong = number(KEYS[1])
if wrong then
    return wrong
end
if not value or value < tonumber(ARGV[1]) then
    return 0
end
redis.call('DECRBY', KEYS[1], ARGV[1])
return { redis.call('PTTL', KEYS[1]) }
