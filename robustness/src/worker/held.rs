//! Thousands of locks that one client holds during the whole run: only losses are reported.

use std::collections::BTreeSet;
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use redlatch::{Client, Guard};
use tokio::time::sleep;

use super::Worker;
use super::section::kind;
use super::tell::Teller;
use crate::history::{Ask, Mode, What};

/// Number of hash tags of the names: some for every node of a cluster.
const TAGS: usize = 30;

/// Number of locks that are acquired, or released, at the same time.
const AT_ONCE: usize = 200;

/// Interval of the checks whether the run has ended, and whether locks are valid.
const LOOK: Duration = Duration::from_millis(100);

/// A held lock and its section.
type Held = (u64, Guard);

/// Acquires all of them, reports that the process is ready, and holds them until the end.
pub(super) async fn run(
    worker: Arc<Worker>,
    client: Client,
    teller: Teller,
    ending: Arc<AtomicBool>,
) {
    let held = acquire(&worker, &client, &teller).await;
    teller.tell(What::Ready);
    hold(held, teller, ending).await;
}

/// Runs futures in one task, so that they belong to its process. Returns their outputs, in order.
async fn all<F: Future>(work: impl Iterator<Item = F>) -> Vec<F::Output> {
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
async fn acquire(worker: &Worker, client: &Client, teller: &Teller) -> Vec<Held> {
    let mut held = Vec::with_capacity(worker.held);
    let numbers: Vec<usize> = (0..worker.held).collect();
    for some in numbers.chunks(AT_ONCE) {
        let acquiring = some.iter().map(|number| async move {
            let name = format!("lock:{{held-{}}}.{}.{number}", number % TAGS, worker.seed);
            let lock = client.lock(&name);
            let section = teller.section();
            let ask = Ask {
                task: *number,
                client: 0,
                owner: None,
                name,
                mode: Mode::Alone,
                part: false,
            };
            teller.tell_of(section, What::Asked(ask));
            let acquired = lock.lock().await;
            let (token, holds) = (None, None);
            let what = match &acquired {
                Ok(_) => What::Got { token, holds },
                Err(error) => What::Failed { error: kind(error) },
            };
            teller.tell_of(section, what);
            acquired.ok().map(|guard| (section, guard))
        });
        held.extend(all(acquiring).await.into_iter().flatten());
    }
    held
}

/// Holds them until the end, and releases them.
async fn hold(mut held: Vec<Held>, teller: Teller, ending: Arc<AtomicBool>) {
    let mut lost = BTreeSet::new();
    while !ending.load(Ordering::Relaxed) {
        sleep(LOOK).await;
        for (section, guard) in &held {
            if !guard.is_valid() && lost.insert(*section) {
                teller.tell_of(*section, What::Told);
            }
        }
    }
    while !held.is_empty() {
        let some = held.drain(..held.len().min(AT_ONCE));
        let leaving = some.map(|(section, guard)| {
            let teller = &teller;
            async move {
                teller.tell_of(section, What::Leaving);
                let freed = guard.unlock().await;
                let error = freed.err().map(|error| kind(&error));
                teller.tell_of(section, What::Freed { error });
            }
        });
        all(leaving).await;
    }
}
