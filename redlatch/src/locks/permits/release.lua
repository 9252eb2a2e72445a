-- Releases permits.
--
-- `available`, KEYS and ARGV[1]: see prelude.lua.
-- ARGV[2]  ids, concatenated as 32 hex digits each
-- ARGV[3]  'any': release those that are held
--          'all': release all if all are held, else none
--          'none': only count
-- ARGV[4]  the requests to release permits: sorted set id, as 32 hex digits -> timestamp. These ids are removed from it; absent:
--          they remain
-- Returns  how many of them were held
local ids = permits(ARGV[2])
for id in string.gmatch(ARGV[4] and ARGV[2] or '', string.rep('%x', 32)) do
    -- pcall: without permission, or while the slot moves, the requests remain until they expire.
    redis.pcall('ZREM', ARGV[4], id)
end
local held = available and count_held(ids) or 0
if held == 0 or ARGV[3] == 'none' or (ARGV[3] == 'all' and held < #ids) then
    return held
end
redis.call('PUBLISH', ARGV[1], available + held)
-- Changes nothing: see prelude.lua. An out-of-memory server refuses INCRBY unless the script has already written.
redis.call('ZREM', KEYS[2], '')
redis.call('INCRBY', KEYS[1], held)
for _, id in ipairs(ids) do
    redis.call('ZREM', KEYS[2], id)
end
return held
