-- Releases the lock and acquires it for a waiter of the same client, unless other clients wait.
--
-- KEYS[1]  the lock: hash owner -> hold count
-- ARGV[1]  owner
-- ARGV[2]  channel
-- ARGV[3]  the waiter, which becomes the owner with hold count 1
-- ARGV[4]  lease in ms
-- ARGV[5]  number of this client's subscriptions to the channel; -1: do not count other subscribers
-- Returns  -1: the waiter holds the lock; 0: the owner does not hold it
--          else the lock is free, and this is the number of other subscribers
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then
    -- As in the script that only releases.
    if redis.call('EXISTS', KEYS[1]) == 0 then
        redis.call('PUBLISH', ARGV[2], '0')
    end
    return 0
end
local own, others = tonumber(ARGV[5]), 0
if own >= 0 then
    -- pcall: if the client may not count subscribers, there may be others.
    others = (redis.pcall('PUBSUB', 'NUMSUB', ARGV[2])[2] or own + 1) - own
end
if others > 0 then
    redis.call('DEL', KEYS[1])
    redis.call('PUBLISH', ARGV[2], '0')
    return others
end
-- The lock exists all the time: while its slot moves to another node, the server refuses to create it. The first command
-- deletes nothing, but counts as a write. An out-of-memory server refuses HSET unless the script has already written.
redis.call('HDEL', KEYS[1], '')
redis.call('HSET', KEYS[1], ARGV[3], 1)
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return -1
