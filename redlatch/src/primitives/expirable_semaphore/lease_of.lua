-- Returns when a permit expires.
--
-- ARGV     channel, id
-- Returns  nil: it is not held; the ms until then (-1: never)
local timestamp = available and redis.call('ZSCORE', KEYS[2], permits(ARGV[2])[1])
return timestamp and left(timestamp)
