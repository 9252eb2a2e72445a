-- Renews the holds of many readers at once, each only for its owner.
--
-- KEYS     the locks
-- ARGV[1]  lease in ms; 0: only check, do not change the expiry
-- ARGV     then for each lock, in the order of KEYS:
--            owner
--            prefix of this owner's timeout keys
--            channel
-- Returns  for each lock 1: renewed, 0: its owner does not read, or is dead
local lease = tonumber(ARGV[1])
local renewed = {}
for i, key in ipairs(KEYS) do
    local owner, owner_prefix, channel = ARGV[3 * i - 1], ARGV[3 * i], ARGV[3 * i + 1]
    -- pcall: a key that is no longer a hash must not prevent the renewal of the others.
    local fields = redis.pcall('HMGET', key, 'mode', owner)
    local alive = 0
    for n = 1, is_mode(fields[1]) and keyed_holds(fields[2]) or 0 do
        local left = redis.call('PTTL', owner_prefix .. ':' .. n)
        if left >= 0 then
            alive = 1
            -- It may have been acquired with a longer lease: the expiry may only move later.
            if lease > 0 and left < lease then
                redis.call('PEXPIRE', owner_prefix .. ':' .. n, ARGV[1])
            end
        end
    end
    if alive == 1 and lease > 0 and redis.call('PTTL', key) < lease then
        redis.call('PEXPIRE', key, ARGV[1])
    end
    -- If FLUSHALL or DEL deleted the lock, no other step wakes its waiters.
    if alive == 0 and redis.call('EXISTS', key) == 0 then
        redis.pcall('PUBLISH', channel, '0')
    end
    renewed[i] = alive
end
-- Client tracking reports changes of a key only if the script reads it after its own last write.
redis.call('EXISTS', unpack(KEYS))
return renewed
