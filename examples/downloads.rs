//! Twelve downloads, of which at most three run at a time.
//!
//! ```sh
//! cargo run --release --example downloads                          # needs no server
//! cargo run --release --example downloads -- redis://127.0.0.1     # or with REDLATCH_URL
//! ```

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use redlatch::{Client, Result, Semaphore};
use tokio::task::JoinSet;

const DOWNLOADS: usize = 12;
/// Number of concurrent downloads that the mirror allows for all processes together.
const AT_ONCE: u32 = 3;
/// After this time the first process sets the permits again. That restores permits of processes that were
/// killed before they released them.
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

async fn download(file: usize, mirror: &Semaphore, running: &AtomicUsize) -> Result<usize> {
    let permit = mirror.acquire().await?;
    let at_once = running.fetch_add(1, SeqCst) + 1;
    println!("file {file:2}: downloading ({at_once} at once here)");
    // In place of a real download.
    tokio::time::sleep(Duration::from_millis(50)).await;
    running.fetch_sub(1, SeqCst);
    permit.release().await?;
    Ok(at_once)
}

#[tokio::main]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("downloads: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<()> {
    let url = std::env::args().nth(1);
    let url = url.or_else(|| std::env::var("REDLATCH_URL").ok());
    let client = Client::connect(url.as_deref().unwrap_or("embedded:")).await?;

    // A unique name. In production all processes use the same fixed name.
    let mirror = client.semaphore(&format!("redlatch-example:{}:mirror", client.id()));
    let most = all_downloads(&mirror).await;
    mirror.delete().await?;
    println!("{DOWNLOADS} files, at most {} at once", most?);
    Ok(())
}

/// Returns the largest number of concurrent downloads.
async fn all_downloads(mirror: &Semaphore) -> Result<usize> {
    if mirror.try_set_permits(AT_ONCE).time_to_live(DAY).await? {
        println!("set {AT_ONCE} permits for all downloaders");
    }
    let running = Arc::new(AtomicUsize::new(0));
    let mut downloads = JoinSet::new();
    for file in 1..=DOWNLOADS {
        let (mirror, running) = (mirror.clone(), running.clone());
        downloads.spawn(async move { download(file, &mirror, &running).await });
    }
    let mut most = 0;
    for at_once in downloads.join_all().await {
        most = most.max(at_once?);
    }
    Ok(most)
}
