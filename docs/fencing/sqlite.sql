-- Fencing tokens of redlatch, for SQLite 3.35 and later.

-- The greatest token that a committed transaction has used, for each resource.
CREATE TABLE redlatch_fence_token (
    resource TEXT NOT NULL PRIMARY KEY,
    token INTEGER NOT NULL CHECK (typeof(token) = 'integer' AND token > 0)
);

CREATE VIEW redlatch_fence AS SELECT resource, token FROM redlatch_fence_token;

-- Records a token that is inserted into the view, or fails if a greater one has been recorded (SQLITE_CONSTRAINT_TRIGGER,
-- a message that begins with RL001). Insert it first in each transaction. An equal token passes, because a holder may
-- write more than once.
CREATE TRIGGER redlatch_fence_check INSTEAD OF INSERT ON redlatch_fence
BEGIN
    -- Also where the conflict clause of a statement (INSERT OR IGNORE) would override the constraints of the table.
    SELECT RAISE(ABORT, 'the fencing token must be an integer greater than 0, and the resource a text')
    WHERE typeof(NEW.resource) <> 'text' OR typeof(NEW.token) NOT IN ('integer', 'text') OR CAST(NEW.token AS INTEGER) <= 0
        OR CAST(CAST(NEW.token AS INTEGER) AS TEXT) <> CAST(NEW.token AS TEXT);

    SELECT RAISE(ABORT, 'RL001: the fencing token is too old; do not retry with it')
    FROM redlatch_fence_token WHERE resource = NEW.resource AND token > NEW.token;

    INSERT INTO redlatch_fence_token (resource, token) VALUES (NEW.resource, NEW.token)
    ON CONFLICT (resource) DO UPDATE SET token = excluded.token;
END;
