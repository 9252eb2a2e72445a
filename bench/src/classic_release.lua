-- The corresponding release: four calls if the lock was held once.
--
-- KEYS[1]  the lock: hash owner -> hold count
-- ARGV     owner, channel, and for the remaining holds: lease in ms
-- Returns  1: done; 0: this owner does not hold the lock
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then
    return 0
end
if redis.call('HINCRBY', KEYS[1], ARGV[1], -1) > 0 then
    redis.call('PEXPIRE', KEYS[1], ARGV[3])
    return 1
end
redis.call('DEL', KEYS[1])
redis.call('PUBLISH', ARGV[2], '0')
return 1
