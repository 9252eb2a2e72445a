-- Returns the current leader. The leader of the latest term counts only while it holds the lock.
--
-- KEYS[1]  the election's lock: hash owner -> hold count
-- KEYS[2]  the latest term
-- Returns  nil: there is no leader
--          { epoch, leader, value, remaining ms of its lease; -1: it never ends }
local epoch, leader, value = unpack(redis.call('HMGET', KEYS[2], 'epoch', 'leader', 'value'))
if not (epoch and leader and value) or redis.call('HEXISTS', KEYS[1], leader) == 0 then
    return nil
end
return { epoch, leader, value, redis.call('PTTL', KEYS[1]) }
