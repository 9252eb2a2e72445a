-- Counts up the fencing token in `key` and returns it as text, because Lua numbers are exact only up to 2^53. If that
-- fails, returns nil and the error reply.
local function next_token(key)
    local reply = redis.pcall('INCR', key)
    if type(reply) ~= 'table' then
        return redis.call('GET', key)
    end
    local message = reply['err']
    if message:find('WRONGTYPE') or message:find('not an integer') or message:find('overflow') then
        return nil, redis.error_reply('WRONGKIND its token is no number that can be counted up')
    end
    -- The key is not the cause: the server is out of memory, or accepts no writes.
    return nil, reply
end

