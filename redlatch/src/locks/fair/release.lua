-- Sets an owner's hold count to the number of holds to keep. 0 releases the lock, grants it to the next
-- waiter or wakes it, and removes the owner from the queue if it is still there from waiting.
--
-- KEYS     see queue.lua
-- ARGV[1]  owner
-- ARGV[2]  channel
-- ARGV[3]  hold count to keep
-- ARGV[4]  lease in ms; 0: do not change the expiry
-- ARGV[5]  grace period in ms
-- ARGV[6]  the key of the requests to release the lock, from which the owner is removed; empty: it is not
-- Returns  1: done; 0: this owner does not hold the lock
local owner, channel, keep, lease = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
if ARGV[6] ~= '' then
    -- pcall: without permission, or while the slot moves, the request remains until it expires.
    redis.pcall('ZREM', ARGV[6], owner)
end
local left = redis.call('PTTL', KEYS[1])
local free = left == -2
lock_left = not free and left or nil
-- The owner leaves the queue first, because the rest fails if another program has overwritten the lock's key.
local position = keep == '0' and leave(owner)
if position and (position == 0 or free) then
    -- The message that woke this owner, also in place of absent owners before it, is now meant for the next waiter.
    if free and redis.call('EXISTS', KEYS[2]) == 0 then
        wake_unqueued(channel)
    else
        wake_head(channel)
    end
end
if redis.call('HEXISTS', KEYS[1], owner) == 0 then
    -- If FLUSHALL or DEL deleted the lock, no other step wakes its waiters.
    if free and not position then
        wake_next(channel)
    end
    return 0
end
if keep == '0' then
    redis.call('DEL', KEYS[1])
    lock_left = nil
    wake_after_release(channel, left, tonumber(ARGV[5]))
    return 1
end
redis.call('HSET', KEYS[1], owner, keep)
-- With lease 0 the expiry stays as it is, even if the key has none: PEXPIRE 0 would delete the key.
if lease > 0 and left < lease then
    redis.call('PEXPIRE', KEYS[1], lease)
end
return 1
