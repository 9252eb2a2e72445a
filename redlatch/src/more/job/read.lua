-- Reads the record of a job.
--
-- KEYS[1]  the record
-- ARGV[1]  1: with the outputs of the runs, 0: without them
-- ARGV[2]  the largest number of fields. A hash with more is no record, and is not read
-- Returns  { now in ms, the fields and their values, the fields of runs without an end whose lock is held }
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local all, ended, live = {}, {}, {}
if redis.call('HLEN', KEYS[1]) <= tonumber(ARGV[2]) then
    all = redis.call('HGETALL', KEYS[1])
end
for i = 1, #all, 2 do
    ended[all[i]] = true
    if ARGV[1] == '0' and string.match(all[i], '^end:') then
        all[i + 1] = string.match(all[i + 1], '^[^\n]*\n[^\n]*\n[^\n]*\n') or all[i + 1]
    end
end
for i = 1, #all, 2 do
    local of = string.match(all[i], '^run:(.*)$')
    if of and not ended['end:' .. of] then
        local owner, lock = string.match(all[i + 1], '^[^\n]*\n[^\n]*\n([^\n]*)\n([^\n]*)')
        local held = owner and (owner == '' and redis.call('EXISTS', lock) or redis.call('HEXISTS', lock, owner))
        if held == 1 then
            table.insert(live, all[i])
        end
    end
end
return { now, all, live }
