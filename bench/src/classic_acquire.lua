-- A typical lock script, for comparison: three calls if the lock is free.
--
-- KEYS[1]  the lock: hash owner -> hold count
-- ARGV     owner, lease in ms
-- Returns  nil: held now; else the remaining ms of the current hold
local free = redis.call('EXISTS', KEYS[1]) == 0
if free or redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1 then
    redis.call('HINCRBY', KEYS[1], ARGV[1], 1)
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
    return nil
end
return redis.call('PTTL', KEYS[1])
