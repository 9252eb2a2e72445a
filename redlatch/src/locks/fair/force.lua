-- Releases the lock, whichever owner holds it, and grants it to the next waiter or wakes it. Also wakes the observers of an
-- election. Does not change other objects.
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
if redis.call('EXISTS', KEYS[2]) == 1 then
    -- Only the head was woken. The lock may be that of an election, whose observers are not in the queue.
    redis.call('PUBLISH', ARGV[1], '0')
end
return 1
