-- Records a request to release a hold, and publishes. `owner`: as the requests name it, of a permit its id. `left`: ms until
-- the hold ends unless it is renewed. `limit`: ms until which it may be renewed; nil: no limit. Of several requests to one
-- owner the earliest limit counts.
local function record(requests, channel, owner, left, limit)
    local time, never = redis.call('TIME'), 1000000000000000
    local last = limit and time[1] * 1000 + math.floor(time[2] / 1000) + limit or never
    local earlier = redis.call('ZSCORE', requests, owner)
    -- The request must outlast the hold: a hold that was revoked would be renewed again. A re-entry may extend it until the
    -- client of its holder has checked it, so there is an hour more.
    local lifetime = math.max(left, 0) + (limit or 0) + 3600000
    lifetime = math.max(lifetime, redis.call('PTTL', requests))
    redis.call('ZADD', requests, math.min(last, tonumber(earlier or never)), owner)
    expire(requests, lifetime)
    -- Redisson ignores this message for locks. For permits it wakes two waiters, which try once more.
    redis.call('PUBLISH', channel, '2')
end

