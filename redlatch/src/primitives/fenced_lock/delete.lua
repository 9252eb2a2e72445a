-- Deletes the token of a free lock.
--
-- KEYS[1]  the lock
-- KEYS[2]  the token
-- Returns  1: the token does not exist any more, 0: not deleted, because the lock is held
if redis.call('EXISTS', KEYS[1]) == 1 then
    return 0
end
redis.call('DEL', KEYS[2])
return 1
