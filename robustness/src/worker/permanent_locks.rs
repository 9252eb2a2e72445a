//! Thousands of locks that one client holds during the whole run: only losses are reported.

use std::collections::BTreeSet;
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use redlatch::{Client, Guard};
use tokio::time::sleep;

use super::options::WorkerOptions;
use super::reporter::Reporter;
use super::section::error_name;
use crate::history::{EventKind, Request};

/// Number of hash tags of the names: some for every node of a cluster.
const TAGS: usize = 30;

/// Number of locks that are acquired, or released, at the same time.
const AT_ONCE: usize = 200;

/// Interval of the checks whether the run has ended, and whether locks are valid.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// A held lock and its section.
type HeldLock = (u64, Guard);

/// Acquires all of them, reports that the process is ready, and holds them until the end.
pub(super) async fn run(
    worker: Arc<WorkerOptions>,
    client: Client,
    reporter: Reporter,
    shutdown: Arc<AtomicBool>,
) {
    let held = acquire(&worker, &client, &reporter).await;
    reporter.report(EventKind::Ready);
    hold(held, reporter, shutdown).await;
}

/// Runs futures in one task, so that they belong to its process. Returns their outputs, in order.
pub(super) async fn join_all<F: Future>(work: impl Iterator<Item = F>) -> Vec<F::Output> {
    let mut work: Vec<_> = work.map(|one| (Box::pin(one), None)).collect();
    poll_fn(|cx| {
        for (one, output) in work.iter_mut().filter(|(_, output)| output.is_none()) {
            if let Poll::Ready(ready) = one.as_mut().poll(cx) {
                *output = Some(ready);
            }
        }
        match work.iter().all(|(_, output)| output.is_some()) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    })
    .await;
    work.into_iter().filter_map(|(_, output)| output).collect()
}

/// Acquires all of them.
async fn acquire(worker: &WorkerOptions, client: &Client, reporter: &Reporter) -> Vec<HeldLock> {
    let mut held = Vec::with_capacity(worker.permanent_locks);
    let numbers: Vec<usize> = (0..worker.permanent_locks).collect();
    for some in numbers.chunks(AT_ONCE) {
        let acquiring = some.iter().map(|number| async move {
            let name = format!("lock:{{held-{}}}.{}.{number}", number % TAGS, worker.seed);
            let lock = client.lock(&name);
            let section = reporter.section();
            let request = Request::exclusive(*number, name);
            reporter.report_in(section, EventKind::Requested(request));
            let acquired = lock.lock().await;
            let (token, holds) = (None, None);
            let what = match &acquired {
                Ok(_) => EventKind::Acquired { token, holds },
                Err(error) => EventKind::Failed {
                    error: error_name(error),
                },
            };
            reporter.report_in(section, what);
            acquired.ok().map(|guard| (section, guard))
        });
        held.extend(join_all(acquiring).await.into_iter().flatten());
    }
    held
}

/// Holds them until the end, and releases them.
async fn hold(mut held: Vec<HeldLock>, reporter: Reporter, shutdown: Arc<AtomicBool>) {
    let mut lost = BTreeSet::new();
    while !shutdown.load(Ordering::Relaxed) {
        sleep(CHECK_INTERVAL).await;
        for (section, guard) in &held {
            if !guard.is_valid() && lost.insert(*section) {
                reporter.report_in(*section, EventKind::LossReported);
            }
        }
    }
    while !held.is_empty() {
        let some = held.drain(..held.len().min(AT_ONCE));
        let leaving = some.map(|(section, guard)| release(&reporter, section, guard));
        join_all(leaving).await;
    }
}

/// Releases a lock, and reports that.
pub(super) async fn release(reporter: &Reporter, section: u64, guard: Guard) {
    reporter.report_in(section, EventKind::Releasing);
    let released = guard.unlock().await;
    let error = released.err().map(|error| error_name(&error));
    reporter.report_in(section, EventKind::Released { error });
}
