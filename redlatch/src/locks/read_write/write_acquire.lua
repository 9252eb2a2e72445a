-- Acquires the write side for an owner, or returns how long other owners may still read or write.
--
-- KEYS[1]  the lock: hash mode -> read | write, owner:write -> hold count
-- KEYS[2]  the waiting writers, only if the handle prefers writers: sorted set owner:write -> timestamp
-- ARGV[1]  owner:write
-- ARGV[2]  lease in ms
-- ARGV[3]  requested hold count
-- ARGV[4]  prefix of the holds' timeout keys
-- ARGV[5]  owner
-- ARGV[6]  ms for which new readers are blocked if this request must wait; 0: they are not blocked
-- Returns  nil: the owner holds the write side with this count
--          0: more than one hold was requested, but the owner has none: the hold to re-enter was lost
--          -3: the owner reads, so it would wait for itself
--          else the ms to wait; -1: the key never expires
local left = redis.call('PTTL', KEYS[1])
if left == -2 then
    if ARGV[3] ~= '1' then
        return 0
    end
    redis.call('HSET', KEYS[1], 'mode', 'write', ARGV[1], ARGV[3])
    expire(KEYS[1], ARGV[2])
    if KEYS[2] then
        redis.call('ZREM', KEYS[2], ARGV[1])
    end
    return nil
end
local fields = redis.call('HMGET', KEYS[1], 'mode', ARGV[1], ARGV[5])
if not is_mode(fields[1]) then
    return redis.error_reply('WRONGKIND not a read-write lock')
end
if left == -1 then
    return left
end
if fields[1] == 'write' and fields[2] then
    redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
    -- The owner already holds it: the expiry may only move later.
    if left < tonumber(ARGV[2]) then
        redis.call('PEXPIRE', KEYS[1], ARGV[2])
    end
    if KEYS[2] then
        redis.call('ZREM', KEYS[2], ARGV[1])
    end
    return nil
end
if ARGV[3] ~= '1' then
    return 0
end
if longest_remaining(ARGV[4], ARGV[5], fields[3]) > 0 then
    return -3
end
local block_ms = tonumber(ARGV[6])
if KEYS[2] and block_ms > 0 then
    local now = now_ms()
    redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
    redis.call('ZADD', KEYS[2], now + block_ms, ARGV[1])
    expire(KEYS[2], block_ms)
    -- A writer that retries in time renews its timestamp, so it blocks readers for as long as it waits.
    left = math.min(left, math.floor(block_ms / 3))
end
return left
