-- Releases a value, whichever owner holds it, and wakes waiters.
--
-- KEYS[1]  the group: see holders.lua
-- ARGV[1]  channel
-- ARGV[2]  value
-- Returns  1: released, 0: it was free
local owner = redis.call('HGET', KEYS[1], ARGV[2])
local left = owner and remaining(KEYS[1], ARGV[2], owner) or 0
if left == 0 then
    return 0
end
redis.call('HDEL', KEYS[1], ARGV[2], end_field(ARGV[2], owner), count_field(ARGV[2], owner))
wake(ARGV[1])
return 1
