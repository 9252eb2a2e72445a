-- Returns the holder, its hold count and its remaining lease.
--
-- KEYS[1]  the lock: hash owner -> hold count
-- Returns  nil: the lock is free
--          { owner, hold count, remaining ms (-1: never expires) }
--          -1: the key is a hash, but not a lock
local fields = redis.call('HLEN', KEYS[1])
if fields == 0 then
    return nil
end
local holder = redis.call('HGETALL', KEYS[1])
if fields > 1 or not (string.match(holder[1], '^.+:%d+$') and string.match(holder[2], '^%d+$')) then
    return -1
end
return { holder[1], holder[2], redis.call('PTTL', KEYS[1]) }
