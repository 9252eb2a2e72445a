-- Wakes a waiter for a lock without a holder. The first argument is the lock's place in KEYS.
local function wake(_, channel)
    redis.call('PUBLISH', channel, '0')
end

