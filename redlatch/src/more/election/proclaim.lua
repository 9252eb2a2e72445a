-- Changes the value of the leader's term, and wakes observers.
--
-- KEYS[1]  the election's lock: hash owner -> hold count
-- KEYS[2]  the latest term
-- ARGV[1]  leader
-- ARGV[2]  revision of the value: the leader counts its values from 1
-- ARGV[3]  value
-- ARGV[4]  channel
-- Returns  1: the term has this value, or a later one; 0: this owner does not lead
local leader, revision = ARGV[1], tonumber(ARGV[2])
local term = redis.call('HMGET', KEYS[2], 'leader', 'revision')
if redis.call('HEXISTS', KEYS[1], leader) == 0 or term[1] ~= leader then
    return 0
end
-- A value that is sent on a connection that breaks may arrive after a later one.
if (tonumber(term[2]) or 0) < revision then
    redis.call('HSET', KEYS[2], 'value', ARGV[3], 'revision', ARGV[2])
    redis.call('PUBLISH', ARGV[4], '0')
end
return 1
