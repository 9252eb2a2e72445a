-- Fencing tokens of redlatch, for PostgreSQL 9.5 and later.

-- The greatest token that a committed transaction has used, for each resource.
CREATE TABLE redlatch_fence_token (
    resource text PRIMARY KEY,
    token bigint NOT NULL CHECK (token > 0)
);

-- Records the token, or raises the SQLSTATE RL001 if a greater one has been recorded. Call it first in each
-- transaction. It locks the row of the resource, so transactions on one resource run one after the other: ON CONFLICT
-- waits for the other transaction and compares with what that has committed, also under READ COMMITTED and if the row
-- is new. An equal token passes, because a holder may write more than once.
CREATE FUNCTION redlatch_fence(resource text, token bigint) RETURNS void
LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    INSERT INTO redlatch_fence_token AS greatest (resource, token)
    VALUES (redlatch_fence.resource, redlatch_fence.token)
    ON CONFLICT (resource) DO UPDATE SET token = excluded.token
    WHERE greatest.token <= excluded.token;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'fencing token % of resource "%" is too old', redlatch_fence.token, redlatch_fence.resource
            USING ERRCODE = 'RL001', HINT = 'A later holder of the lock has used the resource. Do not retry with this token.';
    END IF;
END
$$;
