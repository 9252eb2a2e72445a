//! Thousands of commands at once on one connection: more than the buffers on its way hold.
//!
//! Meanwhile requests for locks are canceled. Then these locks are free, and each is acquired again. A request
//! that waits for the end of a lease shows that the store still holds its lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use redlatch::{Client, Error, Guard};
use tokio::task::unconstrained;
use tokio::time::{sleep, timeout};

use super::options::WorkerOptions;
use super::permanent_locks::{join_all, release};
use super::reporter::Reporter;
use super::section::error_name;
use crate::history::{EventKind, Request};

/// Number of floods.
const FLOODS: usize = 2;

/// Number of requests that are canceled in a flood.
const CANCELED: usize = 100;

/// The longest time until a request is canceled.
const LONGEST_WAIT: Duration = Duration::from_millis(60);

/// Number of a flood's tasks: no process has so many others.
const TASKS: usize = 1 << 33;

/// Sends the floods, with pauses between them.
pub(super) async fn run(
    worker: Arc<WorkerOptions>,
    client: Client,
    reporter: Reporter,
    shutdown: Arc<AtomicBool>,
) {
    let mut random = worker.random(TASKS);
    for _ in 0..FLOODS {
        sleep(random.between(worker.lease() / 4, worker.lease())).await;
        if shutdown.load(Ordering::Relaxed) {
            break;
        }
        let others = (0..worker.flood).map(|number| {
            let lock = client.lock(&format!("lock:{{flood}}.other-{number}"));
            async move { lock.is_locked().await.map(drop) }
        });
        let limits: Vec<Duration> = (0..CANCELED)
            .map(|_| random.between(Duration::ZERO, LONGEST_WAIT))
            .collect();
        let canceled = limits.iter().enumerate();
        let canceled =
            canceled.map(|(number, limit)| acquire(&client, &reporter, number, Some(*limit)));
        // All are sent in one poll. The requests come last, so that they find the buffers full.
        unconstrained(async { tokio::join!(biased; join_all(others), join_all(canceled)) }).await;
        let again = (0..CANCELED).map(|number| acquire(&client, &reporter, number, None));
        join_all(again).await;
    }
}

/// Acquires a lock and releases it, or cancels the request at the limit.
async fn acquire(client: &Client, reporter: &Reporter, number: usize, limit: Option<Duration>) {
    let name = format!("lock:{{flood}}.{number}");
    let lock = client.lock(&name);
    let section = reporter.section();
    let request = Request::exclusive(TASKS + number, name);
    reporter.report_in(section, EventKind::Requested(request));
    let acquiring = async { lock.lock().await };
    let acquired: Option<Result<Guard, Error>> = match limit {
        Some(limit) => timeout(limit, acquiring).await.ok(),
        None => Some(acquiring.await),
    };
    let failed = |error| reporter.report_in(section, EventKind::Failed { error });
    match acquired {
        Some(Ok(guard)) => {
            let (token, holds) = (None, None);
            reporter.report_in(section, EventKind::Acquired { token, holds });
            release(reporter, section, guard).await;
        }
        Some(Err(error)) => failed(error_name(&error)),
        None => failed("Canceled".to_owned()),
    }
}
