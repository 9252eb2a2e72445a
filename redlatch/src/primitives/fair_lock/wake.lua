-- Stands between `queue.lua` and the renewal of locks. KEYS are the locks, then their queues, then their
-- timeouts. `queue.lua` works on one lock at a time, so it sees a local KEYS, which is set before each
-- call.
local all, count = KEYS, #KEYS / 3

-- Wakes the head of the queue of a lock that nobody holds.
local function wake(i, channel)
    KEYS = { all[i], all[count + i], all[2 * count + i] }
    call_after_release(channel, 0)
    KEYS = all
end

