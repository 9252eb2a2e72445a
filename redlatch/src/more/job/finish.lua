-- Records how a run has ended.
--
-- KEYS[1]  the record
-- ARGV[1]  id of the run
-- ARGV[2]  slot and attempt, SLOT:ATTEMPT
-- ARGV[3]  state, outcome and output, as lines
-- Returns  1: recorded, also if this is a repetition; 0: the run is not known any more, or was recorded as lost
local found = redis.call('HMGET', KEYS[1], 'run:' .. ARGV[2], 'end:' .. ARGV[2], 'succeeded')
local run, ended = found[1], found[2]
if not run or string.match(run, '^[^\n]*\n([^\n]*)') ~= ARGV[1] then
    return 0
end
if ended then
    return string.match(ended, '^[^\n]*\n(.*)$') == ARGV[3] and 1 or 0
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local changes = { 'end:' .. ARGV[2], string.format('%d', now) .. '\n' .. ARGV[3] }
local slot = string.match(ARGV[2], '^%d+')
if string.match(ARGV[3], '^ok\n') and tonumber(slot) > (tonumber(found[3] or '') or 0) then
    table.insert(changes, 'succeeded')
    table.insert(changes, slot)
end
redis.call('HSET', KEYS[1], unpack(changes))
return 1
