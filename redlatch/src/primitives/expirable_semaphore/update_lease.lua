-- Sets the time at which a permit expires, earlier or later than before.
--
-- ARGV     channel, id, lease in ms from now
-- Returns  1: done, 0: the permit is not held
local id = permits(ARGV[2])[1]
local before = available and redis.call('ZSCORE', KEYS[2], id)
if not before then
    return 0
end
local ends = now_rounded_up + ARGV[3]
if ends < tonumber(before) then
    -- Waiters sleep until the first permit expires, and this may be the first now.
    redis.call('PUBLISH', ARGV[1], available)
end
-- As in renew.lua.
redis.call('ZREM', KEYS[2], '')
redis.call('ZADD', KEYS[2], 'XX', ends, id)
return 1
