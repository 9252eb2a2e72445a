-- Renews the leases of many locks at once, each only while its owner holds it. The caller prepends
-- the function `wake`, which differs between the kinds of lock.
--
-- KEYS     the locks
-- ARGV[1]  lease in ms; 0: only check, do not change the expiry
-- ARGV     then for each lock, in the order of KEYS:
--            owner
--            channel; empty: wake no waiter
-- Returns  for each lock 1: renewed, 0: its owner does not hold it
local lease = tonumber(ARGV[1])
local renewed = {}
for i = 1, (#ARGV - 1) / 2 do
    local key, channel = KEYS[i], ARGV[2 * i + 1]
    -- pcall: a key that is no longer a hash must not prevent the renewal of the others.
    if redis.pcall('HEXISTS', key, ARGV[2 * i]) == 1 then
        -- The owner may have re-entered with a longer lease: the expiry may only move later.
        if lease > 0 and redis.call('PTTL', key) < lease then
            redis.call('PEXPIRE', key, ARGV[1])
        end
        renewed[i] = 1
    else
        renewed[i] = 0
        -- If FLUSHALL or DEL deleted the lock, its waiters would sleep until the old lease ends, and no
        -- other step wakes them. If another owner holds the lock, they must keep waiting.
        if channel ~= '' and redis.call('EXISTS', key) == 0 then
            wake(i, channel)
        end
    end
end
-- Client tracking reports changes of a key only if the script reads it after its own last write.
redis.call('EXISTS', unpack(KEYS))
return renewed
