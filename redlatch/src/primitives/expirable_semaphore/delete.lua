-- Deletes the semaphore; held permits end with it.
--
-- ARGV     channel
-- Returns  1: deleted, 0: there was none
if not available then
    return 0
end
redis.call('ZREMRANGEBYRANK', KEYS[2], 0, -1)
return redis.call('DEL', KEYS[1])
