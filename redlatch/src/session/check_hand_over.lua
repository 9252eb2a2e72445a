-- Checks a hold that passes from task to task.
--
-- KEYS[1]  the lock: hash owner -> hold count
-- ARGV     owner, channel
-- Returns  whether the owner holds the lock (1 or 0), and how many connections subscribe to the channel
return {redis.call('HEXISTS', KEYS[1], ARGV[1]), redis.call('PUBSUB', 'NUMSUB', ARGV[2])[2]}
