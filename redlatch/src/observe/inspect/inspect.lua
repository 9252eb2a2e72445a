-- Returns the objects under some names, of any kind. Never fails because of a single key.
--
-- KEYS     for each name:
--            its key
--            queue, of a fair lock
--            timeouts, of a fair lock
--            token, of a fenced lock
--            deadlines, of an expirable semaphore
--            prefix of the readers' timeout keys, of a read-write lock
--            queue and timeouts, of a fair object that several owners may hold
-- Returns  for each name, with remaining times in ms (-1: forever):
--          nil: no object
--          { 'lock', owner or nil, hold count, remaining, token or nil, waiting owner, remaining, ... }
--          { 'rwlock', side, owner, hold count, remaining, ... }
--          { 'fair', number of holds, field, hold count, remaining, ..., waiting field, remaining, ... }
--          { 'number', value, remaining }
--          { 'permits', value, number of expired permits, id, remaining, ... }
--          { 'other', its type }
local time = redis.call('TIME')
local now = math.floor(time[1] * 1000 + time[2] / 1000)

-- Appends the members of a sorted set whose timestamps are in the future, each with its remaining time, to
-- `list`. Returns the number of the other members.
local function append_unexpired(key, list)
    local timestamps = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
    local expired = 0
    for i = 1, #timestamps, 2 do
        local left = tonumber(timestamps[i + 1]) - now
        if left <= 0 then
            expired = expired + 1
        else
            table.insert(list, timestamps[i])
            -- A member that never expires has a timestamp beyond all others.
            table.insert(list, left > 900000000000000 and -1 or math.floor(left))
        end
    end
    return expired
end

-- Appends the waiters of a queue whose time has not passed to `object`, each with its remaining time.
local function append_waiters(queue, timeouts, object)
    if redis.call('TYPE', queue).ok == 'list' and redis.call('TYPE', timeouts).ok == 'zset' then
        for _, waiting in ipairs(redis.call('LRANGE', queue, 0, -1)) do
            local left = tonumber(redis.call('ZSCORE', timeouts, waiting) or 0) - now
            if left > 0 then
                table.insert(object, waiting)
                table.insert(object, math.floor(left))
            end
        end
    end
    return object
end

local function lock(key, queue, timeouts, token, owner, holds)
    local token_value = redis.pcall('GETRANGE', token, 0, 20)
    local object = { 'lock', owner, holds, redis.call('PTTL', key), type(token_value) == 'string' and token_value }
    return append_waiters(queue, timeouts, object)
end

local function fair(key, queue, timeouts)
    local object, texts = { 'fair', '' }, {}
    local fields = redis.call('HGETALL', key)
    for i = 1, #fields, 2 do
        texts[fields[i]] = fields[i + 1]
    end
    for field, ends in pairs(texts) do
        local holder = string.match(field, '^(.+):expire_time$')
        local left = holder and texts[holder] and (tonumber(ends) or 0) - now or 0
        if left > 0 then
            table.insert(object, holder)
            table.insert(object, texts[holder])
            table.insert(object, left)
        end
    end
    object[2] = string.format('%d', (#object - 2) / 3)
    return append_waiters(queue, timeouts, object)
end

local function rwlock(key, readers)
    local object = { 'rwlock' }
    local left = redis.call('PTTL', key)
    local mode = each_holder(key, function(_, owner, side, count)
        local remaining = side == 'write' and left or longest_remaining(readers, owner, count)
        if remaining ~= 0 then
            table.insert(object, side)
            table.insert(object, owner)
            table.insert(object, count)
            table.insert(object, remaining)
        end
    end)
    return mode == -1 and { 'other', 'a hash of another kind' } or object
end

local function inspect_name(key, queue, timeouts, token, deadlines, readers, fair_queue, fair_timeouts)
    local kind = redis.call('TYPE', key).ok
    if kind == 'none' then
        -- The token of an earlier lock may remain for ever.
        if redis.call('EXISTS', fair_queue) == 1 and redis.call('EXISTS', queue) == 0 then
            return fair(key, fair_queue, fair_timeouts)
        end
        if redis.call('EXISTS', token, queue) > 0 then
            return lock(key, queue, timeouts, token, false, '0')
        end
        return false
    end
    if kind == 'hash' then
        -- Does not read a whole hash of another program, which may have many fields.
        local mode = redis.call('HGET', key, 'mode')
        if is_mode(mode) then
            return rwlock(key, readers)
        end
        if mode == 'fair_rwlock' or mode == 'fair_semaphore' then
            return fair(key, fair_queue, fair_timeouts)
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
        local object = { 'permits', value, '' }
        object[3] = string.format('%d', append_unexpired(deadlines, object))
        return object
    end
    return { 'other', 'a ' .. kind }
end

local objects = {}
for i = 1, #KEYS, 8 do
    table.insert(objects, inspect_name(unpack(KEYS, i, i + 7)))
end
return objects
