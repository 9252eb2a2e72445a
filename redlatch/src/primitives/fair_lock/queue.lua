-- What the steps of the fair lock share: those who wait, in order. Stands before each of the scripts.
--
-- KEYS     the lock: hash owner -> hold count
--          the queue: list of the owners that wait, the oldest first
--          the timeouts: zset owner -> date in ms until when it is waited for
--          the absent: zset owner -> date in ms until when a waiter that is not connected keeps its place
--
-- The head is waited for until the lock's end and its own wait time have passed, each further one
-- for its own wait time longer than the one before it.
--
-- A waiter listens on a channel of its own for as long as it waits. One to which no connection listens
-- is absent: it died, or it is just reconnecting. Absence counts only on a free lock whose head is absent:
-- then all absent waiters are noted together, so that one grace period passes for all of them at the same
-- time. An absent waiter is dropped when it is the head, its grace period has passed, and it is still
-- absent. So a waiter that is connected when its turn comes keeps its place, also if it was noted
-- before; and the timeouts, by which Redisson drops waiters, are not touched.

-- The server's clock, in ms: those of the clients may differ.
local function today()
    local time = redis.call('TIME')
    return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function waited_for(owner)
    return tonumber(redis.call('ZSCORE', KEYS[3], owner))
end

-- Moves the timeouts of everybody from a place in the queue on.
local function shift(place, by)
    for _, owner in ipairs(redis.call('LRANGE', KEYS[2], place, -1)) do
        redis.call('ZINCRBY', KEYS[3], by, owner)
    end
end

local function drop_head(owner)
    redis.call('LPOP', KEYS[2])
    redis.call('ZREM', KEYS[3], owner)
    redis.call('ZREM', KEYS[4], owner)
end

-- Drops the heads whose time has passed, except who asks: it is alive. Returns the head that there
-- is then, and whether anybody was dropped.
local function drop_given_up(now, asks)
    local dropped = false
    local head = redis.call('LINDEX', KEYS[2], 0)
    while head and head ~= asks and (waited_for(head) or now) <= now do
        drop_head(head)
        dropped = true
        head = redis.call('LINDEX', KEYS[2], 0)
    end
    return head, dropped
end

-- Calls who waits for the lock without queueing, through a handle of another kind: nobody in the queue
-- is passed over, because there is nobody.
local function call_others(channel)
    redis.call('PUBLISH', channel, '0')
end

-- Calls the head. Should it not hear (it has died, or is being connected again), also the next one,
-- and so on until somebody does: that one then knows how long the others are waited for. Returns
-- whether the head heard.
local function call(channel)
    local place = 0
    local owner = redis.call('LINDEX', KEYS[2], 0)
    while owner and redis.call('PUBLISH', channel .. ':' .. owner, '0') == 0 do
        place = place + 1
        owner = redis.call('LINDEX', KEYS[2], place)
    end
    return place == 0
end

local function is_connected(channel, owner)
    return redis.call('PUBSUB', 'NUMSUB', channel .. ':' .. owner)[2] > 0
end

-- Notes which waiters are absent, except the owner that asks. Looks at the first thousand waiters, so that
-- no queue holds up the server. Returns them in order, and by owner until when each absent one keeps its place.
local function note_absent(channel, now, grace, asks)
    local owners, channels, absent = redis.call('LRANGE', KEYS[2], 0, 999), {}, {}
    for i, owner in ipairs(owners) do
        channels[i] = channel .. ':' .. owner
    end
    local listeners = redis.call('PUBSUB', 'NUMSUB', unpack(channels))
    for i, owner in ipairs(owners) do
        if owner == asks or listeners[2 * i] > 0 then
            redis.call('ZREM', KEYS[4], owner)
        else
            local ends = tonumber(redis.call('ZSCORE', KEYS[4], owner))
            if not ends then
                ends = now + grace
                redis.call('ZADD', KEYS[4], ends, owner)
            end
            absent[owner] = ends
        end
    end
    -- Nothing is left behind where only Redisson empties the queue.
    local last = waited_for(redis.call('LINDEX', KEYS[2], -1)) or now
    redis.call('PEXPIRE', KEYS[4], math.max(last - now, grace) + grace)
    return owners, absent
end

-- Calls the next owner: the head of the queue, or those who do not queue if it is empty. Returns the head
-- if it did not hear.
local function call_next(channel)
    local head = redis.call('EXISTS', KEYS[2]) == 1 and drop_given_up(today())
    if not head then
        call_others(channel)
    elseif not call(channel) then
        return head
    end
end

-- The lock was released so many ms before its end: calls the next owner. A head that does not hear is
-- waited for as if the lock had ended just now; a second, if it is only being connected again.
local function call_after_release(channel, left, grace)
    local head = call_next(channel)
    if not head then
        return
    end
    local now = today()
    local _, absent = note_absent(channel, now, grace)
    -- Long enough for a waiter that listens at a replica, and is not counted here, to take its turn.
    if absent[head] and absent[head] < now + 50 then
        redis.call('ZADD', KEYS[4], now + 50, head)
    end
    local before = waited_for(head)
    local after = math.max(before - left, now + 1000)
    if after < before then
        shift(0, after - before)
    end
end

