-- Returns how many of the first owners in the queue of a fair lock with this channel wait: a waiter subscribes to a channel of
-- its own. Other objects have no queue. pcall: without permission, or while the slot moves, they are not counted.
local function fair_waiters(channel)
    local prefix = 'redisson_lock__channel'
    if string.sub(channel, 1, #prefix) ~= prefix then
        return 0
    end
    local owners = redis.pcall('LRANGE', 'redisson_lock_queue' .. string.sub(channel, #prefix + 1), 0, 9)
    if not owners[1] then
        return 0
    end
    local channels, waiting = {}, 0
    for i, owner in ipairs(owners) do
        channels[i] = channel .. ':' .. owner
    end
    local subscribers = redis.pcall('PUBSUB', 'NUMSUB', unpack(channels))
    for i = 2, #subscribers, 2 do
        waiting = waiting + (subscribers[i] > 0 and 1 or 0)
    end
    return waiting
end

