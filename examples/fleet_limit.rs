//! At most three heavy jobs run at a time on all machines together. One worker crashes in the middle of its
//! job; its permit expires.
//!
//! ```sh
//! cargo run --example fleet_limit                       # needs no server
//! cargo run --example fleet_limit -- redis://127.0.0.1  # or with REDLATCH_URL
//! ```

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering::SeqCst};
use std::time::Duration;

use redlatch::{Client, Embedded, ExpirableSemaphore, Result};
use tokio::task::JoinSet;

const WORKERS: usize = 8;
const AT_ONCE: u32 = 3;
const JOBS_EACH: usize = 4;
const JOB: Duration = Duration::from_millis(100);
/// Time until the permit of a crashed worker expires; default 30 s.
const LEASE: Duration = Duration::from_secs(1);

/// One worker, with a client of its own as if it were on a separate machine.
async fn work(client: Client, name: String, running: Arc<AtomicI64>) -> Result<i64> {
    let limit = client.expirable_semaphore(&name);
    let mut most = 0;
    for _ in 0..JOBS_EACH {
        let permit = limit.acquire().await?;
        most = most.max(running.fetch_add(1, SeqCst) + 1);
        // In place of the heavy job. If the permit is lost, the job is dropped and this is an error.
        let job = permit.run(tokio::time::sleep(JOB)).await;
        running.fetch_sub(1, SeqCst);
        job?;
        permit.release().await?;
    }
    Ok(most)
}

/// A worker that acquires a permit and crashes.
async fn crash(limit: &ExpirableSemaphore) -> Result<()> {
    let permit = limit.acquire().lease(LEASE).await?;
    println!("A worker took permit {} and crashed.", permit.ids()[0]);
    std::mem::forget(permit);
    Ok(())
}

async fn fleet(clients: Vec<Client>, name: String) -> Result<i64> {
    let limit = clients[0].expirable_semaphore(&name);
    // Every worker may call this; only the first call has an effect.
    limit.try_set_permits(AT_ONCE).await?;
    crash(&limit).await?;
    println!(
        "{} of {AT_ONCE} permits are free.",
        limit.available().await?
    );

    let running = Arc::new(AtomicI64::new(0));
    let mut workers = JoinSet::new();
    for client in clients {
        workers.spawn(work(client, name.clone(), running.clone()));
    }
    let mut most = 0;
    while let Some(worker) = workers.join_next().await {
        match worker {
            Ok(done) => most = most.max(done?),
            Err(panicked) => std::panic::resume_unwind(panicked.into_panic()),
        }
    }

    // All three can be acquired only after the crashed worker's permit has expired.
    let all = limit.acquire_many(AT_ONCE).await?;
    println!("All {AT_ONCE} permits are available again.");
    all.release().await?;
    Ok(most)
}

#[tokio::main]
async fn main() -> ExitCode {
    match run().await {
        Ok(most) if most <= i64::from(AT_ONCE) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("fleet_limit: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Returns the largest number of concurrent jobs.
async fn run() -> Result<i64> {
    let url = std::env::args().nth(1);
    let url = url.or_else(|| std::env::var("REDLATCH_URL").ok());
    let store = Embedded::new();
    let mut clients = Vec::new();
    for _ in 0..WORKERS {
        let settings = Client::builder().watchdog_lease(LEASE);
        clients.push(match &url {
            Some(url) => settings.connect(url).await?,
            None => settings.connect_embedded(&store)?,
        });
    }
    // A unique name, so that several runs of the example do not share permits.
    let name = format!("redlatch-example:{}:fleet-limit", clients[0].id());
    let limit = clients[0].expirable_semaphore(&name);
    let jobs = WORKERS * JOBS_EACH;
    println!("{WORKERS} workers have {jobs} heavy jobs; {AT_ONCE} may run at once.");
    let most = fleet(clients, name).await;
    limit.delete().await?;
    let most = most?;
    println!("{jobs} jobs done, at most {most} at once.");
    Ok(most)
}
