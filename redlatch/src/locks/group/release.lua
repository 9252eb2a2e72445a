-- Sets an owner's hold count of a value to the number of holds to keep, or releases the value and wakes waiters.
--
-- KEYS[1]  the group: see holders.lua
-- ARGV[1]  owner
-- ARGV[2]  channel; empty: wake no waiter
-- ARGV[3]  value
-- ARGV[4]  hold count to keep; absent: release the value, and no arguments follow
-- ARGV[5]  lease in ms; 0: do not change the end
-- ARGV[6]  only to undo an acquisition: ms that remain of the lease before it
-- Returns  1: done; 0: this owner does not hold the value
local owner = redis.call('HGET', KEYS[1], ARGV[3])
local left = owner == ARGV[1] and remaining(KEYS[1], ARGV[3], ARGV[1]) or 0
if left == 0 or not ARGV[4] then
    redis.call('HDEL', KEYS[1], end_field(ARGV[3], ARGV[1]), count_field(ARGV[3], ARGV[1]))
    -- Only if the value still names this owner: another one may have acquired it after the end of this hold.
    if owner == ARGV[1] then
        redis.call('HDEL', KEYS[1], ARGV[3])
    end
    -- If FLUSHALL or DEL deleted the value, no other step wakes its waiters. A repeated release also
    -- gets here; then a waiter checks once more than necessary.
    if ARGV[2] ~= '' and (not owner or owner == ARGV[1]) then
        wake(ARGV[2])
    end
    return left > 0 and 1 or 0
end
-- Deletes nothing, but counts as a write. An out-of-memory server refuses HSET unless the script has
-- already written.
redis.call('HDEL', KEYS[1], '')
redis.call('HSET', KEYS[1], count_field(ARGV[3], ARGV[1]), ARGV[4])
local lease = tonumber(ARGV[5])
if left < lease then
    set_end(KEYS[1], ARGV[3], ARGV[1], lease)
    keep_key(KEYS[1], redis.call('PTTL', KEYS[1]), lease)
elseif ARGV[6] and left > tonumber(ARGV[6]) then
    set_end(KEYS[1], ARGV[3], ARGV[1], tonumber(ARGV[6]))
end
return 1
