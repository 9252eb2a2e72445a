-- Prepended to scripts that renew many holds: how long each may be renewed, if its owner was asked to release it.
--
-- ARGV[1]  lease in ms; 0: only check
local lease = tonumber(ARGV[1])

-- For each hold, the key of the requests: sorted set owner -> timestamp until which its hold may be renewed. The script fills it.
-- They are not declared as keys: in a cluster, a script with several declared keys is refused while their slot is
-- moving, and a renewal must not be refused.
local requests = {}
local has_requests = nil

-- Returns that key of a lock. As in `name.rs`: the requests for `a` and `{a}` differ.
local function requests_key(key)
    return 'redlatch_lock_asked:' .. (string.find(key, '{', 1, true) and ':' .. key or '{' .. key .. '}')
end

-- Returns the lease that the i-th hold may have, and the reply for it. `owners`: as the requests name them, of permits their ids.
local function limit(i, owners)
    if has_requests == nil then
        -- Mostly there are none. pcall: without permission, or while a slot moves, requests do not count.
        has_requests = redis.pcall('EXISTS', unpack(requests)) ~= 0
    end
    local limit = nil
    for _, owner in ipairs(owners) do
        local score = has_requests and redis.pcall('ZSCORE', requests[i], owner)
        score = type(score) == 'string' and tonumber(score)
        if score and score < (limit or math.huge) then
            limit = score
        end
    end
    if not limit then
        return lease, 1
    elseif limit > 900000000000000 then
        return lease, -1
    end
    local time = redis.call('TIME')
    -- PEXPIRE refuses fractions, and the error would keep the other locks from being renewed.
    local left = math.floor(math.max(limit - time[1] * 1000 - time[2] / 1000, 0))
    return math.min(lease, left), left + 2
end

