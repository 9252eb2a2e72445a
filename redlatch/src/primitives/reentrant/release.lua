-- Sets an owner's hold count to the number of holds to keep, or releases the lock and wakes a waiter.
--
-- KEYS[1]  the lock: hash owner -> hold count
-- ARGV     owner, channel (empty: wake no waiter); if some holds remain: their number, lease in ms (0: the
--          end does not change), and if this undoes an acquisition: lease in ms before that acquisition
-- Returns  1: done; 0: this owner does not hold the lock
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then
    -- Deleted by FLUSHALL or DEL: no other step wakes the waiters. Also the answer to a release that is
    -- repeated; then a waiter checks once more than necessary.
    if ARGV[2] ~= '' and redis.call('EXISTS', KEYS[1]) == 0 then
        redis.call('PUBLISH', ARGV[2], '0')
    end
    return 0
end
if not ARGV[3] then
    redis.call('DEL', KEYS[1])
    if ARGV[2] ~= '' then
        redis.call('PUBLISH', ARGV[2], '0')
    end
    return 1
end
-- Changes nothing. A server that is out of memory refuses HSET, unless the script has already written.
redis.call('HDEL', KEYS[1], '')
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
local left = redis.call('PTTL', KEYS[1])
-- Without a lease the end does not change, even if the key lost its expiry: PEXPIRE 0 would delete it.
local lease = tonumber(ARGV[4])
if lease > 0 and left < lease then
    redis.call('PEXPIRE', KEYS[1], lease)
elseif ARGV[5] and left > tonumber(ARGV[5]) then
    redis.call('PEXPIRE', KEYS[1], ARGV[5])
end
return 1
