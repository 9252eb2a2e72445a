//! Locks that one client holds from the beginning to the end, thousands of them: only losses are told.

use std::future::IntoFuture as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use redlatch::{Client, Guard};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::Worker;
use super::section::kind;
use super::tell::Teller;
use crate::Result;
use crate::history::{Ask, Mode, What};

/// How many hash tags the names have: some for every node of a cluster.
const TAGS: usize = 30;

/// How many are acquired, or released, at the same time.
const AT_ONCE: usize = 200;

/// How often it is asked whether the end has come.
const LOOK: Duration = Duration::from_millis(100);

/// A held lock and its section.
type Held = (u64, Guard);

/// Acquires all of them.
pub(super) async fn acquire(
    worker: &Worker,
    client: &Client,
    teller: &Teller,
) -> Result<Vec<Held>> {
    let mut held = Vec::with_capacity(worker.held);
    let numbers: Vec<usize> = (0..worker.held).collect();
    for some in numbers.chunks(AT_ONCE) {
        let mut acquiring = JoinSet::new();
        for number in some {
            let name = format!("lock:{{held-{}}}.{}.{number}", number % TAGS, worker.seed);
            let lock = client.lock(&name);
            let section = teller.section();
            teller.tell_of(
                section,
                What::Asked(Ask {
                    task: *number,
                    client: 0,
                    owner: None,
                    name,
                    mode: Mode::Alone,
                }),
            );
            acquiring.spawn(async move { (section, lock.lock().into_future().await) });
        }
        while let Some(acquired) = acquiring.join_next().await {
            let (section, guard) = acquired?;
            let (token, holds) = (None, None);
            held.push((section, guard?));
            teller.tell_of(section, What::Got { token, holds });
        }
    }
    Ok(held)
}

/// Holds them until the end, and gives them back.
pub(super) async fn hold(held: Vec<Held>, teller: Teller, ending: Arc<AtomicBool>) {
    let mut losses = JoinSet::new();
    for (section, guard) in &held {
        let (section, lost) = (*section, guard.lost());
        losses.spawn(async move {
            lost.await;
            section
        });
    }
    while !ending.load(Ordering::Relaxed) {
        match timeout(LOOK, losses.join_next()).await {
            Ok(Some(Ok(section))) => teller.tell_of(section, What::Told),
            Ok(Some(Err(_)) | None) => sleep(LOOK).await,
            Err(_) => {}
        }
    }
    losses.abort_all();
    let mut leaving = JoinSet::new();
    for (section, guard) in held {
        if leaving.len() >= AT_ONCE {
            let _ = leaving.join_next().await;
        }
        let teller = teller.clone();
        leaving.spawn(async move {
            teller.tell_of(section, What::Leaving);
            let freed = guard.unlock().await;
            let error = freed.err().map(|error| kind(&error));
            teller.tell_of(section, What::Freed { error });
        });
    }
    leaving.join_all().await;
}
