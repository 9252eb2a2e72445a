-- Wakes a waiter of a lock without a holder. The first argument is the lock's index in KEYS. A
-- refused PUBLISH must not prevent the renewal of the other locks.
local function wake(_, channel)
    redis.pcall('PUBLISH', channel, '0')
end

