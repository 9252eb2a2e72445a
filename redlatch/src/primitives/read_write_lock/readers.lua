-- What the scripts of the read-write lock have in common; each begins with this.
--
-- A reader's n-th hold lives as long as the key `<base><owner>:rwlock_timeout:<n>`. A reader whose
-- holds have all ended is dead: its field may still be there, but keeps nobody out.

-- Nobody enters more often: what says so was written by somebody else, and must not keep the server
-- busy.
local function holds(count)
    return math.min(tonumber(count) or 0, 100000)
end

local function timeout(base, owner, n)
    return base .. owner .. ':rwlock_timeout:' .. n
end

-- For how many ms somebody reads on who has that many holds, those before `first` not counted.
-- 0: not any more.
local function longest(base, owner, count, first)
    local most = 0
    for n = first or 1, holds(count) do
        most = math.max(most, redis.call('PTTL', timeout(base, owner, n)))
    end
    return most
end

-- For how many ms anybody reads on. No longer than the lock itself is kept, so the first who comes
-- up to that is enough.
local function longest_of_all(key, base, left)
    local most = 0
    local fields = redis.call('HGETALL', key)
    for i = 1, #fields, 2 do
        most = math.max(most, longest(base, fields[i], fields[i + 1]))
        if most >= left then
            break
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
    for n = first, holds(count) do
        redis.call('DEL', timeout(base, owner, n))
    end
end

-- Now, in ms, as waiting writers are dated: the server's clock, which all clients share.
local function today()
    local time = redis.call('TIME')
    return time[1] * 1000 + math.floor(time[2] / 1000)
end

