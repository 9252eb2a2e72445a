-- Takes permits, if there are so many.
--
-- KEYS[1]  the semaphore: the number of permits available
-- ARGV[1]  permits wanted
-- Returns  { for how long the semaphore will be there in ms, -1: for ever }
--          else 0: there are not so many
local value, wrong = number(KEYS[1])
if wrong then
    return wrong
end
if not value or value < tonumber(ARGV[1]) then
    return 0
end
redis.call('DECRBY', KEYS[1], ARGV[1])
return { redis.call('PTTL', KEYS[1]) }
