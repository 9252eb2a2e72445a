-- Puts a successor in the place of the owner, with hold count 1: the lock is not free in between. The caller prepends the
-- functions `fair_waiters`, and `wake`, which differs between the kinds of lock; and, of a fenced lock, `next_token`.
--
-- KEYS[1]  the lock: hash owner -> hold count, and `mode` if it is the write side of a read-write lock
-- KEYS[2]  only of a fenced lock, for a waiter: the token
-- ARGV[1]  owner
-- ARGV[2]  channel
-- ARGV[3]  the successor, which has no other hold of the lock
-- ARGV[4]  its lease in ms
-- ARGV[5]  what it is: 'waiter' of the same client; 'ticket'; 'adopter' of one; 'returned', a ticket that was not adopted in
--          the end; 'keeper', which no request has
-- ARGV[6]  number of fields of the hash if no other hold is in it; 0: other holds may be in it
-- ARGV[7]  the requests to release the lock: sorted set owner -> timestamp in ms until which its hold may be renewed; empty:
--          they do not count, and remain
-- ARGV[8]  1: waiters are woken
-- ARGV[9]  for a waiter: number of this client's subscriptions to the channel; -1: do not count other subscribers
-- ARGV[10] of a fenced lock whose tokens follow the clock, for a waiter: see clock_token.lua
-- Returns  the token of the successor, or '' if there are no tokens: the successor holds the lock
--          0: neither does
--          else the owner still holds the lock
--          { others, 1 or 0 }: because so many other clients wait, and 1 if some of them do in the queue of a fair lock
--          -1: because the hash has other fields, or the token cannot be counted up
--          -2: because it was asked to release the lock
--          else because it must have released it after these ms, minus 2
local successor, token, lease = ARGV[5], '', tonumber(ARGV[4])

-- Returns until when the hold of an owner may be renewed, if it was asked to release the lock.
local function limit_of(owner)
    -- pcall: without permission, or while the slot moves, requests do not count.
    local score = redis.pcall('ZSCORE', ARGV[7], owner)
    return type(score) == 'string' and tonumber(score)
end

local function left_until(limit)
    local time = redis.call('TIME')
    return math.floor(math.max(limit - time[1] * 1000 - time[2] / 1000, 0))
end

if redis.call('HEXISTS', KEYS[1], ARGV[3]) == 1 then
    -- No client limits the lease of a ticket that was asked for.
    local limit = (successor == 'ticket' or successor == 'returned') and limit_of(ARGV[3])
    lease = limit and math.min(lease, left_until(limit)) or lease
    -- The step was repeated. The client counts the lease from when it was sent last: the expiry may only move later. It is
    -- always written: replicas confirm what was written on the connection of the repetition.
    redis.call('PEXPIRE', KEYS[1], math.max(lease, redis.call('PTTL', KEYS[1])))
    token = KEYS[2] and redis.pcall('GET', KEYS[2]) or token
    return type(token) == 'string' and token or '0'
end
local held = redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1
if held and successor == 'waiter' and ARGV[9] ~= '-1' then
    -- pcall: if the client may not count subscribers, there may be others.
    local subscribers = redis.pcall('PUBSUB', 'NUMSUB', ARGV[2])[2] or ARGV[9] + 1
    local queued = fair_waiters(ARGV[2])
    local others = math.max(subscribers - ARGV[9], 0) + queued
    if others > 0 then
        return {others, queued > 0 and 1 or 0}
    end
end
if held and ARGV[6] ~= '0' and redis.call('HLEN', KEYS[1]) ~= tonumber(ARGV[6]) then
    return -1
end
local limit = held and successor ~= 'keeper' and limit_of(ARGV[1])
if limit and successor == 'returned' then
    lease = math.min(lease, left_until(limit))
elseif limit then
    return limit > 900000000000000 and -2 or left_until(limit) + 2
elseif (successor == 'keeper' or not held) and ARGV[7] ~= '' then
    -- The owner's hold has ended, as with a release. pcall: without permission, or while the slot moves, the request remains
    -- until it expires.
    redis.pcall('ZREM', ARGV[7], ARGV[1])
end
if held and KEYS[2] then
    token = next_token(KEYS[2], ARGV[10])
    if not token then
        return -1
    end
end
if held and lease > 0 then
    -- The lock exists all the time: while its slot moves to another node, the server refuses to create it. The first command
    -- deletes nothing, but counts as a write. An out-of-memory server refuses HSET unless the script has already written.
    redis.call('HDEL', KEYS[1], '')
    redis.call('HSET', KEYS[1], ARGV[3], 1)
    redis.call('HDEL', KEYS[1], ARGV[1])
    redis.call('PEXPIRE', KEYS[1], lease)
elseif held then
    -- The limit of the request has passed.
    redis.call('PEXPIRE', KEYS[1], 0)
end
if limit then
    -- The request is for the ticket now. It outlasts the hold by an hour, as in record.lua.
    redis.pcall('ZADD', ARGV[7], limit, ARGV[3])
    redis.pcall('ZREM', ARGV[7], ARGV[1])
    redis.pcall('PEXPIRE', ARGV[7], math.max(redis.call('PTTL', ARGV[7]), lease + 3600000))
end
-- Waiters sleep until the end of the lease that the store reported to them, and it may be earlier now. If FLUSHALL or
-- DEL deleted the lock, no other step wakes them.
if ARGV[8] == '1' and (held or redis.call('EXISTS', KEYS[1]) == 0) then
    wake(1, ARGV[2])
end
return held and token or 0
