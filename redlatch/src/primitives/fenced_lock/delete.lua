-- Deletes the token of a free lock.
--
-- KEYS     the lock, the token
-- Returns  1: there is no token now, 0: the lock is held and its token stays
if redis.call('EXISTS', KEYS[1]) == 1 then
    return 0
end
redis.call('DEL', KEYS[2])
return 1
