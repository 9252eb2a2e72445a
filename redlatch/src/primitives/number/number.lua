-- Stands before the scripts of semaphores and latches.
--
-- The number under a key; nil if there is nothing. If there is something else: nil, and the error to
-- return. More digits than these would not be exact in Lua.
local function number(key)
    local text = redis.call('GET', key)
    if not text then
        return nil
    end
    if text == '0' or (#text <= 15 and string.find(text, '^-?[1-9]%d*$')) then
        return tonumber(text)
    end
    return nil, redis.error_reply('WRONGKIND no number')
end

