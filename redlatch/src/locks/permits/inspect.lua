-- Returns the held permits and their remaining leases.
--
-- `available`, `left`, KEYS and ARGV[1]: see prelude.lua.
-- Returns  for each held permit: id, ms until it expires (-1: never)
if not available then
    return {}
end
local held = redis.call('ZRANGE', KEYS[2], 0, -1, 'WITHSCORES')
for i = 2, #held, 2 do
    held[i] = left(held[i])
end
return held
