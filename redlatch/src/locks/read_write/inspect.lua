-- Returns the holders of one side, their hold counts and their remaining leases.
--
-- KEYS[1]  the lock: hash mode -> read | write, owner -> hold count, owner:write -> hold count
-- ARGV[1]  the side: read | write
-- ARGV[2]  prefix of the holds' timeout keys
-- Returns  for each holder { owner, hold count, remaining ms (-1: never expires) }
--          -1: the key is a hash, but not a read-write lock
local holders = {}
local left = redis.call('PTTL', KEYS[1])
local mode = each_holder(KEYS[1], function(_, owner, side, count)
    if side == ARGV[1] then
        local remaining = side == 'write' and left or longest_remaining(ARGV[2], owner, count)
        if remaining ~= 0 then
            table.insert(holders, { owner, count, remaining })
        end
    end
end)
if mode == -1 then
    return -1
end
return holders
