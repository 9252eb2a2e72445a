-- Acquires the election's lock for a candidate whose turn it is, and begins its term in the same step; or returns
-- when to retry. The caller prepends fenced_lock/numbers.lua, and fair_lock/acquire.lua as the
-- function `acquire_lock`.
--
-- KEYS     see fair_lock/queue.lua
-- KEYS[6]  the latest term: hash with epoch, leader, value and revision, which never expires
-- KEYS[7]  the fencing token of the lock, which never expires: the latest epoch, or the number to which it was advanced since
-- ARGV     see fair_lock/acquire.lua
-- ARGV[9]  value
-- Returns  { epoch }: the candidate leads
--          else as `acquire_lock`
local candidate = ARGV[1]
local epoch, leader = unpack(redis.call('HMGET', KEYS[6], 'epoch', 'leader'))
local token = redis.call('GET', KEYS[7]) or '0'

-- Checked before anything changes.
if not can_count_up(token) or (epoch and (epoch:find('^[-0]') or not can_count_up(epoch))) then
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
local begun, refused = pcall(function()
    -- The token is missing or smaller only if it was not counted with the epoch.
    if is_less(token, epoch or '0') then
        redis.call('SET', KEYS[7], epoch or '0')
    end
    redis.call('INCR', KEYS[7])
    -- Read as text, because Lua numbers are not exact.
    epoch = redis.call('GET', KEYS[7])
    redis.call('HSET', KEYS[6], 'epoch', epoch, 'leader', candidate, 'value', ARGV[9], 'revision', '0')
end)
if not begun then
    -- It would lead without a term.
    if not held then
        redis.call('DEL', KEYS[1])
    end
    return type(refused) == 'table' and refused or redis.error_reply(tostring(refused))
end
redis.call('PUBLISH', ARGV[5], '0')
return { epoch }
