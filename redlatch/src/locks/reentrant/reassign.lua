-- Puts another owner in the place of the holder, with hold count 1. The caller prepends the function `wake`, which
-- differs between the kinds of lock.
--
-- KEYS[1]  the lock: hash owner -> hold count, and `mode` if it is the write side of a read-write lock
-- ARGV[1]  owner
-- ARGV[2]  channel; empty: wake no waiter
-- ARGV[3]  the other owner, which no earlier step has
-- ARGV[4]  its lease in ms
-- ARGV[5]  the key of the requests to release the lock; empty: they do not count
-- ARGV[6]  1: an owner that was asked to release the lock is not replaced; 0: it is removed from the requests
-- ARGV[7]  only of a writer: number of fields of the hash if no other hold is in it
-- Returns  1: the other owner holds the lock; 0: neither does
--          else the owner still holds the lock
--          -1: because the hash has other fields
--          -2: because it was asked to release it
--          else because it must have released it after these ms, minus 2
if redis.call('HEXISTS', KEYS[1], ARGV[3]) == 1 then
    -- The step was repeated. The client counts the lease from when it was sent last: the expiry may only move later.
    if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[4]) then
        redis.call('PEXPIRE', KEYS[1], ARGV[4])
    end
    return 1
end
local held = redis.call('HEXISTS', KEYS[1], ARGV[1])
if held == 1 and ARGV[7] and redis.call('HLEN', KEYS[1]) ~= tonumber(ARGV[7]) then
    return -1
end
if ARGV[6] == '1' then
    -- pcall: without permission, or while the slot moves, requests do not count.
    local score = held == 1 and redis.pcall('ZSCORE', ARGV[5], ARGV[1])
    local limit = type(score) == 'string' and tonumber(score)
    if limit and limit > 900000000000000 then
        return -2
    elseif limit then
        local time = redis.call('TIME')
        return math.floor(math.max(limit - time[1] * 1000 - time[2] / 1000, 0)) + 2
    end
elseif ARGV[5] ~= '' then
    -- pcall: without permission, or while the slot moves, the request remains until it expires.
    redis.pcall('ZREM', ARGV[5], ARGV[1])
end
if held == 1 then
    -- Deletes nothing, but counts as a write. An out-of-memory server refuses HSET unless the script has
    -- already written.
    redis.call('HDEL', KEYS[1], '')
    redis.call('HSET', KEYS[1], ARGV[3], 1)
    redis.call('HDEL', KEYS[1], ARGV[1])
    redis.call('PEXPIRE', KEYS[1], ARGV[4])
end
-- Waiters sleep until the end of the lease that the store reported to them, and it may be earlier now. If FLUSHALL or
-- DEL deleted the lock, no other step wakes them.
if ARGV[2] ~= '' and (held == 1 or redis.call('EXISTS', KEYS[1]) == 0) then
    wake(1, ARGV[2])
end
return held
