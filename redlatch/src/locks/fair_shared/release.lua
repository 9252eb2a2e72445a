-- Sets an owner's hold count to the number of holds to keep. 0 releases the hold, removes the owner from the queue if it is still
-- there from waiting, and serves the queue.
--
-- KEYS     see holders.lua
-- ARGV[1]  field
-- ARGV[2]  channel
-- ARGV[3]  hold count to keep
-- ARGV[4]  lease in ms; 0: do not change the end of the hold
-- ARGV[5]  grace period in ms
-- ARGV[6]  number of all permits
-- ARGV[7]  the key of the requests to release the object, from which the owner is removed; absent: it is not
-- Returns  1: done; 0: this owner does not hold the object
local field, keep = ARGV[1], ARGV[3]
if ARGV[7] then
    -- pcall: without permission, or while the slot moves, the request remains until it expires.
    redis.pcall('ZREM', ARGV[7], field)
end
local refused = load_holders(ARGV[6])
local left = 0
if keep == '0' then
    local head = redis.call('LINDEX', KEYS[2], 0)
    left = head and left_for(head) or 0
    -- Also if another program has overwritten the object's key. Then, and in the queue of an object of the other kind, the
    -- message that woke this owner is now meant for the next waiter.
    if leave(field) and refused then
        wake_head(ARGV[2])
    end
end
if refused then
    return refused
end
local is_held = ends[field] and 1 or 0
if keep ~= '0' then
    if is_held == 1 then
        set_hold(field, keep, tonumber(ARGV[4]))
    end
    return is_held
end
if is_held == 0 then
    -- A waiter has given up. That does not prolong the turn of a dead head.
    wake_next(ARGV[2], true)
    return 0
end
remove_hold(field)
wake_after_release(ARGV[2], left, tonumber(ARGV[5]))
return 1
