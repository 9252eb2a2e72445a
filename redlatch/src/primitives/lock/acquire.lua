-- Takes the lock for an owner, or says how long somebody else may still have it.
--
-- KEYS[1]  the lock: hash owner -> hold count
-- ARGV     owner, lease in ms, hold count wanted (none: 1)
-- Returns  nil: held now, with that count
--          else the remaining ms of whoever holds it (-1: a key that never expires); 0 when nobody
--          holds it but more than one hold was wanted: what was to be entered again has been lost
--
-- A free lock takes three calls. PTTL goes first because it answers two questions at once: is
-- there a key at all, and for how long.
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
-- Ours already: the end may move away, never nearer.
if left < tonumber(ARGV[2]) then
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return nil
