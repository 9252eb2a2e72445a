-- Sets a reader's hold count to what it wants to keep; 0 gives its side back, and wakes who waits
-- if nobody else reads, or not for nearly as long. A dead reader is cleared away whatever it wanted.
--
-- KEYS[1]  the lock: hash mode -> read | write, owner -> hold count
-- ARGV     owner, hold count to keep, lease in ms to go on with (0: as it is), what the timeouts of
--          holds begin with, channel
-- Returns  1: done; 0: this owner does not read
local owner, keep, lease, base = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local left = redis.call('PTTL', KEYS[1])
if left == -2 then
    -- Deleted by FLUSHALL or DEL: no other step wakes the waiters.
    redis.call('PUBLISH', ARGV[5], '0')
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
-- Never more than there is.
keep = math.min(keep, tonumber(count) or 0)
if longest(base, owner, count) == 0 then
    held, keep = 0, 0
end
local last = keyed(keep)
if keep == 0 then
    redis.call('HDEL', KEYS[1], owner)
else
    redis.call('HSET', KEYS[1], owner, keep)
    -- All holds of an owner are held for as long as the longest: what is given back hands that on.
    local most = math.max(longest(base, owner, count, last), lease)
    -- None of them may live any more, but one before them does.
    if most > 0 and redis.call('PTTL', timeout(base, owner, last)) < most then
        redis.call('SET', timeout(base, owner, last), 1, 'PX', most)
    end
end
forget(base, owner, count, last + 1)
if mode == 'write' then
    -- Its owner writes, too: that goes on as it is.
    if keep > 0 and lease > 0 and left < lease then
        redis.call('PEXPIRE', KEYS[1], ARGV[3])
    end
    return held
end
local most = longest_of_all(KEYS[1], base)
if most == 0 then
    redis.call('DEL', KEYS[1])
else
    redis.call('PEXPIRE', KEYS[1], most)
end
-- Writers sleep until the end that they were told. If it has come much nearer they are told again:
-- who still reads may be dead and not say so.
if most == 0 or left == -1 or left - most >= 1000 then
    redis.call('PUBLISH', ARGV[5], '0')
end
return held
