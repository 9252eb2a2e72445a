-- Renews the leases of many locks at once, each only while its owner holds it. Before this script
-- stands the function `wake`, which differs between the kinds of lock.
--
-- KEYS     the locks
-- ARGV     lease in ms (0: leave the ends as they are, only look), then for each lock in the order of KEYS
--          its owner and its channel (empty: wake no waiter)
-- Returns  for each lock 1: renewed, 0: its owner does not hold it
local lease = tonumber(ARGV[1])
local renewed = {}
for i = 1, (#ARGV - 1) / 2 do
    local key, channel = KEYS[i], ARGV[2 * i + 1]
    -- pcall: one key that is no hash any more must not keep the others from being renewed.
    if redis.pcall('HEXISTS', key, ARGV[2 * i]) == 1 then
        -- An owner may have entered again for longer meanwhile: the end never comes nearer.
        if lease > 0 and redis.call('PTTL', key) < lease then
            redis.call('PEXPIRE', key, ARGV[1])
        end
        renewed[i] = 1
    else
        renewed[i] = 0
        -- Deleted by FLUSHALL or DEL. Waiters would sleep until the old lease ends, and
        -- no other step wakes them. If another owner holds the lock, they are right to wait.
        if channel ~= '' and redis.call('EXISTS', key) == 0 then
            wake(i, channel)
        end
    end
end
return renewed
