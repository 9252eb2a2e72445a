-- What the scripts of the read-write lock have in common; each begins with this.
--
-- A reader's n-th hold lives as long as the key `<base><owner>:rwlock_timeout:<n>`. A reader whose
-- holds have all ended is dead: its field may still be there, but keeps nobody out.

-- How many of somebody's holds live by a key of their own. Those beyond share the last one: a count
-- that somebody else has written must not keep the server busy.
local function keyed(count)
    return math.min(tonumber(count) or 0, 10000)
end

local function timeout(base, owner, n)
    return base .. owner .. ':rwlock_timeout:' .. n
end

-- For how many ms somebody reads on who has that many holds, those before `first` not counted.
-- 0: not any more.
local function longest(base, owner, count, first)
    local most = 0
    for n = first or 1, keyed(count) do
        most = math.max(most, redis.call('PTTL', timeout(base, owner, n)))
    end
    return most
end

-- The owner whom a field stands for, and its side; nothing if it is no holder's.
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

-- For how many ms anybody reads on. Who has died is cleared away, so that the dead do not pile up for
-- as long as there is always somebody who lives.
local function longest_of_all(key, base)
    local most = 0
    local fields = redis.call('HGETALL', key)
    for i = 1, #fields, 2 do
        local owner, side = holder(fields[i], fields[i + 1])
        if owner and side == 'read' then
            local left = longest(base, owner, fields[i + 1])
            if left == 0 then
                redis.call('HDEL', key, fields[i])
            end
            most = math.max(most, left)
        end
    end
    return most
end

-- Whether a hash has a mode, as none but a read-write lock's has.
local function is_mode(mode)
    return mode == 'read' or mode == 'write'
end

-- Ends the holds of a reader from the `first` on.
local function forget(base, owner, count, first)
    for n = first, keyed(count) do
        redis.call('DEL', timeout(base, owner, n))
    end
end

-- Now, in ms, as waiting writers are dated: the server's clock, which all clients share.
local function today()
    local time = redis.call('TIME')
    return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Nobody writes any more: all who wait may look. At `1` Redisson wakes all its threads that sleep, and
-- forgets it for one that is only about to; at `0` it wakes one, or keeps it for the next that would sleep.
local function call_all(channel)
    redis.call('PUBLISH', channel, '1')
    redis.call('PUBLISH', channel, '0')
end
