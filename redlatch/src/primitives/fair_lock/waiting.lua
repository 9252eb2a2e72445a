-- Returns the waiting owners, the next one first, without heads whose time has passed. Changes nothing.
--
-- KEYS     the lock, the queue, the timeouts, the absent
-- Returns  the owners
local queue = redis.call('LRANGE', KEYS[2], 0, -1)
if #queue == 0 then
    return queue
end
local now = today()
local first = 1
while queue[first] and (waited_for(queue[first]) or now) <= now do
    first = first + 1
end
local waiting = {}
for place = first, #queue do
    waiting[place - first + 1] = queue[place]
end
return waiting
