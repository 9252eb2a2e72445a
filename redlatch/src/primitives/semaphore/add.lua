-- Adds permits, or takes some away.
--
-- KEYS[1]  the semaphore: the number of permits available
-- ARGV     permits to add, 1 if only to a semaphore that is there, channel, the most that can be
-- Returns  { permits available now }
--          else 0: there is none; -1: they would become more, or fewer, than there can be
local value, wrong = number(KEYS[1])
if wrong then
    return wrong
end
if not value and ARGV[2] == '1' then
    return 0
end
local added, most = tonumber(ARGV[1]), tonumber(ARGV[4])
local sum = (value or 0) + added
if (added > 0 and sum > most) or (added < 0 and sum < -most) then
    return -1
end
if added > 0 then
    -- First: if it is refused, nothing has been changed.
    redis.call('PUBLISH', ARGV[3], sum)
end
redis.call('INCRBY', KEYS[1], ARGV[1])
return { sum }
