-- Deletes the token of a free lock, and the latest term if it is the lock of an election: its epochs are tokens.
--
-- KEYS[1]  the lock
-- KEYS[2]  the token
-- KEYS[3]  the latest term
-- Returns  1: they do not exist any more, 0: not deleted, because the lock is held
if redis.call('EXISTS', KEYS[1]) == 1 then
    return 0
end
redis.call('DEL', KEYS[2], KEYS[3])
return 1
