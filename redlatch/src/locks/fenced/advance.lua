-- Increases the token to a number; never decreases it. If the lock is that of an election, the token
-- becomes at least the epoch of the latest term: earlier versions counted epochs only there. The
-- caller prepends numbers.lua.
--
-- KEYS[1]  the token
-- KEYS[2]  the latest term of the election with this name
-- KEYS[3]  the lock
-- ARGV[1]  minimum of the new token, from 0 to 2^63 - 2
-- Returns  the new token, as text
local token = redis.call('GET', KEYS[1]) or '0'
local epoch, leader = unpack(redis.call('HMGET', KEYS[2], 'epoch', 'leader'))
-- Checked before anything changes.
if not can_count_up(token) then
    return redis.error_reply('WRONGKIND its token is no number that can be counted up')
end
if epoch and (epoch:find('^[-0]') or not can_count_up(epoch)) then
    return redis.error_reply('WRONGKIND its epoch is no number that can be counted up')
end

local latest = token
for _, number in ipairs({ epoch or '0', ARGV[1] }) do
    if is_less(latest, number) then
        latest = number
    end
end
-- A leader keeps its epoch. Candidates of earlier versions count up that of the term.
local raises_term = epoch and epoch ~= latest
    and not (leader and redis.call('HEXISTS', KEYS[3], leader) == 1)
if latest ~= token then
    redis.call('SET', KEYS[1], latest)
end
if raises_term then
    redis.call('HSET', KEYS[2], 'epoch', latest)
end
return latest
