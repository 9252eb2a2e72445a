-- Returns the objects under some names, of any kind. Never fails because of a single key.
--
-- KEYS     for each name six: its key; queue and timeouts, for a fair lock; token, for a fenced lock;
--          deadlines, for an expirable semaphore; prefix of the readers' timeout keys, for a
--          read-write lock
-- Returns  for each, with remaining times in ms (-1: forever):
--          nil: no object
--          { 'lock', owner or nil, hold count, remaining, token or nil, waiting owner, remaining, ... }
--          { 'rwlock', side, owner, hold count, remaining, ... }
--          { 'number', value, remaining }
--          { 'permits', value, number of expired permits, id, remaining, ... }
--          { 'other', its type }
local time = redis.call('TIME')
local now = math.floor(time[1] * 1000 + time[2] / 1000)

-- Appends the members of a sorted set of timestamps that have not passed, with the time left. Returns
-- the number of passed timestamps.
local function lasting(key, into)
    local timestamps = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
    local expired = 0
    for i = 1, #timestamps, 2 do
        local left = tonumber(timestamps[i + 1]) - now
        if left <= 0 then
            expired = expired + 1
        else
            table.insert(into, timestamps[i])
            -- A member that never expires has a timestamp beyond all others.
            table.insert(into, left > 900000000000000 and -1 or math.floor(left))
        end
    end
    return expired
end

local function lock(key, queue, timeouts, token, owner, holds)
    local fence = redis.pcall('GETRANGE', token, 0, 20)
    local seen = { 'lock', owner, holds, redis.call('PTTL', key), type(fence) == 'string' and fence }
    if redis.call('TYPE', queue).ok == 'list' and redis.call('TYPE', timeouts).ok == 'zset' then
        for _, waiting in ipairs(redis.call('LRANGE', queue, 0, -1)) do
            local left = tonumber(redis.call('ZSCORE', timeouts, waiting) or 0) - now
            if left > 0 then
                table.insert(seen, waiting)
                table.insert(seen, math.floor(left))
            end
        end
    end
    return seen
end

local function rwlock(key, readers)
    local seen = { 'rwlock' }
    local left = redis.call('PTTL', key)
    local mode = each_holder(key, function(_, owner, side, count)
        local for_ms = side == 'write' and left or longest_remaining(readers, owner, count)
        if for_ms ~= 0 then
            table.insert(seen, side)
            table.insert(seen, owner)
            table.insert(seen, count)
            table.insert(seen, for_ms)
        end
    end)
    return mode == -1 and { 'other', 'a hash of another kind' } or seen
end

local function inspect_name(key, queue, timeouts, token, deadlines, readers)
    local kind = redis.call('TYPE', key).ok
    if kind == 'none' then
        if redis.call('EXISTS', token, queue) > 0 then
            return lock(key, queue, timeouts, token, false, '0')
        end
        return false
    end
    if kind == 'hash' then
        -- Does not read hashes of other programs, however many fields they have.
        if is_mode(redis.call('HGET', key, 'mode')) then
            return rwlock(key, readers)
        end
        if redis.call('HLEN', key) == 1 then
            local fields = redis.call('HGETALL', key)
            local owner, side = holder(fields[1], fields[2])
            if side == 'read' and owner then
                return lock(key, queue, timeouts, token, owner, fields[2])
            end
        end
        return { 'other', 'a hash of another kind' }
    end
    if kind == 'string' then
        local value = redis.call('GETRANGE', key, 0, 20)
        if not string.match(value, '^-?%d+$') then
            return { 'other', 'a text' }
        end
        if redis.call('TYPE', deadlines).ok ~= 'zset' then
            return { 'number', value, redis.call('PTTL', key) }
        end
        -- Not added up here, because numbers beyond 2^53 are not exact.
        local seen = { 'permits', value, '' }
        seen[3] = string.format('%d', lasting(deadlines, seen))
        return seen
    end
    return { 'other', 'a ' .. kind }
end

local seen = {}
for i = 1, #KEYS, 6 do
    table.insert(seen, inspect_name(KEYS[i], KEYS[i + 1], KEYS[i + 2], KEYS[i + 3], KEYS[i + 4], KEYS[i + 5]))
end
return seen
