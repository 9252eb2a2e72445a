-- Begins the run of a firing, unless its slot has one, or another run of the job lasts.
--
-- KEYS[1]  the record: hash with last, latest, skipped, succeeded, schedule, and of each run the fields run:SLOT:ATTEMPT (began, id,
--          owner, lock, host, by) and, after it, end:SLOT:ATTEMPT (ended, state, outcome, output). The parts are lines
-- KEYS[2]  the lock of the run
-- ARGV[1]  id of the run; empty: only ask, without KEYS[2]
-- ARGV[2]  slot: the scheduled time in ms since 1970
-- ARGV[3]  number of attempts that a slot may have
-- ARGV[4]  how far the slot may be ahead of the server's clock, in ms; 0: any time
-- ARGV[5]  while another run lasts: skip, wait or allow
-- ARGV[6]  number of runs to keep
-- ARGV[7]  time to live of the record in ms
-- ARGV[8]  owner, lock, host, by
-- ARGV[9]  schedule
-- Returns  { 0, 0, 0 }: the slot may begin, but this only asked, or the lock has ended; { 1, attempt, 0 }: begun, also if this is a repetition
--          { 2, 0, 0 }: the slot was run, skipped or lost, or a later one was; { 3, attempt, ms }: its run lasts
--          { 4, ms, 0 }: too early by this time; { 5, 0, 0 }: skipped; { 6, ms, 0 }: another run lasts
--          { -1, 0, 0 }: the key is a hash, but not a record
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local run, slot, mode = ARGV[1], tonumber(ARGV[2]), ARGV[5]
local state = redis.call('HMGET', KEYS[1], 'last', 'latest', 'skipped')
local last, latest = tonumber(state[1] or ''), state[2]
if not last and redis.call('EXISTS', KEYS[1]) == 1 then
    return { -1, 0, 0 }
end

local function field(attempt)
    return string.format('%d', slot) .. ':' .. attempt
end
-- The ms that the lock of a run has left; -1: it never expires; false: the run is dead.
local function left(text)
    local owner, lock = string.match(text, '^[^\n]*\n[^\n]*\n([^\n]*)\n([^\n]*)')
    -- A reader has a key of its own.
    local held = owner and (owner == '' and redis.call('EXISTS', lock) or redis.call('HEXISTS', lock, owner))
    return held == 1 and redis.call('PTTL', lock)
end
local changes = {}
local function change(name, value)
    table.insert(changes, name)
    table.insert(changes, value)
end
local ended = {}
local function lose(of)
    ended[of] = true
    change('end:' .. of, string.format('%d', now) .. '\nlost\n\n')
end

local attempt, text = 0, nil
while true do
    local found = redis.call('HGET', KEYS[1], 'run:' .. field(attempt + 1))
    if not found then
        break
    end
    attempt, text = attempt + 1, found
end
if text then
    if string.match(text, '^[^\n]*\n([^\n]*)') == run then
        -- Written again: replicas confirm what was written on the connection of the repetition.
        redis.call('HSET', KEYS[1], 'latest', latest)
        return { 1, attempt, 0 }
    end
    if redis.call('HEXISTS', KEYS[1], 'end:' .. field(attempt)) == 1 then
        return { 2, 0, 0 }
    end
    local ms = left(text)
    if ms then
        return { 3, attempt, ms }
    end
    -- Those that wait do not look at later runs here, but below.
    if attempt >= tonumber(ARGV[3]) or (mode == 'allow' and last and last > slot) then
        lose(field(attempt))
        redis.call('HSET', KEYS[1], unpack(changes))
        return { 2, 0, 0 }
    end
elseif last and slot <= last then
    return { 2, 0, 0 }
elseif tonumber(ARGV[4]) > 0 and slot - now > tonumber(ARGV[4]) then
    return { 4, slot - now - tonumber(ARGV[4]), 0 }
end
if latest and latest ~= field(attempt) and mode ~= 'allow' then
    local other = redis.call('HGET', KEYS[1], 'run:' .. latest)
    if other and redis.call('HEXISTS', KEYS[1], 'end:' .. latest) == 0 then
        local ms = left(other)
        if ms and (mode == 'wait' or text) then
            return { 6, ms, 0 }
        elseif ms and tonumber(ARGV[4]) > 0 and slot > now then
            -- The other run may end in time.
            return { 4, slot - now, 0 }
        elseif ms then
            redis.call('HSET', KEYS[1], 'last', string.format('%d', slot),
                'skipped', string.format('%d', (tonumber(state[3] or '') or 0) + 1))
            return { 5, 0, 0 }
        end
        lose(latest)
    end
end
if run == '' or not left('\n\n' .. ARGV[8]) then
    return { 0, 0, 0 }
end
if text then
    lose(field(attempt))
end
attempt = attempt + 1
change('last', string.format('%d', math.max(last or slot, slot)))
change('latest', field(attempt))
change('schedule', ARGV[9])
change('run:' .. field(attempt), string.format('%d', now) .. '\n' .. run .. '\n' .. ARGV[8])
-- The runs that are not kept: the oldest, those that last after all others. Found before anything changes.
local runs = { { slot, attempt, field(attempt), true } }
local names = redis.call('HKEYS', KEYS[1])
for _, name in ipairs(names) do
    ended[string.match(name, '^end:(.*)$') or ''] = true
end
for _, name in ipairs(names) do
    local of, number = string.match(name, '^run:(%d+):(%d+)$')
    if of then
        local id = of .. ':' .. number
        local lasts = not ended[id] and left(redis.call('HGET', KEYS[1], name)) ~= false
        table.insert(runs, { tonumber(of), tonumber(number), id, lasts })
    end
end
table.sort(runs, function(a, b)
    if a[4] ~= b[4] then
        return b[4]
    end
    return a[1] < b[1] or a[1] == b[1] and a[2] < b[2]
end)
-- Deletes nothing: if HDEL is refused, nothing has changed.
redis.call('HDEL', KEYS[1], '')
redis.call('HSET', KEYS[1], unpack(changes))
for i = 1, #runs - tonumber(ARGV[6]) do
    redis.call('HDEL', KEYS[1], 'run:' .. runs[i][3], 'end:' .. runs[i][3])
end
expire(KEYS[1], ARGV[7])
return { 1, attempt, 0 }
