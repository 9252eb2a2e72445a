-- Numbers of the store as text, because Lua numbers are exact only up to 2^53.

-- Returns whether INCR can count up from this number: it is a signed 64-bit integer, but not the
-- greatest.
local function can_count_up(text)
    local sign, digits = text:match('^(-?)([1-9]%d*)$')
    if not digits then
        return text == '0'
    end
    local limit = sign == '-' and '9223372036854775809' or '9223372036854775807'
    return #digits < #limit or (#digits == #limit and digits < limit)
end

-- Returns whether the number `a` is less than `b`: the longer one is greater. `b` is not negative.
local function is_less(a, b)
    return a:sub(1, 1) == '-' or #a < #b or (#a == #b and a < b)
end

