-- Begins the run of a slot unless it has a run already, or begins one more in the place of a certain run that has no outcome.
--
-- KEYS[1]  the record: hash with run, attempt, host, by, began and, after the run, ended and outcome
-- ARGV[1]  id of the run; empty: only look
-- ARGV[2]  length of a slot in ms by the server's clock; 0: the key is that of one slot
-- ARGV[3]  time to live of the record in ms
-- ARGV[4]  host
-- ARGV[5]  by
-- ARGV[6]  how much later than at 0 the slots begin in ms
-- ARGV[7]  id of the run without an outcome that this one may replace; empty: none
-- Returns  begun, also if this is a repetition: which run of the slot it is, from 1; 0: looked, and the slot has no run
--          else the run of the slot: { now, host, by, began, ended, outcome, attempt, id }, times in ms; without an end ended
--          and outcome are ''
--          -1: the key is a hash, but not a record
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local record = redis.call('HMGET', KEYS[1], 'run', 'host', 'by', 'began', 'ended', 'outcome', 'attempt')
local run, began, slot, offset = record[1], tonumber(record[4] or ''), tonumber(ARGV[2]), tonumber(ARGV[6])
local attempt = tonumber(record[7] or '') or 1
if not (run and began) and redis.call('EXISTS', KEYS[1]) == 1 then
    return -1
end
if run and run == ARGV[1] then
    -- Written again: replicas confirm what was written on the connection of the repetition.
    redis.call('HSET', KEYS[1], 'run', run)
    return attempt
end
-- How many slots the run is behind. A clock that was set back is in an earlier slot, which may have had a run, too.
local behind = 0
if run and slot > 0 then
    behind = math.floor((now - offset) / slot) - math.floor((began - offset) / slot)
end
local is_retry = run and behind == 0 and ARGV[1] ~= '' and not record[5] and run == ARGV[7]
if run and behind <= 0 and not is_retry then
    return { now, record[2] or '', record[3] or '', began, record[5] or '', record[6] or '', attempt, run }
end
if ARGV[1] == '' then
    return 0
end
attempt = is_retry and attempt + 1 or 1
-- Deletes nothing: if HDEL is refused, nothing has changed.
redis.call('HDEL', KEYS[1], '')
redis.call('HSET', KEYS[1], 'run', ARGV[1], 'host', ARGV[4], 'by', ARGV[5], 'began', string.format('%d', now),
    'attempt', attempt)
redis.call('HDEL', KEYS[1], 'ended', 'outcome')
expire(KEYS[1], ARGV[3])
return attempt
