//! Locks that one client holds from the beginning to the end, thousands of them: only losses are told.

use std::future::{IntoFuture as _, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use redlatch::{Client, Guard};
use tokio::time::timeout;

use super::Worker;
use super::section::kind;
use super::tell::Teller;
use crate::history::{Ask, Mode, What};

/// How many hash tags the names have: some for every node of a cluster.
const TAGS: usize = 30;

/// How many are acquired, or released, at the same time.
const AT_ONCE: usize = 200;

/// How often it is asked whether the end has come.
const LOOK: Duration = Duration::from_millis(100);

/// A held lock and its section.
type Held = (u64, Guard);

/// Acquires all of them, tells that the process is ready, and holds them until the end.
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

/// Futures that run in one task, so that they belong to its process.
struct Together<F>(Vec<Pin<Box<F>>>);

impl<F: Future> Together<F> {
    fn add(&mut self, work: F) {
        self.0.push(Box::pin(work));
    }

    /// Returns the output of the next one that has ended, and never if there is none.
    async fn next(&mut self) -> F::Output {
        poll_fn(|cx| {
            for at in 0..self.0.len() {
                if let Poll::Ready(output) = self.0[at].as_mut().poll(cx) {
                    drop(self.0.swap_remove(at));
                    return Poll::Ready(output);
                }
            }
            Poll::Pending
        })
        .await
    }
}

/// Acquires all of them.
async fn acquire(worker: &Worker, client: &Client, teller: &Teller) -> Vec<Held> {
    let mut held = Vec::with_capacity(worker.held);
    let numbers: Vec<usize> = (0..worker.held).collect();
    for some in numbers.chunks(AT_ONCE) {
        let mut acquiring = Together(Vec::new());
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
                    part: false,
                }),
            );
            acquiring.add(async move { (section, lock.lock().into_future().await) });
        }
        while !acquiring.0.is_empty() {
            let (section, guard) = acquiring.next().await;
            let (token, holds) = (None, None);
            teller.tell_of(
                section,
                match &guard {
                    Ok(_) => What::Got { token, holds },
                    Err(error) => What::Failed { error: kind(error) },
                },
            );
            held.extend(guard.ok().map(|guard| (section, guard)));
        }
    }
    held
}

/// Holds them until the end, and gives them back.
async fn hold(held: Vec<Held>, teller: Teller, ending: Arc<AtomicBool>) {
    let mut losses = Together(Vec::new());
    for (section, guard) in &held {
        let (section, lost) = (*section, guard.lost());
        losses.add(async move {
            lost.await;
            section
        });
    }
    while !ending.load(Ordering::Relaxed) {
        if let Ok(section) = timeout(LOOK, losses.next()).await {
            teller.tell_of(section, What::Told);
        }
    }
    drop(losses);
    let mut leaving = Together(Vec::new());
    for (section, guard) in held {
        if leaving.0.len() >= AT_ONCE {
            leaving.next().await;
        }
        let teller = teller.clone();
        leaving.add(async move {
            teller.tell_of(section, What::Leaving);
            let freed = guard.unlock().await;
            let error = freed.err().map(|error| kind(&error));
            teller.tell_of(section, What::Freed { error });
        });
    }
    while !leaving.0.is_empty() {
        leaving.next().await;
    }
}
