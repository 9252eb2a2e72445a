-- How many permits are available, and how many are out.
--
-- ARGV     channel
-- Returns  { available, out }
if not available then
    return { 0, 0 }
end
return { available, redis.call('ZCARD', KEYS[2]) }
