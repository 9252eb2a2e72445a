-- Acquires the object for an owner whose turn it is, or returns when to retry. If the request waits, the owner joins the queue.
--
-- KEYS     see holders.lua
-- ARGV[1]  field
-- ARGV[2]  lease in ms
-- ARGV[3]  requested hold count
-- ARGV[4]  how long the object is kept for this owner once its turn has come, in ms; 0: the request does not wait
-- ARGV[5]  channel
-- ARGV[6]  grace period in ms
-- ARGV[7]  number of the request, if the owner accepts a grant; else 0
-- ARGV[8]  the requests to release the object
-- ARGV[9]  number of all permits
-- Returns  nil: the owner holds the object with this count
--          0: more than one hold was requested, but the owner has none: the hold to re-enter was lost; or the object is free, but
--          kept for another owner, and the request does not wait
--          -3: the owner reads, so it would wait for itself
--          else the ms after which to retry at the latest
local field, lease, wait = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[4])
local refused = load_holders(ARGV[9])
if refused then
    return refused
end
if ends[field] then
    set_hold(field, ARGV[3], lease)
    return nil
end
if ARGV[3] ~= '1' then
    return 0
end
local reader = string.match(field, '^(.+):write$')
if reader and ends[reader] then
    return -3
end
if ends[field .. ':write'] then
    -- The owner writes, so it may read, even if it waited before.
    leave(field)
    hold(field, lease)
    return nil
end
return acquire_in_turn(field, lease, wait, ARGV[5], tonumber(ARGV[6]), ARGV[7], ARGV[8])
