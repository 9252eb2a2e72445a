//! The trigger for SQLite.

use std::thread;

use redlatch_fencing::sqlite::{book, fence, is_stale};
use rusqlite::ErrorCode;

use crate::support::{File, stale};

#[test]
fn equal_and_greater_tokens_pass_and_smaller_ones_do_not() {
    let file = File::create();
    let mut database = file.connect();
    for (token, passes) in [
        (5, true),
        (5, true),
        (4, false),
        (7, true),
        (5, false),
        (7, true),
        (u64::MAX >> 1, true),
        (7, false),
    ] {
        match book(&mut database, "account", 1, token) {
            Ok(()) => assert!(passes, "{token}"),
            Err(error) => assert!(!passes && is_stale(&error), "{token}: {error:?}"),
        }
        // Each resource has a token of its own.
        book(&mut database, "other", 1, 6).unwrap();
    }
    assert_eq!(file.tokens("account"), [5, 5, 7, 7, i64::MAX]);
}

#[test]
fn invalid_tokens_are_refused() {
    let file = File::create();
    let mut database = file.connect();
    for token in [0, u64::MAX] {
        let error = book(&mut database, "account", 1, token).unwrap_err();
        assert!(!is_stale(&error), "{error:?}");
    }
    book(&mut database, "account", 1, 2).unwrap();
    for values in [
        "'account', NULL",
        "'account', 0",
        "'account', -1",
        "'account', 2.5",
        "'account', 'x'",
        "'account', x'02'",
        "NULL, 3",
        "x'61', 3",
    ] {
        for insert in ["INSERT", "INSERT OR IGNORE", "INSERT OR REPLACE"] {
            let call = format!("{insert} INTO redlatch_fence VALUES ({values})");
            let error = database.execute_batch(&call).unwrap_err();
            let code = error.sqlite_error_code();
            assert_eq!(
                code,
                Some(ErrorCode::ConstraintViolation),
                "{call}: {error:?}"
            );
            assert!(!is_stale(&error), "{call}: {error:?}");
        }
    }
    assert_eq!(file.tokens("account"), [2]);
}

/// As in PostgreSQL, also if the token is a text, as drivers may send it.
#[test]
fn text_is_compared_as_a_number() {
    let file = File::create();
    let mut database = file.connect();
    book(&mut database, "account", 1, 10).unwrap();
    let record = "INSERT INTO redlatch_fence VALUES ('account', ?1)";
    let refused = database.execute(record, ["9"]).unwrap_err();
    assert!(is_stale(&refused), "{refused:?}");
    database.execute(record, ["11"]).unwrap();
    assert!(is_stale(
        &book(&mut database, "account", 1, 10).unwrap_err()
    ));
}

/// What the transaction has read and written is undone with it, also the record of the token.
#[test]
fn transaction_that_is_rolled_back_records_nothing() {
    let file = File::create();
    let mut database = file.connect();
    let transaction = database.transaction().unwrap();
    fence(&transaction, "account", 9).unwrap();
    transaction.rollback().unwrap();
    book(&mut database, "account", 1, 1).unwrap();
}

#[test]
fn entries_of_many_connections_are_in_the_order_of_tokens() {
    let file = File::create();
    let written: usize = thread::scope(|scope| {
        let threads = (0..4).map(|thread| {
            let mut database = file.connect();
            scope.spawn(move || {
                let tokens = (0..25).map(|round| 1 + round * 4 + (round * 7 + thread * 5) % 16);
                let written = tokens.filter(|&token| {
                    let written = book(&mut database, "account", 1, token);
                    written
                        .inspect_err(|error| assert!(is_stale(error), "{error:?}"))
                        .is_ok()
                });
                written.count()
            })
        });
        let threads: Vec<_> = threads.collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .sum()
    });
    let tokens = file.tokens("account");
    assert_eq!(tokens.len(), written);
    assert_eq!(stale(&tokens), 0, "{tokens:?}");
    // Some were refused, and some were not.
    assert!((1..100).contains(&written), "{written}");
}
