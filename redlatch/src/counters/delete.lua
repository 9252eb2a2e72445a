-- Deletes a counter.
--
-- KEYS[1]  the counter
-- ARGV[1]  channel; empty: publish nothing, and no message follows
-- ARGV[2]  message to publish
-- Returns  1: deleted, 0: it did not exist
local value, kind_error = read_counter(KEYS[1])
if kind_error then
    return kind_error
end
if not value then
    return 0
end
if ARGV[1] ~= '' then
    -- PUBLISH comes first: if it is refused, nothing has changed.
    redis.call('PUBLISH', ARGV[1], ARGV[2])
end
return redis.call('DEL', KEYS[1])
