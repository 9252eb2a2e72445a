-- Acquires a value for an owner, or returns how long another owner may still hold it.
--
-- KEYS[1]  the group: see holders.lua
-- ARGV[1]  owner
-- ARGV[2]  lease in ms
-- ARGV[3]  value
-- ARGV[4]  requested hold count; absent: 1
-- Returns  nil: the owner holds the value with this count
--          0: the value is free, but more than one hold was requested: the hold to re-enter was lost
--          else the remaining ms of the holder
local lease, count = tonumber(ARGV[2]), ARGV[4] or '1'
local key_left = redis.call('PTTL', KEYS[1])
local left = 0
if key_left ~= -2 then
    local fields = redis.call('HMGET', KEYS[1], ARGV[3], 'mode')
    local owner = fields[1]
    -- A held value has three fields. The hash of a lock of another kind has one, or a mode.
    if fields[2] or (not owner and redis.call('HLEN', KEYS[1]) == 1) then
        return redis.error_reply('WRONGKIND a lock of another kind')
    end
    left = owner and remaining(KEYS[1], ARGV[3], owner) or 0
    if owner ~= ARGV[1] then
        if left > 0 then
            return left
        end
        if owner and count == '1' then
            -- Otherwise a late release in Redisson, which reads only these fields, would release the new hold.
            redis.call('HDEL', KEYS[1], end_field(ARGV[3], owner), count_field(ARGV[3], owner))
        end
    end
end
if left == 0 and count ~= '1' then
    return 0
end
-- The ends may only move later, except for that of a hold which has ended.
if left < lease then
    set_end(KEYS[1], ARGV[3], ARGV[1], lease, ARGV[3], ARGV[1], count_field(ARGV[3], ARGV[1]), count)
    keep_key(KEYS[1], key_left, lease)
else
    redis.call('HSET', KEYS[1], count_field(ARGV[3], ARGV[1]), count)
end
return nil
