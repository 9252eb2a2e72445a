-- Wakes a waiter for a lock without a holder. The first argument is the lock's place in KEYS. A channel that
-- is refused must not keep the other locks from being renewed.
local function wake(_, channel)
    redis.pcall('PUBLISH', channel, '0')
end

