//! Writers that get over lost data of Redis by themselves.

use std::sync::Arc;

use redlatch::{Client, FencedLock};
use redlatch_fencing::postgresql::{book, greatest_token, is_stale};
use redlatch_fencing::{Stale, retry_stale};
use redlatch_testkit::Server;

use crate::support::Database;

/// Writes an entry with a token of the lock, and once more if it is too old. One of them must succeed.
async fn write(lock: &FencedLock, database: &Arc<Database>) {
    let (database, account) = (database.clone(), lock.name().to_owned());
    let work = move |token| {
        let (database, account) = (database.clone(), account.clone());
        async move {
            let mut client = database.connect().await;
            match book(&mut client, &account, 1, token).await {
                Err(error) if is_stale(&error) => match greatest_token(&client, &account).await {
                    Ok(greatest) => Err(Stale { greatest }),
                    Err(error) => Ok(Err(error)),
                },
                written => Ok(written),
            }
        }
    };
    let written = retry_stale(lock, work).await.unwrap();
    written.unwrap().unwrap();
}

/// Feared most: a retry that writes without the lock, or with a token that an earlier holder has used.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writers_get_over_lost_tokens() {
    let (server, database) = (Server::start(), Arc::new(Database::create().await));
    let clients = [(); 3].map(async |()| Client::connect(&server.url()).await.unwrap());
    let mut locks = Vec::new();
    for client in clients {
        locks.push(client.await.fenced_lock("account"));
    }
    for _ in 0..4 {
        // While the lock's tokens are still below those that the storage has seen, one of them could be used again.
        write(&locks[0], &database).await;
        let mut writers = Vec::new();
        for lock in &locks {
            let (lock, database) = (lock.clone(), database.clone());
            writers.push(tokio::spawn(async move { write(&lock, &database).await }));
        }
        for writer in writers {
            writer.await.unwrap();
        }
        let () = server.command(&["FLUSHALL"]);
    }
    let tokens = database.tokens("account").await;
    assert_eq!(tokens.len(), 16);
    assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
}

/// A later holder has written. The lock's tokens are as they should be, and stay so.
#[tokio::test]
async fn token_of_an_earlier_holder_is_replaced_by_the_next_one() {
    let server = Server::start();
    let client = Client::connect(&server.url()).await.unwrap();
    let lock = client.fenced_lock("account");
    let later = lock.clone();
    let written = retry_stale(&lock, move |token| {
        let later = later.clone();
        async move {
            if token == 1 {
                let greatest = later.advance_token(token + 1).await.unwrap();
                return Err(Stale { greatest });
            }
            Ok(token)
        }
    });
    assert_eq!(written.await.unwrap(), Ok(3));
}

/// If the second token is refused, too, the caller hears so.
#[tokio::test]
async fn token_that_is_refused_twice_is_reported() {
    let server = Server::start();
    let client = Client::connect(&server.url()).await.unwrap();
    let lock = client.fenced_lock("account");
    let refused = retry_stale(&lock, async |token| {
        Err::<(), _>(Stale {
            greatest: token + 10,
        })
    });
    let greatest = 11 + (1 << 32) + 11;
    assert_eq!(refused.await.unwrap(), Err(Stale { greatest }));
    assert!(!lock.is_locked().await.unwrap());
}

/// Feared most: a holder that has not noticed the loss, and has not written yet, writes after a later one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holder_from_before_the_loss_is_refused() {
    let (server, database) = (Server::start(), Arc::new(Database::create().await));
    let [first, second] = [(); 2].map(async |()| Client::connect(&server.url()).await.unwrap());
    let (first, second) = (first.await, second.await);
    let lock = first.fenced_lock("account");
    // With one write the first token after the loss would be the recorded one, which passes.
    for _ in 0..2 {
        write(&lock, &database).await;
    }
    // Some acquisitions without a write, and one of them is still held.
    for _ in 0..5 {
        lock.lock().await.unwrap().unlock().await.unwrap();
    }
    let guard = lock.lock().await.unwrap();
    let () = server.command(&["FLUSHALL"]);
    let other = second.fenced_lock("account");
    write(&other, &database).await;
    let mut client = database.connect().await;
    let late = book(&mut client, "account", 1, guard.token()).await;
    assert!(is_stale(&late.unwrap_err()));
}
