-- Stands between `queue.lua`, which works on one lock and sees a local KEYS, and the renewal of locks.
--
-- Only the locks are declared as keys: in a cluster whose slot is moving a script with several declared keys
-- is refused while they are on two nodes, and a renewal must not be. The keys of the queue follow from the
-- channel; they are needed only when a lock is gone.
local all, channels = KEYS, 'redisson_lock__channel'

-- Wakes the head of the queue of a lock that no owner holds. If the head is absent, the waiter that is woken
-- instead notes it.
local function wake(i, channel)
    local object = string.sub(channel, #channels + 1)
    KEYS = {
        all[i],
        'redisson_lock_queue' .. object,
        'redisson_lock_timeout' .. object,
        'redlatch_lock_absent' .. object,
    }
    -- A queue that is none must not keep the other locks from being renewed.
    pcall(call_next, channel)
    KEYS = all
end

