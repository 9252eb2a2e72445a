//! Writers that get over lost data of Redis by themselves.

use std::sync::Arc;

use redlatch::{Client, FencedLock};
use redlatch_fencing::postgresql::{book, greatest_token, is_stale};
use redlatch_fencing::{Stale, retry_stale};
use redlatch_testkit::Server;
use tokio_postgres::Error;

use crate::support::Database;

type Written = redlatch::Result<Result<Result<(), Error>, Stale>>;

/// Writes an entry with a token of the lock, and once more if it is too old.
async fn write(lock: &FencedLock, database: &Arc<Database>) -> Written {
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
    retry_stale(lock, work).await
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
        let mut writers = Vec::new();
        for lock in &locks {
            let (lock, database) = (lock.clone(), database.clone());
            writers.push(tokio::spawn(async move { write(&lock, &database).await }));
        }
        for writer in writers {
            writer.await.unwrap().unwrap().unwrap().unwrap();
        }
        let () = server.command(&["FLUSHALL"]);
    }
    let tokens = database.tokens("account").await;
    assert_eq!(tokens.len(), 12);
    assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
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
    let greatest = 22;
    assert_eq!(refused.await.unwrap(), Err(Stale { greatest }));
    assert!(!lock.is_locked().await.unwrap());
}
