-- Behind queue.lua, in the scripts that acquire a fair object.

-- Acquires the object for an owner that does not hold it, if it is the owner's turn. Otherwise the owner joins the queue if it
-- waits. Returns nil: it holds the object; else the ms after which to retry at the latest.
--
-- `wait`: how long the object is kept for this owner once its turn has come, in ms; 0: it does not wait. `number`: of the request,
-- if the owner accepts a grant; else '0'. `requests`: to release the object.
local function acquire_in_turn(owner, lease, wait, channel, grace, number, requests)
    -- The object may have been granted to the owner before, which was asked, but has not seen the grant. pcall: without permission,
    -- or while the slot moves, the request remains until it expires. Mostly there is none, and a server whose memory is full has to
    -- refuse the first write that needs some.
    if type(redis.pcall('ZSCORE', requests, owner)) == 'string' then
        redis.pcall('ZREM', requests, owner)
    end
    if redis.call('EXISTS', KEYS[2]) == 0 then
        local left = left_for(owner)
        if not left then
            hold(owner, lease)
            return nil
        elseif wait == 0 then
            return left
        end
    end
    local now = now_ms()
    -- The requesting owner is connected.
    redis.call('ZREM', KEYS[4], owner)
    local head, dropped = drop_timed_out(now, owner)
    local left = left_for(head or owner)
    -- How long a free lock is reserved for the head, and how many waiters before this owner are absent if the head is.
    local reservation, absent_before = math.min(grace, 1000), 0
    -- How long an absent head keeps its position.
    local kept_for
    -- An object that several owners may hold can be free for this owner, but not for the head.
    if head and head ~= owner and not (left and left_for(owner)) and is_connected(channel, head) == false then
        local owners, absent = record_absences(channel, now, grace, owner)
        local dropped_timeout
        head = nil
        for _, waiter in ipairs(owners) do
            local kept_until = absent[waiter]
            if not head and kept_until and kept_until <= now then
                dropped_timeout = timeout_of(waiter) or dropped_timeout
                drop_head(waiter)
                dropped = true
            else
                if not head then
                    head = waiter
                    kept_for = kept_until and kept_until - now
                    reservation = math.min(reservation, kept_for or reservation)
                end
                if waiter == owner then
                    break
                end
                if kept_until and kept_for then
                    absent_before = absent_before + 1
                end
            end
        end
        head = head or redis.call('LINDEX', KEYS[2], 0)
        if dropped_timeout and dropped_timeout > now then
            -- Shift as if the dropped waiters had given up.
            shift(0, now - dropped_timeout)
        end
        left = left_for(head or owner)
    end
    if not left and (not head or head == owner) then
        if head then
            serve(channel, take_turn(owner, now, lease), now, lease)
        end
        hold(owner, lease)
        return nil
    end
    local free = not left
    left = left or 0
    if dropped and head ~= owner then
        wake_head(channel)
    end

    if wait == 0 then
        return left
    end
    local position = redis.call('LPOS', KEYS[2], owner)
    if free and position and not dropped then
        -- A waiter retries while the head does not take its turn: the head may have missed its message.
        redis.call('PUBLISH', channel .. ':' .. head, '0')
    end
    if not position then
        local from = now + left
        local last = redis.call('LINDEX', KEYS[2], -1)
        if last then
            from = math.max(from, timeout_of(last) or from)
        end
        position = redis.call('RPUSH', KEYS[2], owner) - 1
        redis.call('ZADD', KEYS[3], from + wait, owner)
    elseif position == 0 then
        -- A waiter that retries is alive: it keeps its position, and those behind keep their distance.
        local timeout = timeout_of(owner)
        if not timeout then
            redis.call('ZADD', KEYS[3], now + left + wait, owner)
        elseif timeout - now - left < wait / 2 then
            shift(0, now + left + wait - timeout)
        end
    end
    if number == '0' then
        redis.call('HDEL', KEYS[5], owner)
    else
        local kept = redis.call('PTTL', KEYS[5])
        redis.call('HSET', KEYS[5], owner, lease .. ':' .. number .. ':' .. announced_object())
        -- Redisson does not know this key. The expiry removes it if Redisson clients empty the queue.
        if kept < lease then
            expire(KEYS[5], lease)
        end
    end
    -- FLUSHALL deletes the queue as well, and then no step knows which waiter to wake. So waiters retry from
    -- time to time, and later ones less often, so that a long queue does not flood the server with requests.
    local max_sleep = MAX_SLEEP + position * STAGGER
    if position == 0 then
        return math.min(left, max_sleep)
    end

    -- A waiter is woken when its turn comes. This covers the case that no client wakes it, because the
    -- holder or the waiters before it died: it retries when the lease ends, or when the head had time
    -- to take its turn, or when an absent head is dropped, behind which the object is free for this one.
    -- Waiters further back retry a little later each, so that a long queue does not retry all at once.
    local next_turn = free and reservation or math.min(left, kept_for or left)
    local retry_after = math.min(wait, next_turn + (position - absent_before) * STAGGER, max_sleep)
    local earlier_timeout
    while position > 0 and not earlier_timeout do
        -- If timeouts were lost, the timeout of the waiter before this one may be missing: then use the
        -- one before that.
        position = position - 1
        earlier_timeout = timeout_of(redis.call('LINDEX', KEYS[2], position))
    end
    if earlier_timeout and earlier_timeout > now then
        retry_after = math.min(retry_after, earlier_timeout - now)
    end
    return retry_after
end

