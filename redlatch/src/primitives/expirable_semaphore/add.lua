-- Adds permits to those available, or takes some away; then there may be less than none.
--
-- ARGV     channel, how many more, the most that can be available (and, below zero, missing)
-- Returns  1: added, 0: that would be too many
if math.abs((available or 0) + ARGV[2]) > tonumber(ARGV[3]) then
    return 0
end
add(ARGV[2])
return 1
