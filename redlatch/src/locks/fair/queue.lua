-- Shared functions of the scripts of fair objects: the queue of waiters. Prepended to each script. Here the object is a lock;
-- fair_shared/holders.lua replaces what differs for objects that several owners may hold.
--
-- KEYS[1]  the lock: hash owner -> hold count
-- KEYS[2]  the queue: list of the waiting owners, the oldest first
-- KEYS[3]  the timeouts: sorted set owner -> timestamp in ms until which the owner keeps its turn
-- KEYS[4]  the absent waiters: sorted set owner -> timestamp in ms until which a disconnected waiter keeps
--          its position
-- KEYS[5]  the announcements: hash owner -> 'lease in ms:number of the request:object', of waiters that accept a grant
--
-- The timeout of the head is the end of the lease plus its own wait time; that of each further waiter
-- is its own wait time later than the one before it.
--
-- A waiter subscribes to its own channel for as long as it waits. A waiter whose channel has no
-- subscriber is absent: it died, or it is reconnecting. Absence counts only if the lock is free for the
-- requesting owner, and the head is absent. Then all absent waiters are recorded together, so that one grace period applies to
-- all of them at the same time. An absent waiter is dropped when it is the head, its grace period
-- has passed, and it is still absent. So a waiter that is connected when its turn comes keeps its
-- position, even if it was recorded before. The timeouts, by which Redisson drops waiters, do not change.
--
-- An announcement is that of the owner's latest request, and leaves the queue with the owner. A release
-- grants the lock to a head that has one. It names the lock, because the locks `a` and `{a}` have the same queue, and so have
-- objects of different kinds that several owners may hold.

-- In ms: how long the head sleeps at most, and the additional sleep per position in the queue.
local MAX_SLEEP, STAGGER = 5000, 10

-- The remaining lease of the lock in ms, as far as this step knows; nil: it is free.
local lock_left

-- Returns the object as announcements name it.
local announced_object = function()
    return KEYS[1]
end

-- Returns the ms after which the object is free for this waiter, unless its holders renew their leases; nil: it is free now.
local left_for = function()
    return lock_left
end

-- From now on this step knows the object as held by this waiter for `lease` ms, too.
local reserve = function(_, lease)
    lock_left = lease
end

-- Makes a waiter, for which the object is free, a holder.
local hold = function(owner, lease)
    reserve(owner, lease)
    redis.call('HSET', KEYS[1], owner, '1')
    expire(KEYS[1], lease)
end

-- The server's clock in ms, because the clients' clocks may differ.
local now_ms = function()
    local time = redis.call('TIME')
    return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function timeout_of(owner)
    return tonumber(redis.call('ZSCORE', KEYS[3], owner))
end

-- Shifts the timeouts of all waiters from a position in the queue on.
local function shift(position, by)
    for _, owner in ipairs(redis.call('LRANGE', KEYS[2], position, -1)) do
        redis.call('ZINCRBY', KEYS[3], by, owner)
    end
end

local function drop_head(owner)
    redis.call('LPOP', KEYS[2])
    redis.call('ZREM', KEYS[3], owner)
    redis.call('ZREM', KEYS[4], owner)
    redis.call('HDEL', KEYS[5], owner)
end

-- Drops the heads whose time has passed, except the requesting owner, which is alive. Returns the
-- resulting head, and whether any waiter was dropped.
local function drop_timed_out(now, requester)
    local dropped = false
    local head = redis.call('LINDEX', KEYS[2], 0)
    while head and head ~= requester and (timeout_of(head) or now) <= now do
        drop_head(head)
        dropped = true
        head = redis.call('LINDEX', KEYS[2], 0)
    end
    return head, dropped
end

-- Wakes waiters that do not queue, because they use a handle of another kind. Called only if the queue
-- is empty, so that none of its waiters is overtaken.
local wake_unqueued = function(channel)
    redis.call('PUBLISH', channel, '0')
end

-- Wakes the head. If it does not receive the message (it has died, or is reconnecting), also wakes
-- the next waiter, and so on until one receives it: that waiter then learns how long the others
-- keep their turns. Returns whether the head received the message.
local function wake_head(channel)
    local position = 0
    local owner = redis.call('LINDEX', KEYS[2], 0)
    while owner and redis.call('PUBLISH', channel .. ':' .. owner, '0') == 0 do
        position = position + 1
        owner = redis.call('LINDEX', KEYS[2], position)
    end
    return position == 0
end

-- Wakes the next owner, without changing the queue.
local function wake_waiting(channel)
    if redis.call('EXISTS', KEYS[2]) == 0 then
        wake_unqueued(channel)
    else
        wake_head(channel)
    end
end

-- Returns nil if the server does not tell: it has no PUBSUB, or does not permit it.
local function is_connected(channel, owner)
    local counts = redis.pcall('PUBSUB', 'NUMSUB', channel .. ':' .. owner)
    if counts.err then
        return nil
    end
    return counts[2] > 0
end

-- Records which waiters are absent, except the requesting owner. Checks the first thousand waiters
-- only, so that a long queue does not block the server. Returns these waiters in order, and for each
-- absent one the timestamp until which it keeps its position.
local function record_absences(channel, now, grace, requester)
    local owners, channels, absent, recorded = redis.call('LRANGE', KEYS[2], 0, 999), {}, {}, {}
    for i, owner in ipairs(owners) do
        channels[i] = channel .. ':' .. owner
    end
    -- Without them nobody counts as absent, as in Redisson: a dead waiter keeps its turn.
    local counts = redis.pcall('PUBSUB', 'NUMSUB', unpack(channels))
    for i, owner in ipairs(owners) do
        if owner == requester or counts.err or counts[2 * i] > 0 then
            redis.call('ZREM', KEYS[4], owner)
        else
            local kept_until = tonumber(redis.call('ZSCORE', KEYS[4], owner))
            if not kept_until then
                kept_until = now + grace
                table.insert(recorded, kept_until)
                table.insert(recorded, owner)
            end
            absent[owner] = kept_until
        end
    end
    -- Redisson does not know this key. The expiry removes it if Redisson clients empty the queue.
    local last = timeout_of(redis.call('LINDEX', KEYS[2], -1)) or now
    if #recorded > 0 then
        redis.call('ZADD', KEYS[4], unpack(recorded))
    end
    expire(KEYS[4], math.max(last - now, grace) + grace)
    return owners, absent
end

-- The head leaves the queue, and is about to hold the object for `lease` ms. The waits of the others count from the time when it is
-- free for the next one, which is returned. Behind this comes the hold, because all of this may be refused.
local function take_turn(owner, now, lease)
    local timeout = timeout_of(owner)
    drop_head(owner)
    reserve(owner, lease)
    local head = redis.call('LINDEX', KEYS[2], 0)
    if head and timeout then
        shift(0, now + (left_for(head) or 0) - timeout)
    end
    return head
end

-- Serves the queue from its head on: grants the object to each waiter for which it is free, if the waiter has announced its
-- lease and is known to be connected. The message is the number of its request. It is published only after the hold was written:
-- the client that receives it holds the object. Wakes the first one that has to request it. Returns that one if it did not receive
-- the message. `lease`: of the owner that has just acquired the object, if this step did that.
local function serve(channel, head, now, lease)
    while head do
        local announced = redis.call('HGET', KEYS[5], head)
        if left_for(head) then
            -- It must learn how long the object is held. With an announcement it is granted the object later, and it wakes by
            -- itself before a long lease ends.
            if lease and (lease < 2 * MAX_SLEEP or not announced) then
                wake_head(channel)
            end
            return
        end
        local asked, number, object = string.match(announced or '', '^(%d+):(%d+):(.*)$')
        -- Not the reply of PUBLISH: it excludes subscribers at replicas and other nodes, which receive the message.
        if object ~= announced_object() or not is_connected(channel, head) then
            return not wake_head(channel) and head or nil
        end
        lease = tonumber(asked)
        local next_head = take_turn(head, now, lease)
        hold(head, lease)
        redis.call('PUBLISH', channel .. ':' .. head, number)
        head = next_head
    end
end

-- Wakes the next owner: the head of the queue, or waiters that do not queue if it is empty. If this step has
-- freed the object for the head, it is granted if possible. Returns the head if it did not receive the message, and whether this
-- step found it at the head.
local function wake_next(channel, freed)
    local now = redis.call('EXISTS', KEYS[2]) == 1 and now_ms()
    local head, dropped
    if now then
        head, dropped = drop_timed_out(now)
    end
    if not head then
        wake_unqueued(channel)
    elseif freed then
        local absent = serve(channel, head, now)
        return absent, absent == head and not dropped
    elseif not wake_head(channel) then
        return head
    end
end

-- Wakes or grants to the next owner after the object was released, `left` ms before it would have been free for it. A head
-- that does not receive the message keeps its turn as if the lease had ended now, but for at least a
-- second, because it may be reconnecting.
local function wake_after_release(channel, left, grace)
    local head, was_first = wake_next(channel, true)
    if not head then
        return
    end
    local now = now_ms()
    local _, absent = record_absences(channel, now, grace)
    -- Long enough for a waiter that subscribes at a replica, and is not counted here, to take its turn.
    if absent[head] and absent[head] < now + 50 then
        redis.call('ZADD', KEYS[4], now + 50, head)
    end
    -- If the object was granted to a waiter before this one, the timeout does not include the released lease.
    local timeout = timeout_of(head)
    local shortened = math.max(timeout - left, now + 1000)
    if was_first and shortened < timeout then
        shift(0, shortened - timeout)
    end
end

-- Removes an owner from the queue. Returns the position that it had, if it was there.
local function leave(owner)
    -- Also if Redisson has removed the owner from the queue.
    redis.call('HDEL', KEYS[5], owner)
    local position = redis.call('LPOS', KEYS[2], owner)
    if not position then
        return nil
    end
    local timeout = timeout_of(owner)
    local earlier_timeout
    if position == 0 then
        earlier_timeout = now_ms() + math.max(left_for(owner) or 0, 0)
    else
        earlier_timeout = timeout_of(redis.call('LINDEX', KEYS[2], position - 1))
        -- The time of a dead waiter may have passed.
        earlier_timeout = earlier_timeout and math.max(earlier_timeout, now_ms())
    end
    redis.call('LREM', KEYS[2], 1, owner)
    redis.call('ZREM', KEYS[3], owner)
    redis.call('ZREM', KEYS[4], owner)
    if earlier_timeout and timeout and earlier_timeout < timeout then
        shift(position, earlier_timeout - timeout)
    end
    return position
end

