//! A printer in an office: documents are printed in the order in which they were sent, by any worker. A
//! worker that gives up does not delay the others.
//!
//! ```sh
//! cargo run --example fair_turns                           # needs no server
//! cargo run --example fair_turns -- redis://127.0.0.1      # or with REDLATCH_URL
//! ```

use std::process::ExitCode;
use std::time::Duration;

use redlatch::{Client, Embedded, FairLock};

type Result<T, E = Box<dyn std::error::Error + Send + Sync>> = std::result::Result<T, E>;

const WORKERS: [&str; 4] = ["Ada", "Ben", "Cleo", "Dan"];
const ROUNDS: usize = 2;

#[tokio::main]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("fair_turns: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<()> {
    let url = std::env::args().nth(1);
    let url = url.or_else(|| std::env::var("REDLATCH_URL").ok());
    let embedded = Embedded::new();
    // Each worker has a client of its own, as if it were a separate process.
    let mut clients = Vec::new();
    for _ in WORKERS {
        clients.push(match &url {
            Some(url) => Client::connect(url).await?,
            None => Client::builder().connect_embedded(&embedded)?,
        });
    }
    let printer = format!("redlatch-example:{}:printer", clients[0].id());

    // While the printer is busy, all workers send their documents, in turn.
    let busy = clients[0].fair_lock(&printer).lock().await?;
    let mut sent = Vec::new();
    let mut printing = Vec::new();
    for round in 1..=ROUNDS {
        for (name, client) in WORKERS.into_iter().zip(&clients) {
            let document = format!("{name}'s document {round}");
            let lock = client.fair_lock(&printer);
            let waiting = lock.clone();
            let printed = document.clone();
            printing.push(tokio::spawn(async move {
                let turn = waiting.lock().await?;
                tokio::time::sleep(Duration::from_millis(20)).await;
                println!("printed {printed}");
                turn.unlock().await?;
                Ok::<_, redlatch::Error>(printed)
            }));
            sent.push(document);
            until_queued(&lock, sent.len()).await?;
        }
    }
    println!("{} documents wait for the printer", sent.len());

    // One more document, from a worker that does not want to wait long.
    let lock = clients[0].fair_lock(&printer);
    let impatient = lock.try_lock().wait(Duration::from_millis(50)).await?;
    assert!(impatient.is_none());
    clients[0].flush().await;
    println!("a waiter gave up; {} wait", lock.queue().await?.len());

    busy.unlock().await?;
    let mut printed = Vec::new();
    for one in printing {
        printed.push(one.await??);
    }
    assert_eq!(printed, sent);
    assert!(lock.queue().await?.is_empty());
    println!("all were printed in the order in which they were sent");
    Ok(())
}

/// Waits until this number of documents is queued.
async fn until_queued(lock: &FairLock, documents: usize) -> redlatch::Result<()> {
    while lock.queue().await?.len() < documents {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    Ok(())
}
