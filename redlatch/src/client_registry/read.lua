-- Reads the hash of a client. Never fails because of its content.
--
-- KEYS[1]  the hash
-- ARGV[1]  the largest number of fields
-- ARGV[2]  the largest number of bytes of a field or a value: longer ones are omitted
-- ARGV     the fields to read; none: all
-- Returns  the time in ms, and each field with its value. 0: it is no hash, or has too many fields
local key, longest = KEYS[1], tonumber(ARGV[2])
local kind = redis.call('TYPE', key).ok
if kind ~= 'none' and (kind ~= 'hash' or redis.call('HLEN', key) > tonumber(ARGV[1])) then
    return 0
end
local time = redis.call('TIME')
local found = { math.floor(time[1] * 1000 + time[2] / 1000) }
local function append(field, value)
    if value and #field <= longest and #value <= longest then
        table.insert(found, field)
        table.insert(found, value)
    end
end
if #ARGV > 2 then
    for i = 3, #ARGV do
        append(ARGV[i], redis.call('HGET', key, ARGV[i]))
    end
else
    local all = redis.call('HGETALL', key)
    for i = 1, #all, 2 do
        append(all[i], all[i + 1])
    end
end
return found
