-- Acquires several objects or none of them. The caller prepends `local scripts = { … }`: as functions,
-- the scripts that acquire the objects and the scripts that undo that, each script once.
--
-- KEYS     for each object:
--            the keys of its acquisition script
--            the keys of its undo script
-- ARGV     for each object, first for its acquisition script and then for its undo script:
--            index of the script in `scripts`
--            number of keys
--            number of arguments
--            the arguments
-- Returns  { { reply }, … }: all objects are held; the reply for each
--          { i, { reply } }: object i (from 0) is refused with this reply, nothing has changed
--          { i, text }: object i is of another kind, nothing has changed
-- Any other error is returned as an error, as for a single object; nothing has changed.
--
-- A reply that is a number is a refusal. Each reply has its own array, because nil would end the
-- outer one.

-- How many of KEYS and ARGV have been read.
local key, arg = 0, 0

-- Returns the next script, with its keys and arguments.
local function read_script()
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

local replies, undo_scripts = {}, {}
while arg < #ARGV do
    local acquire, undo = read_script(), read_script()
    -- pcall: objects acquired so far must be released if the next one is of another kind.
    local succeeded, reply = pcall(acquire.run, acquire.keys, acquire.args)
    local refusal, failure
    if type(reply) == 'table' and reply.err then
        failure = reply.err
    elseif not succeeded then
        failure = tostring(reply)
    elseif type(reply) == 'number' then
        refusal = { reply }
    end
    if refusal or failure then
        for i = #undo_scripts, 1, -1 do
            -- pcall: the others must be released if this is refused. The error tells the client to release all.
            local undone, problem = pcall(undo_scripts[i].run, undo_scripts[i].keys, undo_scripts[i].args)
            if not undone then
                failure = type(problem) == 'table' and problem.err or tostring(problem)
            end
        end
        -- WRONGKIND and WRONGTYPE concern this object; other errors concern the server.
        if failure and not string.find(failure, 'WRONG', 1, true) then
            return redis.error_reply(failure)
        end
        return { #undo_scripts, refusal or failure }
    end
    table.insert(replies, { reply })
    table.insert(undo_scripts, undo)
end
return replies
