-- Inserted between `queue.lua`, which works on one lock and uses a local KEYS, and the renewal script.
--
-- Only the locks are declared as keys: in a cluster, a script with several declared keys is refused
-- while their slot is migrating and they are on two nodes, and a renewal must not be refused. The
-- keys of the queue are derived from the channel. Any of them may be on the other node, and seem to be missing here. So the
-- queue is read, and not changed: a waiter without a timeout has not timed out.
local locks, channel_prefix = KEYS, 'redisson_lock__channel'

-- Wakes the head of the queue of the i-th lock. If the head is absent, the waiter that is woken instead records the
-- absence, and if it has timed out, drops it.
local function wake(i, channel)
    local object = string.sub(channel, #channel_prefix + 1)
    KEYS = { locks[i], 'redisson_lock_queue' .. object }
    -- A queue of another type must not prevent the renewal of the other locks.
    pcall(wake_waiting, channel)
    KEYS = locks
end
