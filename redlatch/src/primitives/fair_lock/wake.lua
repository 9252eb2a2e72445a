-- Inserted between `queue.lua`, which works on one lock and uses a local KEYS, and the renewal script.
--
-- Only the locks are declared as keys: in a cluster, a script with several declared keys is refused
-- while their slot is migrating and they are on two nodes, and a renewal must not be refused. The
-- keys of the queue are derived from the channel; they are needed only if a lock does not exist any more.
local locks, channel_prefix = KEYS, 'redisson_lock__channel'

-- Wakes the head of the queue of the i-th lock, which has no holder. If the head is absent, the waiter
-- that is woken instead records the absence.
local function wake(i, channel)
    local object = string.sub(channel, #channel_prefix + 1)
    KEYS = {
        locks[i],
        'redisson_lock_queue' .. object,
        'redisson_lock_timeout' .. object,
        'redlatch_lock_absent' .. object,
        'redlatch_lock_announced' .. object,
    }
    -- A queue key of another type must not prevent the renewal of the other locks.
    pcall(wake_next, channel)
    KEYS = locks
end

