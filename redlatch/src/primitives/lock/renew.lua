-- Renews the leases of many locks at once, each only while its owner holds it.
--
-- KEYS     the locks
-- ARGV     lease in ms, then for each lock in the order of KEYS its owner and an empty string
-- Returns  for each lock 1: renewed, 0: its owner does not hold it
local lease = tonumber(ARGV[1])
local renewed = {}
for i, key in ipairs(KEYS) do
    -- pcall: one key that is no hash any more must not keep the others from being renewed.
    if redis.pcall('HEXISTS', key, ARGV[2 * i]) == 1 then
        -- An owner may have entered again for longer meanwhile: the end never comes nearer.
        if redis.call('PTTL', key) < lease then
            redis.call('PEXPIRE', key, ARGV[1])
        end
        renewed[i] = 1
    else
        renewed[i] = 0
    end
end
return renewed
