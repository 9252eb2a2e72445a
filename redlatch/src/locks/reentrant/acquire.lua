-- Acquires the lock for an owner, or returns how long another owner may still hold it.
--
-- KEYS[1]  the lock: hash owner -> hold count
-- ARGV[1]  owner
-- ARGV[2]  lease in ms
-- ARGV[3]  requested hold count; absent: 1
-- Returns  nil: the owner holds the lock with this count
--          0: the lock is free, but more than one hold was requested: the hold to re-enter was lost
--          else the remaining ms of the holder; -1: the key never expires
--
-- A free lock takes three calls. PTTL comes first because it answers two questions at once: whether
-- the key exists, and how long it lives.
local count = ARGV[3] or '1'
local left = redis.call('PTTL', KEYS[1])
if left == -2 then
    if count ~= '1' then
        return 0
    end
    redis.call('HSET', KEYS[1], ARGV[1], count)
    expire(KEYS[1], ARGV[2])
    return nil
end
local held = redis.call('HMGET', KEYS[1], ARGV[1], 'mode')
if held[2] then
    return redis.error_reply('WRONGKIND a read-write lock')
end
if not held[1] then
    return left
end
redis.call('HSET', KEYS[1], ARGV[1], count)
-- The owner already holds it: the expiry may only move later.
if left < tonumber(ARGV[2]) then
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return nil
