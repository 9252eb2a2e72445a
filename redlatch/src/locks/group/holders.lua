-- Shared functions of the scripts of a group of locks. Prepended to each script.
--
-- The group is a hash: value -> owner, and for each owner of a value
-- `<value>:<owner>:expire_time` -> end of its hold in epoch ms, `<value>:<owner>:lock_count` -> hold count.
-- A value is held until that time, by the server's clock. An owner that no longer holds the value may leave
-- its two fields behind; they mean nothing. The key lives at least as long as each hold.
--
-- `now` is truncated to whole ms, to find the holds that have ended. `now_rounded_up` is rounded up, so that a
-- lease that begins now is not shortened by a part of a millisecond.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local now_rounded_up = math.ceil(time[1] * 1000 + time[2] / 1000)

local function end_field(value, owner)
    return value .. ':' .. owner .. ':expire_time'
end

local function count_field(value, owner)
    return value .. ':' .. owner .. ':lock_count'
end

-- Returns the remaining ms of a hold; 0: it has ended.
local function remaining(key, value, owner)
    local ends = tonumber(redis.call('HGET', key, end_field(value, owner)))
    return ends and math.max(ends - now, 0) or 0
end

-- Sets fields of a hold, the first of which is its end, `lease` ms from now.
local function set_end(key, value, owner, lease, ...)
    redis.call('HSET', key, end_field(value, owner), string.format('%.0f', now_rounded_up + lease), ...)
end

-- Makes the key, which lives for `left` ms, live for at least `lease` ms. If it never expires (-1), it stays so: that
-- would shorten the holds of others.
local function keep_key(key, left, lease)
    if left ~= -1 and left < lease then
        expire(key, string.format('%.0f', lease))
    end
end

-- Wakes the waiters for all values. On `0` a Redisson client wakes one thread, which may wait for another value.
-- On `1` it wakes all threads that sleep, but not a thread that is about to sleep: for that thread it stores the `0`.
local function wake(channel)
    redis.call('PUBLISH', channel, '1')
    redis.call('PUBLISH', channel, '0')
end

