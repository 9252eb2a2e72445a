-- Wakes the waiters for a lock without a holder. The first argument is the lock's place in KEYS.
local function wake(_, channel)
    call_all(channel)
end

