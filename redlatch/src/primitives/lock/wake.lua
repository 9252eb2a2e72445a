-- Wakes a waiter for a lock that nobody holds. The first argument is the lock's place in KEYS.
local function wake(_, channel)
    redis.call('PUBLISH', channel, '0')
end

