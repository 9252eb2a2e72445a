-- Returns the latest token, which an acquisition or advance.lua has set; 0 if it does not exist.
--
-- KEYS[1]  the token
-- Returns  the token, as text
return redis.call('GET', KEYS[1]) or '0'
