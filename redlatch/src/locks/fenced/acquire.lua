-- Acquires the lock for an owner and increments the fencing token, or returns how long another
-- owner may still hold it.
--
-- KEYS[1]  the lock: hash owner -> hold count
-- KEYS[2]  the token: a number that only increases
-- ARGV[1]  owner
-- ARGV[2]  lease in ms
-- ARGV[3]  requested hold count
-- Returns  { token }: the owner holds the lock with this count
--          0: the lock is free, but more than one hold was requested: the hold to re-enter was lost
--          else the remaining ms of the holder; -1: the key never expires

-- Increments the token and returns it as text, because Lua numbers are exact only up to 2^53. If
-- that fails, returns nil and the error reply.
local function next_token()
    local reply = redis.pcall('INCR', KEYS[2])
    if type(reply) ~= 'table' then
        return redis.call('GET', KEYS[2])
    end
    local message = reply['err']
    if message:find('WRONGTYPE') or message:find('not an integer') or message:find('overflow') then
        return nil, redis.error_reply('WRONGKIND its token is no number that can be counted up')
    end
    -- The key is not the cause: the server is out of memory, or accepts no writes.
    return nil, reply
end

local left = redis.call('PTTL', KEYS[1])
if left == -2 then
    if ARGV[3] ~= '1' then
        return 0
    end
    local token, error_reply = next_token()
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
local token, error_reply
if held[1] == ARGV[3] then
    -- Repeated because the answer was lost: the owner already has its token.
    token = redis.call('GET', KEYS[2]) or '0'
else
    token, error_reply = next_token()
    if not token then
        return error_reply
    end
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
if left < tonumber(ARGV[2]) then
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return { token }
