-- Takes several things or none of them. Before this stands `local scripts = { … }`: as functions, the
-- scripts that take each kind of thing, and those that undo that.
--
-- KEYS     for each thing those of its taking, then those of its undoing
-- ARGV     for each thing, of its taking and then of its undoing: which script, how many keys, how
--          many arguments, the arguments
-- Returns  { { reply }, … }: all are held now, and this was the reply for each
--          { i, { reply } }: the i-th (from 0) is in the way with this reply, nothing has changed
--          { i, text }: the i-th is of another kind, nothing has changed
-- Any other error is answered as an error, as for one thing alone; nothing has changed.
--
-- In the way is who answers with a number. A reply of its own array, because nil would end the
-- outer one.
local key, arg = 0, 0
local function read()
    local script, keys, args = ARGV[arg + 1], {}, {}
    local key_count, arg_count = tonumber(ARGV[arg + 2]), tonumber(ARGV[arg + 3])
    arg = arg + 3
    for i = 1, key_count do
        keys[i] = KEYS[key + i]
    end
    for i = 1, arg_count do
        args[i] = ARGV[arg + i]
    end
    key, arg = key + key_count, arg + arg_count
    return { run = scripts[tonumber(script)], keys = keys, args = args }
end

local replies, undoing = {}, {}
while arg < #ARGV do
    local take, undo = read(), read()
    -- pcall: what was taken so far must not stay when the next thing is of another kind.
    local done, reply = pcall(take.run, take.keys, take.args)
    local refusal, failure
    if type(reply) == 'table' and reply.err then
        failure = reply.err
    elseif not done then
        failure = tostring(reply)
    elseif type(reply) == 'number' then
        refusal = { reply }
    end
    if refusal or failure then
        for i = #undoing, 1, -1 do
            undoing[i].run(undoing[i].keys, undoing[i].args)
        end
        -- WRONGKIND and WRONGTYPE are about this thing; the rest is about the server.
        if failure and not string.find(failure, 'WRONG', 1, true) then
            return redis.error_reply(failure)
        end
        return { #undoing, refusal or failure }
    end
    table.insert(replies, { reply })
    table.insert(undoing, undo)
end
return replies
