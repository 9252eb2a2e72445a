-- Acquires permits under ids that the client has chosen, or returns when the next one expires.
--
-- `available`, KEYS and ARGV[1]: see prelude.lua.
-- ARGV[2]  ids, concatenated as 32 hex digits each
-- ARGV[3]  lease in ms
-- ARGV[4]  total number of permits, to set if none are set; 0: none
-- Returns  nil: the permits are held under these ids
--          else the ms until the first held permit expires; -1: none expires, -2: no permits are set
local free = available or tonumber(ARGV[4])
if not available and free == 0 then
    return -2
end
local ids = permits(ARGV[2])
-- Repeated because the answer was lost: the permits are already held. Those of a deleted semaphore do not count.
local missing = #ids - (available and count_held(ids) or 0)
if missing > 0 and free < missing then
    if not available then
        add(free)
    end
    local first = redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')
    return first[2] and left(first[2]) or -1
end
-- Changes nothing: see prelude.lua.
redis.call('ZADD', KEYS[2], 'XX', 0, '')
if available then
    -- By 0 if it is repeated: replicas confirm what was written on the connection of the repetition.
    redis.call('DECRBY', KEYS[1], missing)
else
    add(free - missing)
end
-- By another name: a proxy that accepts only `KEYS[n]` in calls refuses this script, as it would refuse renewals, and
-- nothing is acquired that cannot be renewed.
local held = KEYS[2]
for _, id in ipairs(ids) do
    redis.call('ZADD', held, 'GT', now_rounded_up + ARGV[3], id)
end
return nil
