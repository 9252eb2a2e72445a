-- Releases the lock, whichever owner holds it, and grants it to the next waiter or wakes it. Does not change other objects.
--
-- KEYS     see queue.lua
-- ARGV[1]  channel
-- ARGV[2]  grace period in ms
-- Returns  1: released, 0: it was free, -1: the key is a hash, but not a lock
local fields = redis.call('HLEN', KEYS[1])
if fields == 0 then
    return 0
end
if fields > 1 or not string.match(redis.call('HKEYS', KEYS[1])[1], '^.+:%d+$') then
    return -1
end
local left = redis.call('PTTL', KEYS[1])
redis.call('DEL', KEYS[1])
wake_after_release(ARGV[1], left, tonumber(ARGV[2]))
return 1
