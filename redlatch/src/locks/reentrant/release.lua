-- Sets an owner's hold count to the number of holds to keep, or releases the lock and wakes a waiter.
--
-- KEYS[1]  the lock: hash owner -> hold count
-- ARGV[1]  owner
-- ARGV[2]  channel; empty: wake no waiter
-- ARGV[3]  hold count to keep; absent: release the lock, and no arguments follow;
--          the key of the requests to release the lock: the same, and remove the owner from it
-- ARGV[4]  lease in ms; 0: do not change the expiry
-- ARGV[5]  only to undo an acquisition: ms that remain of the lease before it
-- Returns  1: done; 0: this owner does not hold the lock
local keep = tonumber(ARGV[3])
if ARGV[3] and not keep then
    -- pcall: without permission, or while the slot moves, the request remains until it expires.
    redis.pcall('ZREM', ARGV[3], ARGV[1])
end
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then
    -- If FLUSHALL or DEL deleted the lock, no other step wakes its waiters. A repeated release also
    -- gets here; then a waiter checks once more than necessary.
    if ARGV[2] ~= '' and redis.call('EXISTS', KEYS[1]) == 0 then
        redis.call('PUBLISH', ARGV[2], '0')
    end
    return 0
end
if not keep then
    redis.call('DEL', KEYS[1])
    if ARGV[2] ~= '' then
        redis.call('PUBLISH', ARGV[2], '0')
    end
    return 1
end
-- Deletes nothing, but counts as a write. An out-of-memory server refuses HSET unless the script has
-- already written.
redis.call('HDEL', KEYS[1], '')
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
local left = redis.call('PTTL', KEYS[1])
-- With lease 0 the expiry stays as it is, even if the key has none: PEXPIRE 0 would delete the key.
local lease = tonumber(ARGV[4])
if lease > 0 and left < lease then
    redis.call('PEXPIRE', KEYS[1], lease)
elseif ARGV[5] and left > tonumber(ARGV[5]) then
    redis.call('PEXPIRE', KEYS[1], ARGV[5])
end
return 1
