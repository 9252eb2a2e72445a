-- Returns the latest token: of the latest acquisition, or advanced since; 0 if there is none.
--
-- KEYS[1]  the token
-- Returns  the token, as text
return redis.call('GET', KEYS[1]) or '0'
