-- Sets the time at which a permit expires, earlier or later than before.
--
-- `available`, KEYS and ARGV[1]: see prelude.lua.
-- ARGV[2]  id, as 32 hex digits
-- ARGV[3]  lease in ms, which begins now
-- Returns  1: done, 0: the permit is not held
local id = permits(ARGV[2])[1]
local old_expiry = available and redis.call('ZSCORE', KEYS[2], id)
if not old_expiry then
    return 0
end
local new_expiry = now_rounded_up + ARGV[3]
if new_expiry < tonumber(old_expiry) then
    -- Waiters sleep until the first permit expires, and this one may now be the first.
    redis.call('PUBLISH', ARGV[1], available)
end
-- Deletes nothing, but counts as a write: see renew.lua.
redis.call('ZREM', KEYS[2], '')
redis.call('ZADD', KEYS[2], 'XX', new_expiry, id)
return 1
