-- Sets a writer's hold count to the number of holds to keep. 0 releases its side and wakes waiters.
-- If the owner also reads, it remains a reader. A waiting writer that gives up no longer blocks new readers.
--
-- KEYS[1]  the lock: hash mode -> read | write, owner:write -> hold count
-- KEYS[2]  the waiting writers: sorted set owner:write -> timestamp
-- ARGV[1]  owner:write
-- ARGV[2]  channel
-- ARGV[3]  hold count to keep
-- ARGV[4]  lease in ms; 0: do not change the expiry
-- ARGV[5]  prefix of the holds' timeout keys
-- ARGV[6]  the key of the requests to release the lock, from which the owner is removed; absent: it is not
-- Returns  1: done, 0: the owner does not write
if ARGV[6] then
    -- pcall: without permission, or while the slot moves, the request remains until it expires.
    redis.pcall('ZREM', ARGV[6], ARGV[1])
end
local left = redis.call('PTTL', KEYS[1])
local fields = {}
if left ~= -2 then
    fields = redis.call('HMGET', KEYS[1], 'mode', ARGV[1])
    if not is_mode(fields[1]) then
        return redis.error_reply('WRONGKIND not a read-write lock')
    end
end
if not fields[2] then
    if ARGV[3] == '0' and redis.call('ZREM', KEYS[2], ARGV[1]) == 1 then
        redis.call('PUBLISH', ARGV[2], '1')
    elseif left == -2 then
        -- If FLUSHALL or DEL deleted the lock, no other step wakes its waiters.
        wake_all(ARGV[2])
    end
    return 0
end
if ARGV[3] ~= '0' then
    redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
    -- With lease 0 the expiry stays as it is, even if the key has none: PEXPIRE 0 would delete the key.
    local lease = tonumber(ARGV[4])
    if lease > 0 and left < lease then
        redis.call('PEXPIRE', KEYS[1], lease)
    end
    return 1
end
local longest = longest_reader_remaining(KEYS[1], ARGV[5])
if longest == 0 then
    redis.call('DEL', KEYS[1])
else
    -- The first command deletes nothing, but counts as a write. An out-of-memory server refuses HSET unless the script
    -- has already written.
    redis.call('HDEL', KEYS[1], '')
    redis.call('HSET', KEYS[1], 'mode', 'read')
    redis.call('HDEL', KEYS[1], ARGV[1])
    redis.call('PEXPIRE', KEYS[1], longest)
end
wake_all(ARGV[2])
return 1
