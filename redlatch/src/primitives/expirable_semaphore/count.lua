-- Returns the numbers of free and of held permits.
--
-- ARGV     channel
-- Returns  { free, held }
if not available then
    return { 0, 0 }
end
return { available, redis.call('ZCARD', KEYS[2]) }
