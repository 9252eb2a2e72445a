-- Stands between `queue.lua` and the renewal of locks. KEYS are the locks, then their queues, their
-- timeouts and their absent. `queue.lua` works on one lock at a time, so it sees a local KEYS, which is set
-- before each call.
local all, count = KEYS, #KEYS / 4

-- Wakes the head of the queue of a lock that no owner holds. If the head is absent, the waiter that is woken
-- instead notes it.
local function wake(i, channel)
    KEYS = { all[i], all[count + i], all[2 * count + i], all[3 * count + i] }
    call_next(channel)
    KEYS = all
end

