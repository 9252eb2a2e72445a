//! The lock is released after the transaction has ended, and not before.

use std::future::poll_fn;
use std::task::Poll;

use redlatch::{Client, FencedLock};
use redlatch_fencing::postgresql::book;
use redlatch_fencing::release_after;
use redlatch_testkit::{shared, unique};
use tokio_postgres::Error;

use crate::support::{Database, until};

async fn connect() -> Client {
    Client::connect(&shared().url()).await.unwrap()
}

/// Starts a write.
fn write(
    lock: &FencedLock,
    mut database: tokio_postgres::Client,
    account: &str,
) -> impl Future<Output = redlatch::Result<Result<(), Error>>> {
    let account = account.to_owned();
    release_after(lock, async move |token| {
        book(&mut database, &account, 1, token).await
    })
}

#[tokio::test]
async fn lock_is_held_until_commit_has_ended() {
    let database = Database::create().await;
    let name = unique("commit");
    let client = connect().await;
    let lock = client.fenced_lock(&name);
    for caller_is_dropped in [false, true] {
        database.block("commit", &name).await;
        let mut write = Box::pin(write(&lock, database.connect().await, &name));
        tokio::select! {
            _ = &mut write => panic!("COMMIT did not wait"),
            () = database.until_blocked("COMMIT") => {}
        }
        if caller_is_dropped {
            drop(write);
            // A release in the background would have ended now.
            client.flush().await;
            assert!(lock.is_locked().await.unwrap());
            database.unblock().await;
        } else {
            assert!(lock.is_locked().await.unwrap());
            database.unblock().await;
            write.await.unwrap().unwrap();
            assert!(!lock.is_locked().await.unwrap());
        }
        let guard = connect().await.fenced_lock(&name).lock().await.unwrap();
        let last = guard.token().cast_signed() - 1;
        assert_eq!(database.tokens(&name).await.last(), Some(&last));
        guard.unlock().await.unwrap();
    }
}

#[tokio::test]
async fn caller_that_is_dropped_while_it_waits_writes_nothing() {
    let database = Database::create().await;
    let name = unique("waits");
    let client = connect().await;
    let lock = client.fenced_lock(&name);
    let guard = connect().await.fenced_lock(&name).lock().await.unwrap();
    let mut write = Box::pin(write(&lock, database.connect().await, &name));
    poll_fn(|context| {
        assert!(write.as_mut().poll(context).is_pending());
        Poll::Ready(())
    })
    .await;
    drop(write);
    guard.unlock().await.unwrap();
    client.flush().await;
    assert!(!lock.is_locked().await.unwrap());
    assert_eq!(database.tokens(&name).await, [0; 0]);
}

#[tokio::test]
async fn failed_and_panicked_work_releases_the_lock() {
    let lock = connect().await.fenced_lock(&unique("fails"));
    let failed = release_after(&lock, async |_| Err::<(), _>("failed")).await;
    assert_eq!(failed.unwrap(), Err("failed"));
    assert!(!lock.is_locked().await.unwrap());

    let panics = lock.clone();
    let task = tokio::spawn(async move {
        let work = async |_| panic!("on purpose");
        let _: redlatch::Result<()> = release_after(&panics, work).await;
    });
    assert!(task.await.unwrap_err().is_panic());
    until("the lock is released", async || {
        !lock.is_locked().await.unwrap()
    })
    .await;
}

/// Redis has lost its data, so its tokens restart at 1.
#[tokio::test]
async fn token_is_raised_after_lost_data() {
    let mut database = Database::create().await;
    let name = unique("lost-data");
    let lock = connect().await.fenced_lock(&name);
    book(&mut database.client, &name, 1, 7000).await.unwrap();
    let refused = write(&lock, database.connect().await, &name).await.unwrap();
    assert!(redlatch_fencing::postgresql::is_stale(
        &refused.unwrap_err()
    ));

    let greatest = "SELECT token FROM redlatch_fence_token WHERE resource = $1";
    let row = database.client.query_one(greatest, &[&name]).await.unwrap();
    let greatest = row.get::<_, i64>(0).cast_unsigned();
    lock.advance_token(greatest).await.unwrap();
    let written = write(&lock, database.connect().await, &name).await.unwrap();
    written.unwrap();
    assert_eq!(database.tokens(&name).await, [7000, 7001]);
}
