-- Sets how many permits there are in all, those that are out included.
--
-- ARGV     channel, permits, '1': only if none are set
-- Returns  1: set, 0: some were set already
if available and ARGV[3] == '1' then
    return 0
end
local out = redis.call('ZCARD', KEYS[2])
local wanted = ARGV[2] - (available and out or 0)
if available ~= wanted then
    add(wanted - (available or 0))
end
return 1
