-- Increases the token to a number; never decreases it.
--
-- KEYS[1]  the token
-- ARGV[1]  minimum of the new token, from 0 to 2^63 - 2
-- Returns  the new token, as text
local token = redis.call('GET', KEYS[1])
if token and token ~= '0' and not token:find('^-?[1-9]%d*$') then
    return redis.error_reply('WRONGKIND its token is no number that can be counted up')
end

-- Compares text, because Lua numbers are exact only up to 2^53: the longer number is greater.
local function is_less(a, b)
    return a:sub(1, 1) == '-' or #a < #b or (#a == #b and a < b)
end

if is_less(token or '0', ARGV[1]) then
    redis.call('SET', KEYS[1], ARGV[1])
    return ARGV[1]
end
return token or '0'
