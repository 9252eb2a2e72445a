//! Workers that take different times to get ready, and then start together.
//!
//! ```sh
//! cargo run --release --example start_barrier                       # needs no server
//! cargo run --release --example start_barrier -- redis://127.0.0.1  # the latch is in the server
//! ```

use std::time::{Duration, Instant};

use redlatch::{Client, Result};
use tokio::task::JoinSet;

const WORKERS: u32 = 5;

async fn work(client: Client, worker: u32) -> Result<Instant> {
    // Stands for loading a model, warming a cache, …
    tokio::time::sleep(Duration::from_millis(40) * worker).await;
    let ready = client.count_down_latch("example:workers-ready");
    let left = ready.count_down().await?;
    println!("worker {worker} is ready, {left} to go");

    ready.wait().await?;
    Ok(Instant::now())
}

#[tokio::main]
async fn main() -> Result<()> {
    let url = std::env::args().nth(1);
    let url = url.or_else(|| std::env::var("REDLATCH_URL").ok());
    let client = Client::connect(url.as_deref().unwrap_or("embedded:")).await?;

    let ready = client.count_down_latch("example:workers-ready");
    if !ready.try_set_count(WORKERS).await? {
        println!("another start is under way, or was broken off; beginning anew");
        ready.delete().await?;
        ready.try_set_count(WORKERS).await?;
    }
    let mut workers = JoinSet::new();
    for worker in 1..=WORKERS {
        workers.spawn(work(client.clone(), worker));
    }
    let mut started = Vec::new();
    for start in workers.join_all().await {
        started.push(start?);
    }
    if let (Some(first), Some(last)) = (started.iter().min(), started.iter().max()) {
        let apart = last.duration_since(*first);
        println!("{WORKERS} workers started within {apart:?}");
    }
    Ok(())
}
