-- Who holds each of some locks, how often, and for how long. Never fails because of one key.
--
-- KEYS     the locks: hashes owner -> hold count
-- Returns  for each: nil: free
--          { owner, hold count, remaining ms (-1: never expires) }
--          -1: the key is a hash, but no lock; -2: the key is of another type
local function look(key)
    local fields = redis.pcall('HLEN', key)
    if type(fields) ~= 'number' then
        return -2
    end
    if fields == 0 then
        return false
    end
    if fields > 1 then
        return -1
    end
    local holder = redis.call('HGETALL', key)
    if not (string.match(holder[1], '^.+:%d+$') and string.match(holder[2], '^%d+$')) then
        return -1
    end
    return { holder[1], holder[2], redis.call('PTTL', key) }
end

local seen = {}
for i, key in ipairs(KEYS) do
    seen[i] = look(key)
end
return seen
