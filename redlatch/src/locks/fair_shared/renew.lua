-- Renews many holds at once, each only while it lasts. The lease of an owner that was asked to release its hold by a certain time
-- is not extended beyond that time. The caller prepends `requests.lua`.
--
-- KEYS     the object of each hold: see holders.lua
-- ARGV[1]  lease in ms; 0: only check, do not change the end
-- ARGV     then for each hold, in the order of KEYS: its field
-- Returns  for each hold 1: renewed, 0: it has ended
--          -1: renewed, and its owner was asked to release it
--          else the ms until it must have released it, plus 2: the lease was extended until then at most
--
-- Wakes no waiter if the object was deleted: waiters retry by themselves.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local now_rounded_up = math.ceil(time[1] * 1000 + time[2] / 1000)
local renewed = {}
for i, key in ipairs(KEYS) do
    requests[i] = requests_key(key)
end
for i, key in ipairs(KEYS) do
    local field, extended = ARGV[1 + i] .. ':expire_time', 0
    -- pcall: a key that is no longer a hash must not prevent the renewal of the others.
    local at = redis.pcall('HGET', key, field)
    at = type(at) == 'string' and tonumber(at) or 0
    renewed[i] = 0
    if at > now then
        extended, renewed[i] = limit(i, { ARGV[1 + i] })
    end
    if extended > 0 and at < now_rounded_up + extended then
        -- It comes first, because it may be refused. It also counts as a write: an out-of-memory server refuses HSET unless the
        -- script has already written.
        redis.call('PEXPIRE', key, math.max(extended, redis.call('PTTL', key)))
        redis.call('HSET', key, field, string.format('%.0f', now_rounded_up + extended))
    end
end
-- Client tracking reports changes of a key only if the script reads it after its own last write.
redis.call('EXISTS', unpack(KEYS))
return renewed
