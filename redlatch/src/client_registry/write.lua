-- Writes entries of a client to its hash.
--
-- KEYS[1]  the hash
-- ARGV[1]  its time to live in ms
-- ARGV[2]  1: replaces the hash, 0: changes it if it is that of the instance
-- ARGV[3]  the instance of the client: another process may use the same client id
-- ARGV[4]  number of fields to remove
-- ARGV     these fields; then for each field to set: its name, an age in ms or nothing, and a text. With an age, the
--          value is the time that long ago in ms, followed by the text
-- Returns  the number of fields afterwards
local key, removed = KEYS[1], tonumber(ARGV[4])
local exists, replaces = redis.call('HLEN', key) > 0, ARGV[2] == '1'
if not replaces and redis.call('HGET', key, 'instance') ~= ARGV[3] then
    return 0
elseif exists and replaces then
    -- Only if it exists: a server without memory does not refuse the rest of a script that has written something.
    redis.call('DEL', key)
end
local time = redis.call('TIME')
local now = math.floor(time[1] * 1000 + time[2] / 1000)
for i = 5, 4 + removed do
    redis.call('HDEL', key, ARGV[i])
end
for i = 5 + removed, #ARGV, 3 do
    local age, text = tonumber(ARGV[i + 1]), ARGV[i + 2]
    redis.call('HSET', key, ARGV[i], (age and string.format('%d', now - age) or '') .. text)
end
expire(key, ARGV[1])
return redis.call('HLEN', key)
