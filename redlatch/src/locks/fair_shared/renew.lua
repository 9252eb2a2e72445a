-- Renews many holds at once, each only while it lasts.
--
-- KEYS     the object of each hold: see holders.lua
-- ARGV[1]  lease in ms; 0: only check, do not change the end
-- ARGV     then for each hold, in the order of KEYS: its field
-- Returns  for each hold 1: renewed, 0: it has ended
--
-- Wakes no waiter if the object was deleted: waiters retry by themselves.
local lease = tonumber(ARGV[1])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local new_end = math.ceil(time[1] * 1000 + time[2] / 1000) + lease
local renewed = {}
for i, key in ipairs(KEYS) do
    local field = ARGV[1 + i] .. ':expire_time'
    -- pcall: a key that is no longer a hash must not prevent the renewal of the others.
    local at = redis.pcall('HGET', key, field)
    at = type(at) == 'string' and tonumber(at) or 0
    renewed[i] = at > now and 1 or 0
    if at > now and lease > 0 and at < new_end then
        -- It comes first, because it may be refused. It also counts as a write: an out-of-memory server refuses HSET unless the
        -- script has already written.
        redis.call('PEXPIRE', key, math.max(lease, redis.call('PTTL', key)))
        redis.call('HSET', key, field, string.format('%.0f', new_end))
    end
end
-- Client tracking reports changes of a key only if the script reads it after its own last write.
redis.call('EXISTS', unpack(KEYS))
return renewed
