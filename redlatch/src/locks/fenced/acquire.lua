-- Acquires the lock for an owner and increments the fencing token, or returns how long another
-- owner may still hold it. The caller prepends count_token.lua or clock_token.lua.
--
-- KEYS[1]  the lock: hash owner -> hold count
-- KEYS[2]  the token: a number that only increases
-- ARGV[1]  owner
-- ARGV[2]  lease in ms
-- ARGV[3]  requested hold count
-- ARGV[4]  only with clock_token.lua: see there
-- Returns  { token }: the owner holds the lock with this count
--          0: the lock is free, but more than one hold was requested: the hold to re-enter was lost
--          else the remaining ms of the holder; -1: the key never expires

local left = redis.call('PTTL', KEYS[1])
if left == -2 then
    if ARGV[3] ~= '1' then
        return 0
    end
    local token, error_reply = next_token(KEYS[2], ARGV[4])
    if not token then
        return error_reply
    end
    redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
    expire(KEYS[1], ARGV[2])
    return { token }
end
local held = redis.call('HMGET', KEYS[1], ARGV[1], 'mode')
if held[2] then
    return redis.error_reply('WRONGKIND a read-write lock')
end
if not held[1] then
    return left
end
-- Repeated because the answer was lost: the owner already has its token, unless that has expired or was deleted.
local token, error_reply = held[1] == ARGV[3] and redis.call('GET', KEYS[2])
if not token then
    token, error_reply = next_token(KEYS[2], ARGV[4])
    if not token then
        return error_reply
    end
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
if left < tonumber(ARGV[2]) then
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return { token }
