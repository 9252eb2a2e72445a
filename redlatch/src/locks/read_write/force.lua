-- Releases one side of the lock, whichever owners hold it, and wakes waiters. Does not change other
-- objects. A writer's read holds are released together with its write side; its read side
-- alone can be released, too.
--
-- KEYS[1]  the lock: hash mode -> read | write, owner -> hold count, owner:write -> hold count
-- ARGV[1]  channel
-- ARGV[2]  the side: read | write
-- ARGV[3]  prefix of the holds' timeout keys
-- Returns  1: released, 0: that side was free, -1: the key is a hash, but not a read-write lock
local reads = {}
local alive = 0
local mode = each_holder(KEYS[1], function(field, owner, side, count)
    if side == 'read' then
        if longest_remaining(ARGV[3], owner, count) > 0 then
            alive = 1
        end
        reads[field] = count
    end
end)
if mode == -1 or mode == 0 or (ARGV[2] == 'write' and mode == 'read') then
    return mode == -1 and -1 or 0
end
for owner, count in pairs(reads) do
    delete_timeouts(ARGV[3], owner, count, 1)
    redis.call('HDEL', KEYS[1], owner)
end
if ARGV[2] == mode then
    redis.call('DEL', KEYS[1])
    if mode == 'read' then
        redis.call('PUBLISH', ARGV[1], '0')
    else
        wake_all(ARGV[1])
    end
    return 1
end
return alive
