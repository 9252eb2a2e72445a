//! Of several processes, one at a time writes the nightly report, even if one of the lock's servers is down.
//!
//! ```sh
//! cargo run --example redlock                                       # needs no server
//! cargo run --example redlock -- redis://one redis://two redis://three  # or all in REDLATCH_URL
//! ```

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use redlatch::{Client, Embedded, RedLock};
use tokio::task::JoinSet;

const PROCESSES: usize = 4;
const REPORTS: usize = 3;

type Result<T, E = Box<dyn std::error::Error + Send + Sync>> = std::result::Result<T, E>;

/// Creates the RedLock of one process, with one member on each server.
async fn report_lock(urls: &[String], stores: &[Embedded]) -> Result<RedLock> {
    let mut clients = Vec::new();
    for url in urls {
        clients.push(Client::connect(url).await?);
    }
    for store in stores {
        clients.push(Client::builder().connect_embedded(store)?);
    }
    // Allows for a slow network. The default is 30 ms.
    let timeout = Duration::from_millis(200);
    Ok(
        RedLock::new(clients.iter().map(|client| client.lock("redlock:report")))
            .member_timeout(timeout),
    )
}

#[tokio::main]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("redlock: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<()> {
    let mut urls: Vec<String> = std::env::args().skip(1).collect();
    if urls.is_empty() {
        let given = std::env::var("REDLATCH_URL").unwrap_or_default();
        urls.extend(given.split_whitespace().map(String::from));
    }
    let stores: Vec<Embedded> = match urls.len() {
        0 => (0..3).map(|_| Embedded::new()).collect(),
        // With two, both would be needed, and a failure of one would block all processes.
        1 | 2 => return Err("give the URLs of three or more servers, or none".into()),
        _ => Vec::new(),
    };
    let writing = Arc::new(AtomicUsize::new(0));
    let mut fleet: JoinSet<Result<()>> = JoinSet::new();
    for process in 0..PROCESSES {
        let lock = report_lock(&urls, &stores).await?;
        let writing = writing.clone();
        fleet.spawn(async move {
            for report in 0..REPORTS {
                let guard = lock.lock().await?;
                let concurrent = writing.fetch_add(1, SeqCst);
                // The work is dropped if the lock is lost meanwhile.
                let work = tokio::time::sleep(Duration::from_millis(5));
                let done = guard.run(work).await;
                writing.fetch_sub(1, SeqCst);
                done?;
                println!(
                    "process {process} wrote report {report}, with the lock from {} servers",
                    guard.held_members()
                );
                guard.unlock().await?;
                if concurrent > 0 {
                    return Err("two wrote at a time".into());
                }
            }
            Ok(())
        });
    }
    while let Some(process) = fleet.join_next().await {
        process??;
    }
    println!("{} reports, one at a time", PROCESSES * REPORTS);
    Ok(())
}
