-- Sets how many permits there are in all, those that are out included.
--
-- ARGV     channel, permits, '1': only if none are set
-- Returns  1: set, 0: some were set already
if available and ARGV[3] == '1' then
    return 0
end
local wanted = ARGV[2] - (available and redis.call('ZCARD', KEYS[2]) or 0)
if available ~= wanted then
    add(wanted - (available or 0))
end
return 1
