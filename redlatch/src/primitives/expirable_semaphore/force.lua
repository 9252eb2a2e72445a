-- Takes all permits back from whoever has them.
--
-- ARGV     channel
-- Returns  1: some were out, 0: none
local out = available and redis.call('ZCARD', KEYS[2]) or 0
if out == 0 then
    return 0
end
redis.call('PUBLISH', ARGV[1], available + out)
redis.call('ZREMRANGEBYRANK', KEYS[2], 0, -1)
redis.call('INCRBY', KEYS[1], out)
return 1
