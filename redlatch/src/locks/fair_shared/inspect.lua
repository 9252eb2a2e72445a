-- Returns the holders.
--
-- KEYS     see holders.lua
-- ARGV[1]  number of all permits
-- Returns  for each hold: field, hold count, remaining ms
local refused = load_holders(ARGV[1])
if refused then
    return refused
end
local holds = {}
for field, at in pairs(ends) do
    table.insert(holds, { field, redis.call('HGET', KEYS[1], field), at - now })
end
return holds
