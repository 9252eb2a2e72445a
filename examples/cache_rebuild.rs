//! A catalogue with many readers. Readers share the lock. A reader that finds the catalogue too old rebuilds
//! it under the write lock, and then downgrades to a read lock and reads it.
//!
//! ```sh
//! cargo run --example cache_rebuild                       # needs no server
//! cargo run --example cache_rebuild -- redis://127.0.0.1  # or with REDLATCH_URL
//! ```

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redlatch::{Client, Guard, ReadLock, ReadWriteLock};
use tokio::task::JoinSet;

const READERS: usize = 12;
/// Lookups of each reader.
const LOOKUPS: u64 = 40;
/// After this number of lookups the catalogue is too old.
const FRESH_FOR: u64 = 60;

/// Pages that are slow to load. Detects a reader during a rebuild.
#[derive(Default)]
struct Catalogue {
    pages: Mutex<Vec<u64>>,
    edition: AtomicU64,
    lookups: AtomicU64,
    read_half_built: AtomicBool,
    at_once: AtomicU64,
    most_at_once: AtomicU64,
}

impl Catalogue {
    fn is_stale(&self) -> bool {
        self.lookups.load(SeqCst) >= self.edition.load(SeqCst) * FRESH_FOR
    }

    /// Called only while there are no readers.
    async fn rebuild(&self) {
        let edition = self.edition.fetch_add(1, SeqCst) + 1;
        for page in 0..5 {
            tokio::time::sleep(Duration::from_millis(1)).await;
            if let Ok(mut pages) = self.pages.lock() {
                pages.resize(5, 0);
                pages[page] = edition;
            }
        }
    }

    /// Called only while there is no writer.
    async fn look_up(&self) {
        let at_once = self.at_once.fetch_add(1, SeqCst) + 1;
        self.most_at_once.fetch_max(at_once, SeqCst);
        tokio::time::sleep(Duration::from_millis(1)).await;
        let edition = self.edition.load(SeqCst);
        if let Ok(pages) = self.pages.lock()
            && pages.iter().any(|page| *page != edition)
        {
            self.read_half_built.store(true, SeqCst);
        }
        self.lookups.fetch_add(1, SeqCst);
        self.at_once.fetch_sub(1, SeqCst);
    }
}

/// Returns a read guard while the catalogue is fresh.
async fn fresh(lock: &ReadWriteLock, catalogue: &Catalogue) -> redlatch::Result<Guard<ReadLock>> {
    let reading = lock.read().lock().await?;
    if !catalogue.is_stale() {
        return Ok(reading);
    }
    // Requesting the write lock while reading would be an error: several readers would wait for each other.
    reading.unlock().await?;
    let writing = lock.write().lock().await?;
    // Another task may have been faster.
    if catalogue.is_stale() {
        catalogue.rebuild().await;
    }
    // No other writer can acquire the lock in between, and other readers share it.
    writing.downgrade().await
}

#[tokio::main]
async fn main() -> ExitCode {
    let url = std::env::args().nth(1);
    let url = url.or_else(|| std::env::var("REDLATCH_URL").ok());
    match run(url.as_deref().unwrap_or("embedded:")).await {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("cache_rebuild: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(url: &str) -> redlatch::Result<bool> {
    let client = Client::connect(url).await?;
    // There are always readers here: without this, a writer might wait for ever.
    let name = format!("redlatch-example:{}:catalogue", client.id());
    let lock = client.read_write_lock(&name).prefer_writers();
    let catalogue = Arc::new(Catalogue::default());
    let mut readers = JoinSet::new();
    for _ in 0..READERS {
        let (lock, catalogue) = (lock.clone(), catalogue.clone());
        readers.spawn(async move {
            for _ in 0..LOOKUPS {
                let reading = fresh(&lock, &catalogue).await?;
                catalogue.look_up().await;
                reading.unlock().await?;
            }
            redlatch::Result::Ok(())
        });
    }
    while let Some(done) = readers.join_next().await {
        match done {
            Ok(done) => done?,
            Err(failed) => std::panic::resume_unwind(failed.into_panic()),
        }
    }
    let torn = catalogue.read_half_built.load(SeqCst);
    println!(
        "{} lookups by {READERS} readers, up to {} at a time; rebuilt {} times, read half-built: {}",
        catalogue.lookups.load(SeqCst),
        catalogue.most_at_once.load(SeqCst),
        catalogue.edition.load(SeqCst),
        if torn { "YES" } else { "never" },
    );
    Ok(!torn)
}
