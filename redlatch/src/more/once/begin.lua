-- Begins the run of a slot unless it has a run already.
--
-- KEYS[1]  the record: hash with run, host, by, began and, after the run, ended and outcome
-- ARGV[1]  id of the run; empty: only look
-- ARGV[2]  length of a slot in ms by the server's clock; 0: the key is that of one slot
-- ARGV[3]  time to live of the record in ms
-- ARGV[4]  host
-- ARGV[5]  by
-- Returns  1: begun, also if this is a repetition; 0: looked, and the slot has no run
--          else the run of the slot: { now, host, by, began, ended, outcome }, times in ms; without an end the last two are ''
--          -1: the key is a hash, but not a record
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local record = redis.call('HMGET', KEYS[1], 'run', 'host', 'by', 'began', 'ended', 'outcome')
local run, began, slot = record[1], tonumber(record[4] or ''), tonumber(ARGV[2])
if not (run and began) and redis.call('EXISTS', KEYS[1]) == 1 then
    return -1
end
if run and run == ARGV[1] then
    return 1
end
-- A clock that was set back is in an earlier slot, which may have had a run, too.
if run and (slot == 0 or math.floor(now / slot) <= math.floor(began / slot)) then
    return { now, record[2] or '', record[3] or '', began, record[5] or '', record[6] or '' }
end
if ARGV[1] == '' then
    return 0
end
-- Deletes nothing: if HDEL is refused, nothing has changed.
redis.call('HDEL', KEYS[1], '')
redis.call('HSET', KEYS[1], 'run', ARGV[1], 'host', ARGV[4], 'by', ARGV[5], 'began', string.format('%d', now))
redis.call('HDEL', KEYS[1], 'ended', 'outcome')
expire(KEYS[1], ARGV[3])
return 1
