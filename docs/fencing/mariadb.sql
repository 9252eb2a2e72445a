-- The greatest token that a committed transaction has used, for each resource. Bytes, because text is equal to text with
-- another number of spaces at its end, or in other collations with other capital letters.
CREATE TABLE redlatch_fence_token (
    resource varbinary(512) PRIMARY KEY,
    token bigint NOT NULL CHECK (token > 0)
) ENGINE = InnoDB;

DELIMITER //

-- Records the token, or raises the SQLSTATE RL001 if a greater one has been recorded. Call it first in each transaction, and
-- roll back after an error. It locks the row of the resource, so transactions on one resource run one after the other:
-- ON DUPLICATE KEY and FOR UPDATE wait for the other transaction and see what that has committed, also under REPEATABLE READ.
-- An equal token passes, because a holder may write more than once.
CREATE PROCEDURE redlatch_fence(IN resource_name varbinary(512), IN holder_token bigint)
BEGIN
    DECLARE greatest_token bigint;
    INSERT INTO redlatch_fence_token (resource, token) VALUES (resource_name, holder_token)
    ON DUPLICATE KEY UPDATE token = IF(holder_token > 0, GREATEST(token, holder_token), holder_token);
    SELECT token INTO greatest_token FROM redlatch_fence_token WHERE resource = resource_name FOR UPDATE;
    IF greatest_token > holder_token THEN
        SIGNAL SQLSTATE 'RL001' SET MESSAGE_TEXT = 'the fencing token is too old; do not retry with it';
    END IF;
END //

DELIMITER ;
