-- Acquires the read side for an owner, or returns how long another owner may still write.
--
-- KEYS     the lock: hash mode -> read | write, owner -> hold count; for a handle that prefers
--          writers also the waiting writers: sorted set owner:write -> timestamp
-- ARGV     owner, lease in ms, requested hold count, the prefix of the holds' timeout keys
-- Returns  nil: held now, with that count
--          else the ms to wait (-1: a key that never expires); 0 if more than one hold was requested
--          and there is none: the hold to re-enter has been lost
local owner, lease, count, base = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local left = redis.call('PTTL', KEYS[1])
local mode, mine, writes
if left ~= -2 then
    local fields = redis.call('HMGET', KEYS[1], 'mode', owner, owner .. ':write')
    mode, mine, writes = fields[1], fields[2], fields[3]
    if not is_mode(mode) then
        return redis.error_reply('WRONGKIND not a read-write lock')
    end
    if left == -1 or (mode == 'write' and not writes) then
        return left
    end
end
if longest_remaining(base, owner, mine) == 0 then
    if count > 1 then
        return 0
    end
    if KEYS[2] and not writes then
        local last = redis.call('ZREVRANGE', KEYS[2], 0, 0, 'WITHSCORES')
        local wait = (tonumber(last[2]) or 0) - now_ms()
        if wait > 0 then
            return wait
        end
    end
end
if not mode then
    redis.call('HSET', KEYS[1], 'mode', 'read')
end
redis.call('HSET', KEYS[1], owner, ARGV[3])
local last = keyed_holds(count)
-- Removes what earlier holds of the same owner left behind.
delete_timeouts(base, owner, mine, last + 1)
-- The end may only move later.
if redis.call('PTTL', timeout_key(base, owner, last)) < lease then
    redis.call('SET', timeout_key(base, owner, last), 1, 'PX', ARGV[2])
end
if left < lease then
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return nil
