-- Asks the holder of a lock to release it, by a certain time if there is a limit. Its lease is then not extended beyond that
-- time. The caller prepends `record.lua`.
--
-- KEYS[1]  the lock: hash owner -> hold count
-- KEYS[2]  the requests: sorted set owner -> timestamp until which its hold may be renewed
-- ARGV[1]  channel
-- ARGV[2]  1: the lock is a read-write lock, whose writer is asked; 2: the same of a fair one; 0: it is neither
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
        is_lock = (redis.call('HGET', KEYS[1], 'mode') == 'fair_rwlock') == (ARGV[2] == '2')
    else
        holder = holder or string.match(field, '^.+:%d+:write$')
    end
end
if #fields > 0 and not is_lock then
    return -1
end
if holder and ARGV[2] == '2' then
    -- Other holds may keep the key when this one has ended.
    local time = redis.call('TIME')
    local ends = tonumber(redis.call('HGET', KEYS[1], holder .. ':expire_time')) or 0
    holder = ends > time[1] * 1000 + math.floor(time[2] / 1000) and holder
end
if not holder then
    return nil
end
if not redis.call('ZSCORE', KEYS[2], holder) then
    -- Those for earlier holders.
    redis.call('DEL', KEYS[2])
end
record(KEYS[2], ARGV[1], holder, redis.call('PTTL', KEYS[1]), tonumber(ARGV[3]))
return holder
