-- Acquires the write side for an owner, or returns how long others may still read or write.
--
-- KEYS     the lock: hash mode -> read | write, owner:write -> hold count; for a handle that
--          prefers writers also the waiting writers: sorted set owner:write -> timestamp
-- ARGV     owner:write, lease in ms, requested hold count, the prefix of the holds' timeout keys,
--          owner, for how many ms new readers are blocked if this has to wait (0: not at all)
-- Returns  nil: held now, with that count
--          else the ms to wait (-1: a key that never expires); 0 if more than one hold was requested
--          and there is none: the hold to re-enter has been lost
--          -3: this owner reads, and would wait for itself
local left = redis.call('PTTL', KEYS[1])
if left == -2 then
    if ARGV[3] ~= '1' then
        return 0
    end
    redis.call('HSET', KEYS[1], 'mode', 'write', ARGV[1], ARGV[3])
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
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
    -- The owner already holds it: the end may only move later.
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
local mark = tonumber(ARGV[6])
if KEYS[2] and mark > 0 then
    local now = now_ms()
    redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
    redis.call('ZADD', KEYS[2], now + mark, ARGV[1])
    redis.call('PEXPIRE', KEYS[2], mark)
    -- If the writer retries in time, its mark does not expire while it waits.
    left = math.min(left, math.floor(mark / 3))
end
return left
