-- How many permits are available, and how many are out.
--
-- ARGV     channel
-- Returns  { available, out }
return { available or 0, redis.call('ZCARD', KEYS[2]) }
