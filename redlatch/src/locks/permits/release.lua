-- Releases permits.
--
-- `available`, KEYS and ARGV[1]: see prelude.lua.
-- ARGV[2]  ids, concatenated as 32 hex digits each
-- ARGV[3]  'any': release those that are held
--          'all': release all if all are held, else none
--          'none': only count
-- Returns  how many of them were held
local ids = permits(ARGV[2])
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
