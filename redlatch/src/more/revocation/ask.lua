-- Asks the holder of a lock to release it, by a certain time if there is a limit. Its lease is then not extended beyond that
-- time. Of several requests to one holder the earliest limit counts.
--
-- KEYS[1]  the lock: hash owner -> hold count
-- KEYS[2]  the requests: sorted set owner -> timestamp until which its hold may be renewed
-- ARGV[1]  channel
-- ARGV[2]  1: the lock is a read-write lock, whose writer is asked; 0: it is not
-- ARGV[3]  limit in ms; absent: none
-- Returns  the holder's field; nil: there is no such holder
--          -1: the key is a hash, but not a lock of this kind
local fields = redis.call('HKEYS', KEYS[1])
local is_lock, holder = ARGV[2] == '0' and #fields == 1, nil
for _, field in ipairs(fields) do
    if ARGV[2] == '0' then
        holder = string.match(field, '^.+:%d+$')
        is_lock = is_lock and holder
    elseif field == 'mode' then
        is_lock = true
    else
        holder = holder or string.match(field, '^.+:%d+:write$')
    end
end
if #fields > 0 and not is_lock then
    return -1
end
if not holder then
    return nil
end
local time, never = redis.call('TIME'), 1000000000000000
local limit = tonumber(ARGV[3])
local last = limit and time[1] * 1000 + math.floor(time[2] / 1000) + limit or never
local earlier = redis.call('ZSCORE', KEYS[2], holder)
-- The request must outlast the hold: a hold that was revoked would be renewed again. A re-entry may extend it until the
-- client of its holder has checked it, so there is an hour more.
local lifetime = math.max(redis.call('PTTL', KEYS[1]), 0) + (limit or 0) + 3600000
if earlier then
    last = math.min(last, tonumber(earlier))
    lifetime = math.max(lifetime, redis.call('PTTL', KEYS[2]))
else
    redis.call('DEL', KEYS[2])
end
redis.call('ZADD', KEYS[2], last, holder)
expire(KEYS[2], lifetime)
-- Redisson ignores this message.
redis.call('PUBLISH', ARGV[1], '2')
return holder
