-- Adds free permits, or removes some; their number may become negative.
--
-- ARGV     channel, permits to add, the maximum number of free (and, below zero, missing) permits
-- Returns  1: added, 0: there would be too many
if math.abs((available or 0) + ARGV[2]) > tonumber(ARGV[3]) then
    return 0
end
add(ARGV[2])
return 1
