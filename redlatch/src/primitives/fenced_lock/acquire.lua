-- Takes the lock for an owner and counts the fencing token up, or says how long somebody else may
-- still have it.
--
-- KEYS     the lock: hash owner -> hold count; the token: a number that only grows
-- ARGV     owner, lease in ms, hold count wanted
-- Returns  { token }: held now, with that count
--          else the remaining ms of whoever holds it (-1: a key that never expires); 0 when nobody
--          holds it but more than one hold was wanted: what was to be entered again has been lost

-- Counts the token up. As text, because Lua's own numbers are exact up to 2^53 only.
local function next_token()
    local counted = redis.pcall('INCR', KEYS[2])
    if type(counted) == 'table' then
        return nil
    end
    return redis.call('GET', KEYS[2])
end

local NO_TOKEN = 'WRONGKIND its token is no number that can be counted up'
local left = redis.call('PTTL', KEYS[1])
if left == -2 then
    if ARGV[3] ~= '1' then
        return 0
    end
    local token = next_token()
    if not token then
        return redis.error_reply(NO_TOKEN)
    end
    redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
    return { token }
end
local held = redis.call('HMGET', KEYS[1], ARGV[1], 'mode')
if held[2] then
    return redis.error_reply('WRONGKIND a read-write lock')
end
if not held[1] then
    return left
end
local token
if held[1] == ARGV[3] then
    -- Asked for again because the answer was lost: it has its token already.
    token = redis.call('GET', KEYS[2]) or '0'
else
    token = next_token()
    if not token then
        return redis.error_reply(NO_TOKEN)
    end
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
if left < tonumber(ARGV[2]) then
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return { token }
