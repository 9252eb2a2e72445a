-- As count_token.lua, but the token is at least the server's clock, in µs since 1970. The key expires `grace` ms after the
-- clock has passed the token: the next token without the key is greater, unless the clock was set back for longer than
-- the key is missing. The caller prepends numbers.lua.
local function next_token(key, grace)
    local latest = redis.pcall('GET', key) or '0'
    if type(latest) == 'table' then
        return nil, latest
    elseif not can_count_up(latest) then
        return nil, redis.error_reply('WRONGKIND its token is no number that can be counted up')
    end
    local time = redis.call('TIME')
    local clock = time[1] * 1000000 + time[2]
    -- Exact where it is small.
    local ahead = math.max(tonumber(latest) + 1 - clock, 0)
    local left = string.format('%.0f', math.floor(ahead / 1000) + grace)
    local reply
    if ahead == 0 then
        -- One command: the key never exists without an expiry.
        latest = string.format('%.0f', clock)
        reply = redis.pcall('SET', key, latest, 'PX', left)
    else
        reply = redis.pcall('INCR', key)
        reply = type(reply) == 'table' and reply or redis.pcall('PEXPIRE', key, left)
    end
    if type(reply) == 'table' and reply['err'] then
        return nil, reply
    end
    return ahead == 0 and latest or redis.call('GET', key)
end

