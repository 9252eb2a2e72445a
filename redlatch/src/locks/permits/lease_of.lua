-- Returns when a permit expires.
--
-- `available`, `left`, KEYS and ARGV[1]: see prelude.lua.
-- ARGV[2]  id, as 32 hex digits
-- Returns  nil: the permit is not held
--          else the ms until it expires; -1: never
local timestamp = available and redis.call('ZSCORE', KEYS[2], permits(ARGV[2])[1])
return timestamp and left(timestamp)
