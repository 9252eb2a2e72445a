-- Returns the token of the latest acquisition; 0 before the first.
--
-- KEYS[1]  the token
-- Returns  the token, as text
return redis.call('GET', KEYS[1]) or '0'
