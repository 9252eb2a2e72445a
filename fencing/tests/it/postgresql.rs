//! The function for PostgreSQL.

use std::sync::Arc;

use redlatch_fencing::postgresql::{book, fence, is_stale};
use redlatch_testkit::unique;
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, Error, IsolationLevel};

use crate::support::{Database, OVERLAPS, assert_overlap, stale};

/// Records a token in a transaction of its own.
async fn fence_alone(client: &mut Client, resource: &str, token: u64) -> Result<(), Error> {
    let transaction = client.transaction().await?;
    fence(&transaction, resource, token).await?;
    transaction.commit().await
}

#[tokio::test]
async fn equal_and_greater_tokens_pass_and_smaller_ones_do_not() {
    let mut database = Database::create().await;
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
        let written = book(&mut database.client, "account", 1, token).await;
        match written {
            Ok(()) => assert!(passes, "{token}"),
            Err(error) => assert!(!passes && is_stale(&error), "{token}: {error:?}"),
        }
        // Each resource has a token of its own.
        book(&mut database.client, "other", 1, 6).await.unwrap();
    }
    let greatest = i64::MAX;
    assert_eq!(database.tokens("account").await, [5, 5, 7, 7, greatest]);
}

#[tokio::test]
async fn invalid_tokens_are_refused() {
    let mut database = Database::create().await;
    for token in [0, u64::MAX] {
        let error = book(&mut database.client, "account", 1, token).await;
        let error = error.unwrap_err();
        assert_eq!(error.code(), Some(&SqlState::CHECK_VIOLATION), "{error:?}");
    }
    for arguments in ["'account', NULL", "NULL, 1"] {
        let call = format!("SELECT redlatch_fence({arguments})");
        let error = database.client.batch_execute(&call).await.unwrap_err();
        assert_eq!(
            error.code(),
            Some(&SqlState::NOT_NULL_VIOLATION),
            "{error:?}"
        );
    }
    assert_eq!(database.tokens("account").await, [0; 0]);
}

/// PostgreSQL aborts the transaction, so a caller that ignores the error cannot write all the same.
#[tokio::test]
async fn refused_transaction_cannot_continue() {
    let mut database = Database::create().await;
    book(&mut database.client, "account", 1, 2).await.unwrap();
    let transaction = database.client.transaction().await.unwrap();
    let refused = fence(&transaction, "account", 1).await.unwrap_err();
    assert!(is_stale(&refused));
    let entry = "INSERT INTO ledger (account, amount, token) VALUES ('account', 1, 1)";
    let error = transaction.batch_execute(entry).await.unwrap_err();
    assert_eq!(error.code(), Some(&SqlState::IN_FAILED_SQL_TRANSACTION));
    transaction.commit().await.unwrap();
    assert_eq!(database.tokens("account").await, [2]);
}

/// Runs `first` and leaves its transaction open, and runs `second` meanwhile, which waits. Ends the first transaction as
/// `commits` says. Returns the number of entries that the second one reads, if it passes.
async fn overlap(
    database: &Database,
    account: &str,
    [first, second]: [u64; 2],
    commits: bool,
    isolation: IsolationLevel,
) -> Result<i64, Error> {
    let mut holder = database.connect().await;
    let open = holder.transaction().await.unwrap();
    fence(&open, account, first).await.unwrap();
    let entry = "INSERT INTO ledger (account, amount, token) VALUES ($1, 1, $2)";
    let token = first.cast_signed();
    open.execute(entry, &[&account, &token]).await.unwrap();

    let mut other = database.connect().await;
    let name = account.to_owned();
    let waits = tokio::spawn(async move {
        let transaction = other.build_transaction().isolation_level(isolation);
        let transaction = transaction.start().await?;
        fence(&transaction, &name, second).await?;
        let entries = "SELECT count(*) FROM ledger WHERE account = $1";
        let entries = transaction.query_one(entries, &[&name]).await?.get(0);
        transaction.commit().await?;
        Ok(entries)
    });
    database.until_blocked("SELECT redlatch_fence").await;
    match commits {
        true => open.commit().await.unwrap(),
        false => open.rollback().await.unwrap(),
    }
    waits.await.unwrap()
}

/// The feared interleaving: two transactions check at the same time, neither sees the token of the other, and both write.
#[tokio::test]
async fn concurrent_transactions_on_one_resource_are_ordered() {
    let mut database = Database::create().await;
    let isolation = IsolationLevel::ReadCommitted;
    // Also if the resource has no row yet.
    for has_row in [true, false] {
        for (tokens, commits, passes) in OVERLAPS {
            let account = unique("account");
            if has_row {
                fence_alone(&mut database.client, &account, 3)
                    .await
                    .unwrap();
            }
            let second = overlap(&database, &account, tokens, commits, isolation).await;
            let what = format!("{has_row} {tokens:?} {commits}");
            assert_overlap(&what, second, commits, passes, is_stale);
        }
    }
}

/// Its snapshot is older than the transaction that it waited for, so the later reads would be outdated.
#[tokio::test]
async fn repeatable_read_has_to_retry() {
    let database = Database::create().await;
    for (isolation, account) in [
        (IsolationLevel::RepeatableRead, "a"),
        (IsolationLevel::Serializable, "b"),
    ] {
        let second = overlap(&database, account, [4, 6], true, isolation).await;
        let error = second.unwrap_err();
        assert_eq!(
            error.code(),
            Some(&SqlState::T_R_SERIALIZATION_FAILURE),
            "{error:?}"
        );
        overlap(&database, account, [6, 7], false, isolation)
            .await
            .unwrap();
    }
}

/// A holder that reads before it records its token does not exclude the holder before.
#[tokio::test]
async fn earlier_holder_is_refused_from_the_first_record_on() {
    let mut database = Database::create().await;
    let mut earlier = database.connect().await;
    // The holder with the token 2 has only read.
    assert_eq!(database.tokens("account").await, [0; 0]);
    book(&mut earlier, "account", 1, 1).await.unwrap();

    fence_alone(&mut database.client, "account", 2)
        .await
        .unwrap();
    assert_eq!(database.tokens("account").await, [1]);
    let refused = book(&mut earlier, "account", 1, 1).await.unwrap_err();
    assert!(is_stale(&refused));
    book(&mut database.client, "account", 1, 2).await.unwrap();
    assert_eq!(database.tokens("account").await, [1, 2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn entries_of_many_clients_are_in_the_order_of_tokens() {
    let database = Arc::new(Database::create().await);
    let clients = (0..4).map(|client| {
        let database = database.clone();
        tokio::spawn(async move {
            let mut connection = database.connect().await;
            let mut written = 0;
            for round in 0..50 {
                let token = 1 + round * 4 + (round * 7 + client * 5) % 16;
                match book(&mut connection, "account", 1, token).await {
                    Ok(()) => written += 1,
                    Err(error) => assert!(is_stale(&error), "{error:?}"),
                }
            }
            written
        })
    });
    let mut written = 0;
    for client in clients.collect::<Vec<_>>() {
        written += client.await.unwrap();
    }
    let tokens = database.tokens("account").await;
    assert_eq!(tokens.len(), written);
    assert_eq!(stale(&tokens), 0, "{tokens:?}");
    // Some were refused, and some were not.
    assert!((1..200).contains(&written), "{written}");
}
