//! Holders that are stopped for longer than their lease, and then write.
//!
//! The same runs with storages that accept every token show that stale writes happen.

use redlatch::Client;
use redlatch_fencing::{Outcome, Storage};
use redlatch_testkit::{shared, unique};

use crate::support::{Database, File, Holder, MariadbDatabase, Service, stale};

const ROUNDS: usize = 10;

/// In each round a process acquires the lock and is stopped, the next holder writes, and the process continues and writes.
/// Returns how many of the process's writes were accepted.
async fn accepted_writes(name: &str, storage_url: &str) -> usize {
    let redis = shared().url();
    let lock = Client::connect(&redis).await.unwrap().fenced_lock(name);
    let mut storage = Storage::open(storage_url).await.unwrap();
    let mut holder = Holder::start(&redis, name, storage_url);
    let mut accepted = 0;
    for _ in 0..ROUNDS {
        let token = holder.acquire();
        holder.stop().await;
        // Waits until the lease has ended.
        let guard = lock.lock().await.unwrap();
        assert!(guard.token() > token);
        let written = storage.write(name, guard.token()).await.unwrap();
        assert_eq!(written, Outcome::Written);
        guard.unlock().await.unwrap();

        holder.send("write");
        holder.resume();
        match holder.answer().as_str() {
            "written" => accepted += 1,
            "refused" => {}
            other => panic!("{other}"),
        }
    }
    accepted
}

/// Asserts how many of the stopped holder's writes were accepted, and that the ledger says the same.
#[track_caller]
fn assert_accepted(accepted: usize, expected: usize, ledger: &[i64]) {
    assert_eq!(accepted, expected, "{ledger:?}");
    assert_eq!(ledger.len(), ROUNDS + expected, "{ledger:?}");
    assert_eq!(stale(ledger), expected, "{ledger:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn postgresql_refuses_holder_that_was_stopped_past_its_lease() {
    let name = unique("postgresql");
    for (database, expected) in [
        (Database::create().await, 0),
        (Database::create_unchecked().await, ROUNDS),
    ] {
        let accepted = accepted_writes(&name, &database.url).await;
        assert_accepted(accepted, expected, &database.tokens(&name).await);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn postgresql_with_sqlx_refuses_holder_that_was_stopped_past_its_lease() {
    let name = unique("sqlx");
    for (database, expected) in [
        (Database::create().await, 0),
        (Database::create_unchecked().await, ROUNDS),
    ] {
        let accepted = accepted_writes(&name, &format!("sqlx:{}", database.url)).await;
        assert_accepted(accepted, expected, &database.tokens(&name).await);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn mariadb_refuses_holder_that_was_stopped_past_its_lease() {
    let name = unique("mariadb");
    for (database, expected) in [
        (MariadbDatabase::create().await, 0),
        (MariadbDatabase::create_unchecked().await, ROUNDS),
    ] {
        let accepted = accepted_writes(&name, &database.url).await;
        assert_accepted(accepted, expected, &database.tokens(&name).await);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sqlite_refuses_holder_that_was_stopped_past_its_lease() {
    let name = unique("sqlite");
    for (file, expected) in [(File::create(), 0), (File::create_unchecked(), ROUNDS)] {
        let accepted = accepted_writes(&name, &file.path).await;
        assert_accepted(accepted, expected, &file.tokens(&name));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn service_refuses_holder_that_was_stopped_past_its_lease() {
    let name = unique("http");
    for (file, expected) in [(File::create(), 0), (File::create_unchecked(), ROUNDS)] {
        let service = Service::start(&file).await;
        let accepted = accepted_writes(&name, &service.url()).await;
        assert_accepted(accepted, expected, &file.tokens(&name));
    }
}

/// A holder that is stopped within its transaction has passed the check. The next holder waits for that transaction, until the
/// server ends it after `idle_in_transaction_session_timeout`.
#[tokio::test(flavor = "multi_thread")]
async fn postgresql_ends_transaction_of_stopped_holder() {
    let database = Database::create().await;
    let name = unique("within-transaction");
    let redis = shared().url();
    let lock = Client::connect(&redis).await.unwrap().fenced_lock(&name);
    let options = "?options=-c%20idle_in_transaction_session_timeout%3D15000";
    let mut holder = Holder::start(&redis, &name, &format!("{}{options}", database.url));
    let token = holder.acquire();
    database.block("insert", &name).await;
    holder.send("write");
    database.until_blocked("INSERT").await;
    holder.stop().await;
    let guard = lock.lock().await.unwrap();
    assert!(guard.token() > token);
    let mut storage = Storage::open(&database.url).await.unwrap();
    let (account, next) = (name.clone(), guard.token());
    let write = tokio::spawn(async move { storage.write(&account, next).await });
    database.until_blocked("SELECT redlatch_fence").await;
    // The insertion of the stopped holder ends, but it cannot send COMMIT.
    database.unblock().await;
    assert_eq!(write.await.unwrap().unwrap(), Outcome::Written);

    holder.resume();
    let answer = holder.answer();
    assert!(answer.starts_with("failed"), "{answer}");
    assert_eq!(database.tokens(&name).await, [next.cast_signed()]);
}
