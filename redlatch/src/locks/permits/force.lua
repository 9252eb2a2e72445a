-- Releases all held permits, whichever clients hold them.
--
-- `available`, KEYS and ARGV[1]: see prelude.lua.
-- Returns  1: some were held, 0: none was held
local held = available and redis.call('ZCARD', KEYS[2]) or 0
if held == 0 then
    return 0
end
redis.call('PUBLISH', ARGV[1], available + held)
-- Changes nothing: see prelude.lua.
redis.call('ZREMRANGEBYRANK', KEYS[2], 1, 0)
redis.call('INCRBY', KEYS[1], held)
redis.call('ZREMRANGEBYRANK', KEYS[2], 0, -1)
return 1
