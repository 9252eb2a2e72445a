-- Releases the lock, whichever owner holds it, and wakes a waiter. Does not change other objects.
--
-- KEYS[1]  the lock: hash owner -> hold count
-- ARGV[1]  channel
-- Returns  1: released, 0: it was free, -1: the key is a hash, but not a lock
local fields = redis.call('HLEN', KEYS[1])
if fields == 0 then
    return 0
end
if fields > 1 or not string.match(redis.call('HKEYS', KEYS[1])[1], '^.+:%d+$') then
    return -1
end
redis.call('DEL', KEYS[1])
redis.call('PUBLISH', ARGV[1], '0')
return 1
