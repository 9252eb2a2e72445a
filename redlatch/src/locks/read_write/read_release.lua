-- Sets a reader's hold count to the number of holds to keep. 0 releases its side, and wakes waiters
-- if no other reader remains, or none with nearly as long a lease. A dead reader is always removed.
--
-- KEYS[1]  the lock: hash mode -> read | write, owner -> hold count
-- ARGV[1]  owner
-- ARGV[2]  channel
-- ARGV[3]  hold count to keep
-- ARGV[4]  lease in ms; 0: do not change the expiry
-- ARGV[5]  prefix of the holds' timeout keys
-- Returns  1: done, 0: the owner does not read
local owner, keep, lease, prefix = ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local left = redis.call('PTTL', KEYS[1])
if left == -2 then
    -- If FLUSHALL or DEL deleted the lock, no other step wakes its waiters.
    redis.call('PUBLISH', ARGV[2], '0')
    return 0
end
local fields = redis.call('HMGET', KEYS[1], 'mode', owner)
local mode, count = fields[1], fields[2]
if not is_mode(mode) then
    return redis.error_reply('WRONGKIND not a read-write lock')
end
if not count then
    return 0
end
local held = 1
-- A release never increases the count.
keep = math.min(keep, tonumber(count) or 0)
if longest_remaining(prefix, owner, count) == 0 then
    held, keep = 0, 0
end
-- The timeouts come first: their keys are not declared, so they may be refused.
local last = keyed_holds(keep)
if keep > 0 then
    -- All holds of an owner last as long as the longest, so a released hold passes its lease on.
    local longest = math.max(longest_remaining(prefix, owner, count, last), lease)
    -- The kept holds may all have expired, although a released hold has not.
    if longest > 0 and redis.call('PTTL', timeout_key(prefix, owner, last)) < longest then
        redis.call('SET', timeout_key(prefix, owner, last), 1, 'PX', longest)
    end
    redis.call('HSET', KEYS[1], owner, keep)
end
delete_timeouts(prefix, owner, count, last + 1)
if keep == 0 then
    redis.call('HDEL', KEYS[1], owner)
end
if mode == 'write' then
    -- The owner also writes: its write hold does not change.
    if keep > 0 and lease > 0 and left < lease then
        redis.call('PEXPIRE', KEYS[1], ARGV[4])
    end
    return held
end
local longest = longest_reader_remaining(KEYS[1], prefix)
-- Writers sleep until the expiry that they received. If it is now much earlier, they are woken: the
-- remaining readers may be dead and never release. Otherwise it stays, so that small steps do not add up.
local earlier = left == -1 or left - longest >= 1000
if longest == 0 then
    redis.call('DEL', KEYS[1])
elseif earlier or left < longest then
    redis.call('PEXPIRE', KEYS[1], longest)
end
if longest == 0 or earlier then
    redis.call('PUBLISH', ARGV[2], '0')
end
return held
