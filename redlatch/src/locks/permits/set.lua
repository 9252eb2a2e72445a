-- Sets the total number of permits, including held ones.
--
-- `available`, `add`, KEYS and ARGV[1]: see prelude.lua.
-- ARGV[2]  total number of permits
-- ARGV[3]  1: only if no permits are set
-- Returns  1: set, 0: not set, because permits are already set
if available and ARGV[3] == '1' then
    return 0
end
local new_available = ARGV[2] - (available and redis.call('ZCARD', KEYS[2]) or 0)
if available ~= new_available then
    add(new_available - (available or 0))
end
return 1
