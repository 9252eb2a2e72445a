-- What there is under some names, whatever it is. Never fails because of one key.
--
-- KEYS     for each name six: its key; queue and timeouts, should it be a fair lock; token, should it
--          be fenced; deadlines, should it be an expirable semaphore; what the keys of its readers
--          begin with, should it be a read-write lock
-- Returns  for each, with remaining times in ms (-1: for ever):
--          nil: nothing
--          { 'lock', owner or nil, hold count, remaining, token or nil, waiting owner, remaining, ... }
--          { 'rwlock', mode, owner, hold count, remaining, ... }
--          { 'number', value, remaining }
--          { 'permits', available, id, remaining, ... }
--          { 'other', what it is }
local time = redis.call('TIME')
local now = math.floor(time[1] * 1000 + time[2] / 1000)

-- Members of a sorted set of dates that are not over, with how long they have.
local function lasting(key, into)
    local dates = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
    local over = 0
    for i = 1, #dates, 2 do
        local left = tonumber(dates[i + 1]) - now
        if left <= 0 then
            over = over + 1
        else
            table.insert(into, dates[i])
            -- The date of what never expires is beyond all others.
            table.insert(into, left > 900000000000000 and -1 or math.floor(left))
        end
    end
    return over
end

local function lock(key, queue, timeouts, token, owner, holds)
    local fence = redis.pcall('GET', token)
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

local function rwlock(key, readers, fields)
    local seen = { 'rwlock', redis.call('HGET', key, 'mode') }
    for i = 1, #fields, 2 do
        local owner, holds = fields[i], tonumber(fields[i + 1])
        if owner ~= 'mode' and holds then
            local left = redis.call('PTTL', key)
            if not string.match(owner, ':write$') then
                -- A reader holds it as long as the last of its timeouts.
                left = 0
                for n = 1, math.min(holds, 1000) do
                    local own = redis.call('PTTL', readers .. owner .. ':rwlock_timeout:' .. n)
                    if own == -1 or left == -1 then
                        left = -1
                    else
                        left = math.max(left, own)
                    end
                end
            end
            if left ~= 0 then
                table.insert(seen, owner)
                table.insert(seen, fields[i + 1])
                table.insert(seen, left)
            end
        end
    end
    return seen
end

local function look(key, queue, timeouts, token, deadlines, readers)
    local kind = redis.call('TYPE', key).ok
    if kind == 'none' then
        if redis.call('EXISTS', token, queue) > 0 then
            local seen = lock(key, queue, timeouts, token, false, '0')
            return (seen[5] or #seen > 5) and seen
        end
        return false
    end
    if kind == 'hash' then
        local fields = redis.call('HGETALL', key)
        if redis.call('HEXISTS', key, 'mode') == 1 then
            return rwlock(key, readers, fields)
        end
        if #fields == 2 and string.match(fields[1], '^.+:%d+$') and string.match(fields[2], '^%d+$') then
            return lock(key, queue, timeouts, token, fields[1], fields[2])
        end
        return { 'other', 'a hash of another kind' }
    end
    if kind == 'string' then
        local value = redis.call('GETRANGE', key, 0, 20)
        if not string.match(value, '^-?%d+$') or #value > 19 then
            return { 'other', 'a text' }
        end
        if redis.call('TYPE', deadlines).ok ~= 'zset' then
            return { 'number', value, redis.call('PTTL', key) }
        end
        local seen = { 'permits', value }
        seen[2] = tostring(value + lasting(deadlines, seen))
        return seen
    end
    return { 'other', 'a ' .. kind }
end

local seen = {}
for i = 1, #KEYS, 6 do
    table.insert(seen, look(KEYS[i], KEYS[i + 1], KEYS[i + 2], KEYS[i + 3], KEYS[i + 4], KEYS[i + 5]))
end
return seen
