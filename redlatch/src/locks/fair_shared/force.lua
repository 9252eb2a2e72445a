-- Removes all holds of one side, whichever owners have them, and serves the queue.
--
-- KEYS     see holders.lua
-- ARGV[1]  channel
-- ARGV[2]  1: those that write, 0: the others
-- ARGV[3]  grace period in ms
-- ARGV[4]  number of all permits
-- Returns  1: there were some, 0: there were none
local refused = load_holders(ARGV[4])
if refused then
    return refused
end
local head = redis.call('LINDEX', KEYS[2], 0)
local left = head and left_for(head) or 0
local fields = {}
for field in pairs(ends) do
    if (string.sub(field, -6) == ':write') == (ARGV[2] == '1') then
        table.insert(fields, field)
    end
end
for _, field in ipairs(fields) do
    remove_hold(field)
end
if #fields == 0 then
    return 0
end
wake_after_release(ARGV[1], left, tonumber(ARGV[3]))
return 1
