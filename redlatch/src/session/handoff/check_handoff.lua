-- Checks a hold, or permits, that pass from task to task.
--
-- KEYS[1]  a lock: hash owner -> hold count; an expirable semaphore: sorted set id -> timestamp; a semaphore: its number
-- ARGV[1]  channel
-- ARGV[2]  'lock', 'permits' (of an expirable semaphore), or nil: a semaphore
-- ARGV[3]  owner; or ids, concatenated as 32 hex digits each
-- ARGV[4]  the requests to release it, a sorted set with the owners, or the ids as hex digits, that were asked for
-- Returns  whether it is held (a semaphore: whether it exists), 1 or 0; how many connections subscribe to the channel, plus
--          one if it was asked for; and how many owners wait in the queue of a fair lock with the same key
local held, asking = 1, 0
local function look_for_request(owner)
    -- pcall: without permission, or while the slot moves, requests do not count.
    asking = type(redis.pcall('ZSCORE', ARGV[4], owner)) == 'string' and 1 or asking
end
if ARGV[2] == 'lock' then
    held = redis.call('HEXISTS', KEYS[1], ARGV[3])
    look_for_request(ARGV[3])
elseif ARGV[2] then
    local time = redis.call('TIME')
    local now = time[1] * 1000 + math.floor(time[2] / 1000)
    for hex in string.gmatch(ARGV[3], string.rep('%x', 32)) do
        local id = string.gsub(hex, '%x%x', function(pair)
            return string.char(tonumber(pair, 16))
        end)
        local timestamp = redis.call('ZSCORE', KEYS[1], id)
        held = timestamp and tonumber(timestamp) > now and held or 0
        look_for_request(hex)
    end
    -- The request of a permit remains after its release.
    asking = held == 1 and asking or 0
else
    held = redis.call('EXISTS', KEYS[1])
end
return {held, redis.call('PUBSUB', 'NUMSUB', ARGV[1])[2] + asking, fair_waiters(ARGV[1])}
