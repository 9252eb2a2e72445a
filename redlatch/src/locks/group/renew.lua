-- Renews the leases of many values at once, each only while its owner holds it.
--
-- KEYS     the group of each value: see holders.lua
-- ARGV[1]  lease in ms; 0: only check, do not change the end
-- ARGV     then for each value, in the order of KEYS:
--            owner
--            value
--            channel
-- Returns  for each value 1: renewed, 0: its owner does not hold it
local lease = tonumber(ARGV[1])
local renewed = {}
for i, key in ipairs(KEYS) do
    local owner, value, channel = ARGV[3 * i - 1], ARGV[3 * i], ARGV[3 * i + 1]
    -- pcall: a key that is no longer a hash must not prevent the renewal of the others.
    local found = redis.pcall('HGET', key, value)
    local left = found == owner and remaining(key, value, owner) or 0
    renewed[i] = left > 0 and 1 or 0
    if left > 0 and left < lease then
        -- Deletes nothing, but counts as a write. An out-of-memory server refuses HSET unless the script
        -- has already written.
        redis.call('HDEL', key, '')
        set_end(key, value, owner, lease)
        keep_key(key, redis.call('PTTL', key), lease)
    elseif not found then
        -- If FLUSHALL or DEL deleted the value, its waiters would sleep until the old lease ends, and no
        -- other step wakes them.
        pcall(wake, channel)
    end
end
-- Client tracking reports changes of a key only if the script reads it after its own last write.
redis.call('EXISTS', unpack(KEYS))
return renewed
