-- Renews the leases of many sets of permits at once, each only while all of its permits are held. The leases of a set of which a
-- permit was asked for by a certain time are not extended beyond that time. The caller prepends `requests.lua`.
--
-- KEYS     for each set, the held permits of its semaphore: sorted set id -> timestamp of expiry in
--          epoch ms
-- ARGV[1]  lease in ms; 0: only check, do not change the expiry
-- ARGV     then for each set, in the order of KEYS:
--            its ids, concatenated as 32 hex digits each
--            the key of the requests to release permits of its semaphore
-- Returns  for each set 1: renewed, 0: not all of its permits are held
--          -1: renewed, and one of them was asked for
--          else the ms until it must have been released, plus 2: the leases were extended until then at most
--
-- Publishes nothing: permits that were deleted with their semaphore cannot be acquired, and setting
-- new permits publishes.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local now_rounded_up = math.ceil(time[1] * 1000 + time[2] / 1000)
local renewed = {}
for i = 1, #KEYS do
    requests[i] = ARGV[1 + 2 * i]
end
for i, key in ipairs(KEYS) do
    local ids, owners, extended = {}, {}, lease
    renewed[i] = 1
    for hex in string.gmatch(ARGV[2 * i], string.rep('%x', 32)) do
        local id = string.gsub(hex, '%x%x', function(pair)
            return string.char(tonumber(pair, 16))
        end)
        -- pcall: a key that is no longer a sorted set must not prevent the renewal of the others.
        local timestamp = redis.pcall('ZSCORE', key, id)
        if type(timestamp) ~= 'string' or tonumber(timestamp) <= now then
            renewed[i] = 0
            break
        end
        table.insert(ids, id)
        table.insert(owners, hex)
    end
    if renewed[i] == 1 then
        extended, renewed[i] = limit(i, owners)
    end
    if renewed[i] ~= 0 and extended > 0 then
        -- Deletes nothing, but counts as a write. An out-of-memory server refuses ZADD unless the
        -- script has already written.
        redis.call('ZREM', key, '')
        for _, id in ipairs(ids) do
            redis.call('ZADD', key, 'XX', 'GT', now_rounded_up + extended, id)
        end
    end
end
-- Client tracking reports changes of a key only if the script reads it after its own last write.
redis.call('EXISTS', unpack(KEYS))
return renewed
