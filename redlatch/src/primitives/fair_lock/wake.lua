-- Inserted between `queue.lua`, which works on one lock and uses a local KEYS, and the renewal script.
--
-- Only the locks are declared as keys: in a cluster, a script with several declared keys is refused
-- while their slot is migrating and they are on two nodes, and a renewal must not be refused. The
-- keys of the queue are derived from the channel; they are needed only if a lock is gone.
local all, channels = KEYS, 'redisson_lock__channel'

-- Wakes the head of the queue of a lock without a holder. If the head is absent, the waiter that is
-- woken instead notes the absence.
local function wake(i, channel)
    local object = string.sub(channel, #channels + 1)
    KEYS = {
        all[i],
        'redisson_lock_queue' .. object,
        'redisson_lock_timeout' .. object,
        'redlatch_lock_absent' .. object,
    }
    -- A queue key of another type must not prevent the renewal of the other locks.
    pcall(wake_next, channel)
    KEYS = all
end

