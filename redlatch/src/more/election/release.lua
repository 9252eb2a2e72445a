-- Releases the election's lock, after moving the successor to the head of the queue if there is one. Wakes observers. The
-- caller prepends fair_lock/release.lua as the function `release_lock`.
--
-- KEYS     see fair_lock/queue.lua
-- ARGV     see fair_lock/release.lua
-- ARGV[7]  the candidate to be next; empty: the head of the queue
-- ARGV[8]  how long the next candidate keeps its turn at most, in ms
-- Returns  as `release_lock`
local leader, channel, keep, successor = ARGV[1], ARGV[2], ARGV[3], ARGV[7]

-- Moves a candidate to the head of the queue, if it waits. Its wait time is the distance of its timeout to that of the
-- waiter before it. The waiters that it overtakes time out so much later, those behind it as before.
local function move_to_head(candidate)
    local position = redis.call('LPOS', KEYS[2], candidate)
    if not position or position == 0 then
        return
    end
    local timeout = timeout_of(candidate)
    local earlier_timeout = timeout_of(redis.call('LINDEX', KEYS[2], position - 1))
    if not timeout or not earlier_timeout then
        -- The timeouts were lost: the order stays as it is.
        return
    end
    local wait = timeout - earlier_timeout
    redis.call('LREM', KEYS[2], 1, candidate)
    redis.call('ZREM', KEYS[4], candidate)
    redis.call('HDEL', KEYS[5], candidate)
    shift(0, wait)
    shift(position, -wait)
    redis.call('LPUSH', KEYS[2], candidate)
    redis.call('ZADD', KEYS[3], now_ms() + math.max(redis.call('PTTL', KEYS[1]), 0) + wait, candidate)
end

if keep == '0' and successor ~= '' and redis.call('HEXISTS', KEYS[1], leader) == 1 then
    move_to_head(successor)
end
local released = release_lock()
local head = released == 1 and keep == '0' and redis.call('LINDEX', KEYS[2], 0)
if head then
    -- The turn of the next candidate counts from now: the fair lock lets a waiter that hangs keep it as if the lease had not
    -- ended early.
    local late = (timeout_of(head) or 0) - now_ms() - tonumber(ARGV[8])
    if late > 0 then
        shift(0, -late)
    end
    -- The release has woken only the next candidate. (With an empty queue it has published the same.)
    redis.call('PUBLISH', channel, '0')
end
return released
