-- The environment of scripts in the interpreter. Runs once, and returns the function that runs a script.
local misused, sha1hex, line = ...

-- Ends the run.
local function refuse(what)
    misused(what)
    error(what, 0)
end

local command
local redis = { sha1hex = sha1hex }

-- An error of redis.call ends the script unless it catches it; redis.pcall returns it.
function redis.call(...)
    local reply = command(...)
    if type(reply) == 'table' and reply.err then
        error(reply, 0)
    end
    return reply
end

function redis.pcall(...)
    return command(...)
end

-- The first word is the code, with or without a `-`; a single word is no code.
function redis.error_reply(text)
    text = string.gsub(text, '^%-', '')
    if not string.find(text, ' ', 1, true) then
        text = 'ERR ' .. text
    end
    return { err = text }
end

function redis.status_reply(text)
    return { ok = text }
end

setmetatable(redis, {
    __index = function(_, name)
        refuse('redis.' .. tostring(name))
    end,
})

local globals = _G
for _, name in ipairs({ 'print', 'load', 'loadstring', 'loadfile', 'dofile', 'require', 'module', 'collectgarbage', 'newproxy' }) do
    rawset(globals, name, nil)
end
math.random, math.randomseed = nil, nil
globals.redis = redis
setmetatable(globals, {
    __index = function(_, name)
        refuse('the global ' .. tostring(name))
    end,
    __newindex = function(_, name)
        refuse('setting the global ' .. tostring(name))
    end,
})

-- Adds a text and the current line of the script to every error.
local function explain(problem)
    if type(problem) ~= 'table' then
        problem = { err = 'ERR ' .. tostring(problem) }
    end
    problem.line = line()
    return problem
end

return function(script, run_command, keys, args)
    command = run_command
    rawset(globals, 'KEYS', keys)
    rawset(globals, 'ARGV', args)
    return xpcall(script, explain)
end
