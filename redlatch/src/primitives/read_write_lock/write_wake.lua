-- Wakes the waiters for a lock that nobody holds. The first argument is the lock's place in KEYS.
local function wake(_, channel)
    call_all(channel)
end

