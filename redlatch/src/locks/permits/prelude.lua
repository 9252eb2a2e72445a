-- Prepended to every script of the semaphore except renewal: releases the permits that have expired.
--
-- KEYS[1]  the number of free permits
-- KEYS[2]  the held permits: sorted set id -> timestamp of expiry in epoch ms
-- ARGV[1]  channel
--
-- After this, `available` is the number of free permits, and every permit in the sorted set is held. If
-- no permits are set, `available` is nil, and the entries of the sorted set belong to no semaphore.
--
-- Timestamps are the server's. `now` is truncated to whole ms, to find the expired permits.
-- `now_rounded_up` is rounded up, so that a lease that begins now is not shortened by a part of a
-- millisecond.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local now_rounded_up = math.ceil(time[1] * 1000 + time[2] / 1000)

local available = nil
local number = redis.call('GET', KEYS[1])
if number then
    available = tonumber(number)
    -- Also rejects a number that is too big for exact arithmetic.
    if not available or string.format('%.0f', available) ~= number then
        return redis.error_reply('WRONGKIND the key holds no number of permits')
    end
    local expired = redis.call('ZCOUNT', KEYS[2], '-inf', now)
    if expired > 0 then
        available = available + expired
        -- What may be refused comes first, here and elsewhere, as a call that changes nothing: if it is, no permit is lost.
        if available > 0 then
            redis.call('PUBLISH', ARGV[1], available)
        end
        redis.call('ZREMRANGEBYSCORE', KEYS[2], 1, 0)
        redis.call('INCRBY', KEYS[1], expired)
        redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
    end
else
    -- Fails if the key is not a sorted set.
    redis.call('ZCARD', KEYS[2])
end

-- Adds a signed number to the free permits, and publishes the result. If no permits are set, also
-- removes the held permits of a deleted semaphore: they must not count for a new one of the same name.
local function add(delta)
    redis.call('PUBLISH', ARGV[1], (available or 0) + delta)
    if not available then
        redis.call('ZREMRANGEBYRANK', KEYS[2], 0, -1)
    end
    redis.call('INCRBY', KEYS[1], delta)
end

-- Returns the ms left until a timestamp; -1: a permit without a lease, which Redisson can create.
local function left(timestamp)
    timestamp = tonumber(timestamp)
    if timestamp >= 922337203685477 then
        return -1
    end
    return math.max(timestamp - now_rounded_up, 0)
end

-- Returns the raw ids that are concatenated in `text`, as 32 hex digits each.
local function permits(text)
    local ids = {}
    local raw = string.gsub(text, '%x%x', function(pair)
        return string.char(tonumber(pair, 16))
    end)
    for i = 1, #raw, 16 do
        table.insert(ids, string.sub(raw, i, i + 15))
    end
    return ids
end

-- Returns how many of these permits are held.
local function count_held(ids)
    local held = 0
    for _, id in ipairs(ids) do
        if redis.call('ZSCORE', KEYS[2], id) then
            held = held + 1
        end
    end
    return held
end

