-- Acquires the lock for an owner, or returns how long another owner may still hold it.
--
-- KEYS[1]  the lock: hash owner -> hold count
-- ARGV     owner, lease in ms, requested hold count (default 1)
-- Returns  nil: held now, with that count
--          else the holder's remaining ms (-1: a key that never expires); 0 if the lock is free
--          but more than one hold was requested: the hold to re-enter has been lost
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
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
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
-- The owner already holds it: the end may only move later.
if left < tonumber(ARGV[2]) then
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return nil
