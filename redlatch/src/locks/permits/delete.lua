-- Deletes the semaphore and its held permits.
--
-- `available`, KEYS and ARGV[1]: see prelude.lua.
-- Returns  1: deleted, 0: it did not exist
if not available then
    return 0
end
-- Before the held permits, which mean nothing without it.
redis.call('DEL', KEYS[1])
redis.call('ZREMRANGEBYRANK', KEYS[2], 0, -1)
return 1
