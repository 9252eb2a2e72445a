-- Shared functions of the read-write lock's scripts. Prepended to each script.
--
-- A reader's n-th hold lasts until the key `<prefix><owner>:rwlock_timeout:<n>` expires. A reader whose
-- holds have all expired is dead: its field may still exist, but it blocks no owner.

-- Returns how many of a reader's holds have their own key. Further holds share the last one: a
-- count written by another program must not keep the server busy.
local function keyed_holds(count)
    return math.min(tonumber(count) or 0, 10000)
end

local function timeout_key(prefix, owner, n)
    return prefix .. owner .. ':rwlock_timeout:' .. n
end

-- Returns the longest remaining ms of a reader's holds, from the hold `first` on. 0: all have expired.
local function longest_remaining(prefix, owner, count, first)
    local longest = 0
    for n = first or 1, keyed_holds(count) do
        local left = redis.call('PTTL', timeout_key(prefix, owner, n))
        -- 0: the last millisecond, in which the hold still lasts.
        longest = math.max(longest, left == 0 and 1 or left)
    end
    return longest
end

-- Returns the owner of a holder's field, and its side; nil if the field is not a holder's.
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
local function longest_reader_remaining(key, prefix)
    local longest = 0
    local fields = redis.call('HGETALL', key)
    for i = 1, #fields, 2 do
        local owner, side = holder(fields[i], fields[i + 1])
        if owner and side == 'read' then
            local left = longest_remaining(prefix, owner, fields[i + 1])
            if left == 0 then
                redis.call('HDEL', key, fields[i])
            end
            longest = math.max(longest, left)
        end
    end
    return longest
end

-- Returns whether the field `mode` of a hash has a value that only a read-write lock has.
local function is_mode(mode)
    return mode == 'read' or mode == 'write'
end

-- Deletes the timeouts of a reader's holds, from the hold `first` on.
local function delete_timeouts(prefix, owner, count, first)
    for n = first, keyed_holds(count) do
        redis.call('DEL', timeout_key(prefix, owner, n))
    end
end

-- The server's clock in ms, because the clients' clocks may differ. The timestamps of waiting writers use it.
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
