-- Returns the number under a key; 0 if there is none.
--
-- KEYS[1]  the number
local value, wrong = number(KEYS[1])
if wrong then
    return wrong
end
return value or 0
