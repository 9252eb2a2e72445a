-- Sets the total number of permits, including held ones.
--
-- ARGV     channel, permits, '1': only if none are set
-- Returns  1: set, 0: permits were already set
if available and ARGV[3] == '1' then
    return 0
end
local wanted = ARGV[2] - (available and redis.call('ZCARD', KEYS[2]) or 0)
if available ~= wanted then
    add(wanted - (available or 0))
end
return 1
