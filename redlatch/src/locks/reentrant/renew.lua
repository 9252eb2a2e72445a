-- Renews the leases of many locks at once, each only while its owner holds it. The lease of an owner that was asked to release
-- its lock by a certain time is not extended beyond that time. The caller prepends the function `wake`, which differs between
-- the kinds of lock, and `requests.lua`.
--
-- KEYS     the locks
-- ARGV[1]  lease in ms; 0: only check, do not change the expiry
-- ARGV     then for each lock, in the order of KEYS:
--            owner
--            channel; empty: wake no waiter
-- Returns  for each lock 1: renewed, 0: its owner does not hold it
--          -1: renewed, and its owner was asked to release it
--          else the ms until it must have released it, plus 2: the lease was extended until then at most
local renewed = {}
for i, key in ipairs(KEYS) do
    requests[i] = requests_key(key)
end

for i = 1, (#ARGV - 1) / 2 do
    local key, owner, channel = KEYS[i], ARGV[2 * i], ARGV[2 * i + 1]
    -- pcall: a key that is no longer a hash must not prevent the renewal of the others.
    if redis.pcall('HEXISTS', key, owner) == 1 then
        local extended
        extended, renewed[i] = limit(i, { owner })
        -- The owner may have re-entered with a longer lease: the expiry may only move later. It is always written: replicas
        -- confirm the renewal of a ticket, also if it is repeated.
        if extended > 0 then
            redis.call('PEXPIRE', key, math.max(extended, redis.call('PTTL', key)))
        end
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
