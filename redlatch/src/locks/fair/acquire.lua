-- Acquires the lock for an owner whose turn it is, or returns when to retry. If the request
-- waits, the owner joins the queue.
--
-- KEYS     see queue.lua
-- ARGV[1]  owner
-- ARGV[2]  lease in ms
-- ARGV[3]  requested hold count
-- ARGV[4]  how long the lock is kept for this owner once its turn has come, in ms; 0: the request does not wait, so
--          the owner does not join the queue
-- ARGV[5]  channel
-- ARGV[6]  grace period in ms
-- ARGV[7]  number of the request, if the owner accepts a grant; else 0
-- ARGV[8]  the requests to release the lock
-- Returns  nil: the owner holds the lock with this count
--          0: the lock is free, but more than one hold was requested: the hold to re-enter was lost; or the lock is
--          free, but kept for another owner, and the request does not wait
--          else the ms after which to retry at the latest; -1: the key never expires
local owner, lease, wait = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[4])
local left = redis.call('PTTL', KEYS[1])
if left == -2 then
    if ARGV[3] ~= '1' then
        return 0
    end
else
    lock_left = left
    local held = redis.call('HMGET', KEYS[1], owner, 'mode')
    if held[2] then
        return redis.error_reply('WRONGKIND a read-write lock')
    end
    if held[1] then
        redis.call('HSET', KEYS[1], owner, ARGV[3])
        -- The owner already holds it: the expiry may only move later.
        if left < lease then
            redis.call('PEXPIRE', KEYS[1], lease)
        end
        return nil
    end
    -- An owner that wanted to re-enter has lost the lock, and does not wait for it.
    if left == -1 or ARGV[3] ~= '1' then
        return left
    end
end

return acquire_in_turn(owner, lease, wait, ARGV[5], tonumber(ARGV[6]), ARGV[7], ARGV[8])
