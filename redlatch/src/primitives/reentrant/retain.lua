-- Ends an owner's hold, and keeps the lock from all owners, itself included, for a time. The caller prepends the function
-- `wake`, which differs between the kinds of lock.
--
-- KEYS[1]  the lock: hash owner -> hold count
-- ARGV[1]  owner
-- ARGV[2]  channel; empty: wake no waiter
-- ARGV[3]  an owner of the same client that no request has: it gets the hold, which is neither renewed nor released
-- ARGV[4]  time in ms
-- ARGV[5]  the key of the requests to release the lock, from which the owner is removed; absent: it is not
-- Returns  1: done; 0: this owner does not hold the lock
if ARGV[5] then
    -- pcall: without permission, or while the slot moves, the request remains until it expires.
    redis.pcall('ZREM', ARGV[5], ARGV[1])
end
local held = redis.call('HEXISTS', KEYS[1], ARGV[1])
if held == 1 then
    -- Deletes nothing, but counts as a write. An out-of-memory server refuses HSET unless the script has
    -- already written.
    redis.call('HDEL', KEYS[1], '')
    redis.call('HSET', KEYS[1], ARGV[3], 1)
    redis.call('HDEL', KEYS[1], ARGV[1])
    redis.call('PEXPIRE', KEYS[1], ARGV[4])
end
-- Waiters sleep until the end of the lease that the store reported to them, and it is mostly earlier now. If FLUSHALL or
-- DEL deleted the lock, no other step wakes them.
if ARGV[2] ~= '' and (held == 1 or redis.call('EXISTS', KEYS[1]) == 0) then
    wake(1, ARGV[2])
end
return held
