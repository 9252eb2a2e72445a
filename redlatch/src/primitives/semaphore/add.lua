-- Adds permits, or removes some.
--
-- KEYS[1]  the semaphore: the number of permits available
-- ARGV     permits to add, 1 if only to an existing semaphore, channel, the maximum number of permits
-- Returns  { permits available now }
--          else 0: there is no semaphore; -1: the number would leave the valid range
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
    -- First: if it is refused, nothing has changed.
    redis.call('PUBLISH', ARGV[3], sum)
end
redis.call('INCRBY', KEYS[1], ARGV[1])
return { sum }
