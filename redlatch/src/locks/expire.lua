-- Sets the time to live of a key that the script has written. If the server refuses that, deletes a key without one, which would
-- stay for ever, and raises the error.
local function expire(key, ms)
    local reply = redis.pcall('PEXPIRE', key, ms)
    if type(reply) == 'table' then
        if redis.call('PTTL', key) == -1 then
            redis.call('DEL', key)
        end
        error(reply.err, 0)
    end
end

