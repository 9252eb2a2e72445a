-- Prepended to the scripts of semaphores and latches.
--
-- Returns the value of a counter; nil if it does not exist. For a key with other data: nil, and the
-- error to return. Numbers with more digits would not be exact in Lua.
local function read_counter(key)
    local text = redis.call('GET', key)
    if not text then
        return nil
    end
    if text == '0' or (#text <= 15 and string.find(text, '^-?[1-9]%d*$')) then
        return tonumber(text)
    end
    return nil, redis.error_reply('WRONGKIND no number')
end

