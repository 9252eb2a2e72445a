-- Grants a free lock to the head of the queue, or wakes it. For releases of other kinds of lock with the same key, which do not
-- look at the queue.
--
-- KEYS     see queue.lua
-- ARGV[1]  channel
if redis.call('EXISTS', KEYS[1]) == 0 and redis.call('EXISTS', KEYS[2]) == 1 then
    wake_next(ARGV[1], true)
end
