-- Returns the holder of a value, its hold count and its remaining lease.
--
-- KEYS[1]  the group: see holders.lua
-- ARGV[1]  value
-- Returns  nil: the value is free
--          { owner, hold count, remaining ms }
local owner = redis.call('HGET', KEYS[1], ARGV[1])
local left = owner and remaining(KEYS[1], ARGV[1], owner) or 0
if left == 0 then
    return nil
end
return { owner, redis.call('HGET', KEYS[1], count_field(ARGV[1], owner)) or '1', left }
