-- Shared functions of the read-write lock's scripts. Prepended to each script.
--
-- A reader's n-th hold lives as long as the key `<base><owner>:rwlock_timeout:<n>`. A reader whose
-- holds have all ended is dead: its field may still exist, but it blocks no owner.

-- Returns how many of a reader's holds have their own key. Further holds share the last one: a
-- count written by another program must not keep the server busy.
local function keyed_holds(count)
    return math.min(tonumber(count) or 0, 10000)
end

local function timeout_key(base, owner, n)
    return base .. owner .. ':rwlock_timeout:' .. n
end

-- Returns the longest remaining ms of a reader's holds, from the hold `first` on. 0: all have ended.
local function longest_remaining(base, owner, count, first)
    local most = 0
    for n = first or 1, keyed_holds(count) do
        most = math.max(most, redis.call('PTTL', timeout_key(base, owner, n)))
    end
    return most
end

-- Returns the owner that a field stands for, and its side; nothing if it is not a holder's field.
local function holder(field, count)
    if not string.match(count, '^%d+$') then
        return nil
    end
    local writer = string.match(field, '^(.+:%d+):write$')
    if writer then
        return writer, 'write'
    end
    return string.match(field, '^.+:%d+$'), 'read'
end

-- Returns the longest remaining ms of all readers. Removes dead readers, so that they do not
-- accumulate while others keep reading.
local function longest_reader_remaining(key, base)
    local most = 0
    local fields = redis.call('HGETALL', key)
    for i = 1, #fields, 2 do
        local owner, side = holder(fields[i], fields[i + 1])
        if owner and side == 'read' then
            local left = longest_remaining(base, owner, fields[i + 1])
            if left == 0 then
                redis.call('HDEL', key, fields[i])
            end
            most = math.max(most, left)
        end
    end
    return most
end

-- Returns whether a hash has a mode, which only a read-write lock has.
local function is_mode(mode)
    return mode == 'read' or mode == 'write'
end

-- Ends the holds of a reader from the hold `first` on.
local function delete_timeouts(base, owner, count, first)
    for n = first, keyed_holds(count) do
        redis.call('DEL', timeout_key(base, owner, n))
    end
end

-- The server's clock in ms, by which waiting writers are dated: all clients share it.
local function now_ms()
    local time = redis.call('TIME')
    return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Wakes all waiters, because there is no writer any more. On `1` Redisson wakes all its sleeping
-- threads, but a thread that is only about to sleep misses it; on `0` it wakes one, or keeps the
-- permit for the next that would sleep.
local function wake_all(channel)
    redis.call('PUBLISH', channel, '1')
    redis.call('PUBLISH', channel, '0')
end
