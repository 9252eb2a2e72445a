-- Prepended to the scripts that read all fields of a read-write lock.

-- Calls `visit(field, owner, side, count)` for each holder. Returns the lock's mode; 0: the key does not
-- exist, -1: the hash is not a read-write lock.
local function each_holder(key, visit)
    local fields = redis.call('HGETALL', key)
    local mode = 0
    for i = 1, #fields, 2 do
        if fields[i] == 'mode' and is_mode(fields[i + 1]) then
            mode = fields[i + 1]
        elseif not holder(fields[i], fields[i + 1]) then
            return -1
        end
    end
    if mode == 0 then
        return #fields == 0 and 0 or -1
    end
    for i = 1, #fields, 2 do
        if fields[i] ~= 'mode' then
            local owner, side = holder(fields[i], fields[i + 1])
            visit(fields[i], owner, side, fields[i + 1])
        end
    end
    return mode
end

