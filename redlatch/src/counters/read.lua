-- Returns the value of a counter; 0 if it does not exist.
--
-- KEYS[1]  the counter
local value, kind_error = read_counter(KEYS[1])
if kind_error then
    return kind_error
end
return value or 0
