-- Adds a signed number to the free permits; the result may be negative.
--
-- `available`, `add`, KEYS and ARGV[1]: see prelude.lua.
-- ARGV[2]  permits to add; negative: remove
-- ARGV[3]  maximum absolute value of the result
-- Returns  1: added, 0: not added, because the result would exceed the maximum
if math.abs((available or 0) + ARGV[2]) > tonumber(ARGV[3]) then
    return 0
end
add(ARGV[2])
return 1
