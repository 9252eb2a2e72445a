-- Passes the lock on to a waiter of the same client, unless other clients wait or ask for it.
--
-- KEYS[1]  the lock: hash owner -> hold count, and `mode` if it is the write side of a read-write lock
-- KEYS[2]  only of a fenced lock: the token
-- ARGV[1]  owner
-- ARGV[2]  channel
-- ARGV[3]  the waiter, which becomes the owner with hold count 1
-- ARGV[4]  lease in ms
-- ARGV[5]  number of this client's subscriptions to the channel; -1: do not count other subscribers
-- ARGV[6]  number of fields of the hash if no other hold is in it
-- ARGV[7]  the requests to release the lock: sorted set with the owners that were asked
-- Returns  the waiter's token, or '' if there are no tokens: the waiter holds the lock
--          -2: the owner does not hold the lock
--          -1: the owner still holds it, and it cannot be passed on
--          else the owner still holds it: how many other clients wait, and 1 if some of them do in the queue of a fair lock
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then
    return -2
end
local own = tonumber(ARGV[5])
if own >= 0 then
    -- pcall: if the client may not count subscribers, there may be others.
    local subscribers = redis.pcall('PUBSUB', 'NUMSUB', ARGV[2])[2] or own + 1
    local queued = fair_waiters(ARGV[2])
    local others = math.max(subscribers - own, 0) + queued
    if others > 0 then
        return {others, queued > 0 and 1 or 0}
    end
end
-- A writer that also reads remains a reader.
if redis.call('HLEN', KEYS[1]) ~= tonumber(ARGV[6]) then
    return -1
end
-- Its owner was asked to release it. pcall: without permission, or while the slot moves, requests do not count.
if type(redis.pcall('ZSCORE', ARGV[7], ARGV[1])) == 'string' then
    return -1
end
-- Only text keeps tokens above 2^53 exact.
local token = ''
if KEYS[2] then
    if type(redis.pcall('INCR', KEYS[2])) == 'table' then
        return -1
    end
    token = redis.call('GET', KEYS[2])
end
-- The lock exists all the time: while its slot moves to another node, the server refuses to create it. The first command
-- deletes nothing, but counts as a write. An out-of-memory server refuses HSET unless the script has already written.
redis.call('HDEL', KEYS[1], '')
redis.call('HSET', KEYS[1], ARGV[3], 1)
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return token
