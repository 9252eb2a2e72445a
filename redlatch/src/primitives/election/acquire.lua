-- Acquires the election's lock for a candidate whose turn it is, and begins its term in the same step; or returns
-- when to retry. The caller prepends fair_lock/acquire.lua as the function `acquire_lock`.
--
-- KEYS     see fair_lock/queue.lua
-- KEYS[6]  the latest term: hash with epoch, leader, value and revision, which never expires
-- ARGV     see fair_lock/acquire.lua
-- ARGV[8]  value
-- Returns  { epoch }: the candidate leads
--          else as `acquire_lock`
local candidate = ARGV[1]
local epoch, leader = unpack(redis.call('HMGET', KEYS[6], 'epoch', 'leader'))
-- Checked before anything changes. Up to 15 digits: Lua numbers are exact up to 2^53.
if epoch and not (epoch:find('^[1-9]%d*$') and #epoch <= 15) then
    return redis.error_reply('WRONGKIND its epoch is no number that can be counted up')
end
local held = redis.call('HEXISTS', KEYS[1], candidate) == 1
local reply = acquire_lock()
if reply then
    return reply
end
if held and leader == candidate then
    -- Repeated because the answer was lost: the term has begun. Its value may be a later one.
    return { epoch }
end
epoch = string.format('%d', (epoch or 0) + 1)
local begun = redis.pcall('HSET', KEYS[6], 'epoch', epoch, 'leader', candidate, 'value', ARGV[8], 'revision', '0')
if type(begun) == 'table' then
    -- It would lead without a term.
    if not held then
        redis.call('DEL', KEYS[1])
    end
    return begun
end
redis.call('PUBLISH', ARGV[5], '0')
return { epoch }
