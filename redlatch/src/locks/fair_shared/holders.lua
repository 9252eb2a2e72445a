-- Behind fair/queue.lua, in the scripts of fair objects that several owners may hold: the holders, and for which waiter the object is
-- free. An object has a number of permits. A holder has one of them, or as many as its field says, or all if it writes.
--
-- KEYS     see fair/queue.lua, but
-- KEYS[1]  the object: hash mode -> fair_rwlock | fair_semaphore, and for each holder: field -> hold count, field:expire_time -> end of its hold in epoch
--          ms. A field is an owner, owner:write, or owner#permits. The key lives as long as each hold.
--
-- A hold lasts until that time, by the server's clock. `now` is truncated to whole ms, to find the holds that have ended.
-- `now_rounded_up` is rounded up, so that a lease that begins now is not shortened by a part of a millisecond.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local now_rounded_up = math.ceil(time[1] * 1000 + time[2] / 1000)
now_ms = function()
    return now
end

-- The end of each hold, the number of held permits, and of all permits. A read-write lock has more than it will have readers.
local ends, held, total, own_mode = {}, 0, 0, nil
local UNLIMITED = 4294967295

local function permits_of(field)
    if string.sub(field, -6) == ':write' then
        return total
    end
    return tonumber(string.match(field, '#(%d+)$')) or 1
end

-- Reads the holders, and removes those whose holds have ended. Returns an error if the key has other data.
local function load_holders(permits)
    total = tonumber(permits)
    own_mode = total == UNLIMITED and 'fair_rwlock' or 'fair_semaphore'
    local mode = redis.pcall('HGET', KEYS[1], 'mode')
    if mode == own_mode then
        local fields = redis.call('HGETALL', KEYS[1])
        for i = 1, #fields, 2 do
            local field = string.match(fields[i], '^(.+):expire_time$')
            local at = field and tonumber(fields[i + 1])
            if at and at > now then
                ends[field] = at
                held = held + permits_of(field)
            elseif field then
                redis.call('HDEL', KEYS[1], field, fields[i])
            end
        end
        if not next(ends) then
            redis.call('DEL', KEYS[1])
        end
    elseif mode or redis.call('EXISTS', KEYS[1]) == 1 then
        return type(mode) == 'table' and mode or redis.error_reply('WRONGKIND a lock of another kind')
    end
end

announced_object = function()
    return own_mode .. ':' .. KEYS[1]
end

reserve = function(field, lease)
    held = held + (ends[field] and 0 or permits_of(field))
    ends[field] = math.max(ends[field] or 0, now_rounded_up + lease)
end

-- Sets the hold count of an owner. Its hold may only end later.
local function set_hold(field, count, lease)
    reserve(field, lease)
    local left = redis.call('PTTL', KEYS[1])
    -- The expiry of an existing key comes first, because it may be refused.
    if lease > 0 and left ~= -2 and left < lease then
        redis.call('PEXPIRE', KEYS[1], lease)
    end
    redis.call('HSET', KEYS[1], 'mode', own_mode, field, count, field .. ':expire_time', string.format('%.0f', ends[field]))
    if left == -2 then
        expire(KEYS[1], lease)
    end
end

local function remove_hold(field)
    held = held - permits_of(field)
    ends[field] = nil
    if next(ends) then
        redis.call('HDEL', KEYS[1], field, field .. ':expire_time')
    else
        redis.call('DEL', KEYS[1])
    end
end

hold = function(field, lease)
    set_hold(field, '1', lease)
end

left_for = function(field)
    local wanted, free = permits_of(field), total - held
    if wanted <= free then
        return nil
    end
    local holds = {}
    for holder, at in pairs(ends) do
        table.insert(holds, { at, permits_of(holder) })
    end
    table.sort(holds, function(one, other)
        return one[1] < other[1]
    end)
    for _, it in ipairs(holds) do
        free = free + it[2]
        if wanted <= free then
            return it[1] - now
        end
    end
    -- More than there are: a client with a higher number may serve it.
    return MAX_SLEEP
end

-- All waiters queue.
wake_unqueued = function() end

