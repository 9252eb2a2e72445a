//! The procedure for MariaDB, and both databases with sqlx.

use redlatch_fencing::mariadb::{book, fence, is_stale};
use redlatch_fencing::postgresql_sqlx;
use redlatch_testkit::{shared, unique};
use sqlx::{Connection as _, Error, MySqlConnection, PgConnection};

use crate::support::{Database, MariadbDatabase, OVERLAPS, assert_overlap};

#[tokio::test]
async fn equal_and_greater_tokens_pass_and_smaller_ones_do_not() {
    let mariadb = MariadbDatabase::create().await;
    let postgresql = Database::create().await;
    let mut in_mariadb = mariadb.connect().await;
    let mut in_postgresql = PgConnection::connect(&postgresql.url).await.unwrap();
    // Also of 51 bits, as those that follow the clock.
    for (token, passes) in [
        (5, true),
        (5, true),
        (4, false),
        (1_795_947_363_524_355, true),
        (1_795_947_363_524_354, false),
        (1_795_947_363_524_356, true),
        (i64::MAX.unsigned_abs(), true),
        (7, false),
    ] {
        // Each resource has a token of its own, also one with a space behind the name.
        for other in ["account ", "Account"] {
            book(&mut in_mariadb, other, 1, 6).await.unwrap();
        }
        match book(&mut in_mariadb, "account", 1, token).await {
            Ok(()) => assert!(passes, "{token}"),
            Err(error) => assert!(!passes && is_stale(&error), "{token}: {error:?}"),
        }
        match postgresql_sqlx::book(&mut in_postgresql, "account", 1, token).await {
            Ok(()) => assert!(passes, "{token}"),
            Err(error) => {
                let is_stale = postgresql_sqlx::is_stale(&error);
                assert!(!passes && is_stale, "{token}: {error:?}");
            }
        }
    }
    let written = [5, 5, 1_795_947_363_524_355, 1_795_947_363_524_356, i64::MAX];
    assert_eq!(mariadb.tokens("account").await, written);
    assert_eq!(postgresql.tokens("account").await, written);
}

#[tokio::test]
async fn invalid_tokens_are_refused() {
    let database = MariadbDatabase::create().await;
    let mut connection = database.connect().await;
    for has_row in [false, true] {
        for token in [0, u64::MAX] {
            let error = book(&mut connection, "account", 1, token).await;
            let error = error.unwrap_err();
            let code = error.as_database_error().and_then(|error| error.code());
            assert_eq!(code.as_deref(), Some("23000"), "{error:?}");
        }
        for arguments in ["'account', NULL", "NULL, 1", "REPEAT('x', 513), 1"] {
            let call = format!("CALL redlatch_fence({arguments})");
            let error = sqlx::raw_sql(&call).execute(&mut connection).await;
            assert!(matches!(error, Err(Error::Database(_))), "{arguments}");
        }
        if !has_row {
            assert_eq!(database.tokens("account").await, [0; 0]);
            book(&mut connection, "account", 1, 3).await.unwrap();
        }
    }
    assert_eq!(database.tokens("account").await, [3]);
}

/// Runs `first` and leaves its transaction open, and runs `second` meanwhile, which waits. Ends the first transaction as
/// `commits` says. Returns the number of entries that the second one reads, if it passes.
async fn overlap(
    database: &MariadbDatabase,
    account: &str,
    [first, second]: [u64; 2],
    commits: bool,
) -> Result<i64, Error> {
    let mut holder = database.connect().await;
    let mut open = holder.begin().await.unwrap();
    fence(&mut open, account, first).await.unwrap();
    let entry = "INSERT INTO ledger (account, amount, token) VALUES (?, 1, ?)";
    let entry = sqlx::query(entry).bind(account).bind(first.cast_signed());
    entry.execute(&mut *open).await.unwrap();

    let mut other = database.connect().await;
    let name = account.to_owned();
    let waits = tokio::spawn(async move {
        let mut transaction = other.begin().await?;
        fence(&mut transaction, &name, second).await?;
        let entries = "SELECT count(*) FROM ledger WHERE account = ?";
        let entries = sqlx::query_scalar(entries).bind(name);
        let entries = entries.fetch_one(&mut *transaction).await?;
        transaction.commit().await?;
        Ok(entries)
    });
    database.until_blocked().await;
    match commits {
        true => open.commit().await.unwrap(),
        false => open.rollback().await.unwrap(),
    }
    waits.await.unwrap()
}

/// The feared interleaving: two transactions check at the same time, neither sees the token of the other, and both write.
#[tokio::test]
async fn concurrent_transactions_on_one_resource_are_ordered() {
    let database = MariadbDatabase::create().await;
    // Also if the resource has no row yet.
    for has_row in [true, false] {
        for (tokens, commits, passes) in OVERLAPS {
            let account = unique("account");
            if has_row {
                let mut connection = database.connect().await;
                let mut transaction = connection.begin().await.unwrap();
                fence(&mut transaction, &account, 3).await.unwrap();
                transaction.commit().await.unwrap();
            }
            let second = overlap(&database, &account, tokens, commits).await;
            let what = format!("{has_row} {tokens:?} {commits}");
            assert_overlap(&what, second, commits, passes, is_stale);
        }
    }
}

/// A refused transaction is rolled back before the error is returned, so the next holder does not wait for it.
#[tokio::test]
async fn refused_transaction_leaves_no_lock() {
    let database = MariadbDatabase::create().await;
    let [mut late, mut next] = [database.connect().await, database.connect().await];
    book(&mut next, "account", 1, 2).await.unwrap();
    let refused = book(&mut late, "account", 1, 1).await.unwrap_err();
    assert!(is_stale(&refused));
    let set = "SET innodb_lock_wait_timeout = 0";
    sqlx::raw_sql(set).execute(&mut next).await.unwrap();
    book(&mut next, "account", 1, 2).await.unwrap();
    assert_eq!(database.tokens("account").await, [2, 2]);
}

/// Redis loses its data, and the storage accepts the next holder all the same.
#[tokio::test(flavor = "multi_thread")]
async fn tokens_that_follow_the_clock_pass_after_lost_data() {
    let database = MariadbDatabase::create().await;
    let mut connection: MySqlConnection = database.connect().await;
    let redis = shared();
    let client = redlatch::Client::connect(&redis.url()).await.unwrap();
    let name = unique("clock");
    let counting = client.fenced_lock(&name);
    let lock = counting.clone().clock_tokens();
    let mut accepted = Vec::new();
    for lock in [&lock, &lock, &counting] {
        let guard = lock.lock().await.unwrap();
        let written = book(&mut connection, &name, 1, guard.token()).await;
        guard.unlock().await.unwrap();
        let is_refused = written.as_ref().is_err_and(is_stale);
        assert!(written.is_ok() || is_refused, "{written:?}");
        accepted.push(written.is_ok());
        let key = format!("redisson_lock_token:{{{name}}}");
        assert_eq!(redis.command::<i64>(&["DEL", &key]), 1);
    }
    // A count from 1 is refused: what the clock avoids.
    assert_eq!(accepted, [true, true, false]);
}
