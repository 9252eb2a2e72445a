-- Asks the holder of a permit to release it, by a certain time if there is a limit. The caller prepends `record.lua`.
--
-- `available`, `left`, KEYS[1], KEYS[2] and ARGV[1]: see prelude.lua.
-- KEYS[3]  the requests: sorted set id, as 32 hex digits -> timestamp until which the permit may be renewed
-- ARGV[2]  id, as 32 hex digits
-- ARGV[3]  limit in ms; absent: none
-- Returns  1: it was asked, 0: the permit is not held
local timestamp = available and redis.call('ZSCORE', KEYS[2], permits(ARGV[2])[1])
if not timestamp then
    return 0
end
for _, id in ipairs(redis.call('ZRANGE', KEYS[3], 0, -1)) do
    if not redis.call('ZSCORE', KEYS[2], permits(id)[1] or '') then
        redis.call('ZREM', KEYS[3], id)
    end
end
record(KEYS[3], ARGV[1], ARGV[2], left(timestamp), tonumber(ARGV[3]))
return 1
