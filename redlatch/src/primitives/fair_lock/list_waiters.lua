-- Returns the waiting owners, the next one first, without heads whose time has passed. Changes nothing.
--
-- KEYS     the lock, the queue, the timeouts, the absent waiters
-- Returns  the owners
local queue = redis.call('LRANGE', KEYS[2], 0, -1)
if #queue == 0 then
    return queue
end
local now = now_ms()
local first = 1
while queue[first] and (timeout_of(queue[first]) or now) <= now do
    first = first + 1
end
local waiting = {}
for position = first, #queue do
    waiting[position - first + 1] = queue[position]
end
return waiting
