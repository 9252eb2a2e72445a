-- Prepended to every script of the semaphore except renewal: releases the permits that have expired.
--
-- KEYS     free permits: a number; when the held permits expire: zset id -> epoch ms
-- ARGV[1]  channel
--
-- From here on `available` is a number, and every permit in the zset is held; or it is nil, because
-- no permits are set: then the entries of the zset belong to no semaphore. Timestamps are the server's.
-- `now` is truncated to whole ms, to find what has expired. `now_rounded_up` is rounded up, so that a lease
-- that begins now is not shortened by a part of a millisecond.
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
        -- First, here and elsewhere: if this is refused, nothing has changed.
        if available > 0 then
            redis.call('PUBLISH', ARGV[1], available)
        end
        redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
        redis.call('INCRBY', KEYS[1], expired)
    end
else
    -- An error, if it is not a zset.
    redis.call('ZCARD', KEYS[2])
end

-- Adds free permits and publishes their number. Permits held of a deleted semaphore must not be
-- counted into one that is set again under the same name.
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

