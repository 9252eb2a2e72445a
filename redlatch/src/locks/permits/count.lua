-- Returns the number of free permits and the number of held permits.
--
-- `available`, KEYS and ARGV[1]: see prelude.lua.
-- Returns  { free, held }
if not available then
    return { 0, 0 }
end
return { available, redis.call('ZCARD', KEYS[2]) }
