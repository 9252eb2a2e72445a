-- Acquires the read side for an owner, or returns how long another owner may still write.
--
-- KEYS[1]  the lock: hash mode -> read | write, owner -> hold count
-- KEYS[2]  the waiting writers, only if the handle prefers writers: sorted set owner:write -> timestamp
-- ARGV[1]  owner
-- ARGV[2]  lease in ms
-- ARGV[3]  requested hold count
-- ARGV[4]  prefix of the holds' timeout keys
-- Returns  nil: the owner holds the read side with this count
--          0: more than one hold was requested, but the owner has none: the hold to re-enter was lost
--          else the ms to wait; -1: the key never expires
local owner, lease, count, prefix = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local left = redis.call('PTTL', KEYS[1])
local mode, old_count, write_count
if left ~= -2 then
    local fields = redis.call('HMGET', KEYS[1], 'mode', owner, owner .. ':write')
    mode, old_count, write_count = fields[1], fields[2], fields[3]
    if not is_mode(mode) then
        return redis.error_reply('WRONGKIND not a read-write lock')
    end
    if left == -1 or (mode == 'write' and not write_count) then
        return left
    end
end
if longest_remaining(prefix, owner, old_count) == 0 then
    if count > 1 then
        return 0
    end
    if KEYS[2] and not write_count then
        local last = redis.call('ZREVRANGE', KEYS[2], 0, 0, 'WITHSCORES')
        local wait = (tonumber(last[2]) or 0) - now_ms()
        if wait > 0 then
            return wait
        end
    end
end
-- The timeout comes first: its key is not declared, so it may be refused. Without a field it means nothing. The expiry may only
-- move later.
local last = keyed_holds(count)
if redis.call('PTTL', timeout_key(prefix, owner, last)) < lease then
    redis.call('SET', timeout_key(prefix, owner, last), 1, 'PX', ARGV[2])
end
redis.call('HSET', KEYS[1], 'mode', mode or 'read', owner, ARGV[3])
if left < lease then
    expire(KEYS[1], ARGV[2])
end
-- Deletes the timeouts that earlier holds of the same owner left behind.
delete_timeouts(prefix, owner, old_count, last + 1)
return nil
