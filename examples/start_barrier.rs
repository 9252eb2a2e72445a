//! Workers take different times to get ready, and then start together.
//!
//! ```sh
//! cargo run --release --example start_barrier                       # needs no server
//! cargo run --release --example start_barrier -- redis://127.0.0.1  # or with REDLATCH_URL
//! ```

use std::process::ExitCode;
use std::time::{Duration, Instant};

use redlatch::{Client, CountDownLatch, Result};
use tokio::task::JoinSet;

const WORKERS: u32 = 5;

async fn work(ready: CountDownLatch, worker: u32) -> Result<Instant> {
    // In place of loading a model or warming a cache.
    tokio::time::sleep(Duration::from_millis(40) * worker).await;
    let left = ready.count_down().await?;
    println!("worker {worker} is ready, {left} to go");

    ready.wait().await?;
    Ok(Instant::now())
}

#[tokio::main]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("start_barrier: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<()> {
    let url = std::env::args().nth(1);
    let url = url.or_else(|| std::env::var("REDLATCH_URL").ok());
    let client = Client::connect(url.as_deref().unwrap_or("embedded:")).await?;

    // A unique name. In production all processes use the same fixed name.
    let name = format!("redlatch-example:{}:workers-ready", client.id());
    let ready = client.count_down_latch(&name);
    let started = start(&ready).await;
    // The open latch has already been deleted, unless something went wrong.
    ready.delete().await?;
    let started = started?;
    if let (Some(first), Some(last)) = (started.iter().min(), started.iter().max()) {
        let apart = last.duration_since(*first);
        println!("{WORKERS} workers started within {apart:?}");
    }
    Ok(())
}

/// Returns when each worker started.
async fn start(ready: &CountDownLatch) -> Result<Vec<Instant>> {
    ready.try_set_count(WORKERS).await?;
    let mut workers = JoinSet::new();
    for worker in 1..=WORKERS {
        workers.spawn(work(ready.clone(), worker));
    }
    workers.join_all().await.into_iter().collect()
}
