//! Looks at the store again and again, in a thread of its own, so that it does not delay the keys.
//! Also unlocks there.

use std::time::{Duration, Instant};

use redlatch::{Client, Error};
use tokio::sync::{mpsc, watch};

use super::look::Look;
use crate::exit::{self, Failure};
use crate::store::args::StoreArgs;
use crate::threads::{runtime, spawn_without_signals};
use crate::{store, unlock};

/// The longest that an answer takes without an outage. Behind an outage another server may answer,
/// and a look that began before it would be a mixture of both.
const LONGEST_ANSWER: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(super) enum Report {
    Look(Look),
    /// A look failed. The next one may succeed.
    Failed(String),
    /// No look can succeed.
    Ended(Failure),
    /// What a request to unlock has done.
    Unlocked(String),
}

/// A request to unlock by force, if no other owner than these holds the lock.
#[derive(Debug)]
pub(super) struct Unlock {
    pub(super) name: String,
    pub(super) holders: Vec<String>,
}

pub(super) struct Looks {
    pub(super) reports: mpsc::Receiver<Report>,
    pub(super) requests: mpsc::UnboundedSender<Unlock>,
}

/// Starts looking at the locks whose names match the pattern.
pub(super) fn start(
    store_args: StoreArgs,
    pattern: String,
    interval: Duration,
) -> Result<Looks, Failure> {
    // If the view is not drawn, for example because the terminal is stuck, the next look waits.
    let (sender, reports) = mpsc::channel(1);
    let (requests, requested) = mpsc::unbounded_channel();
    let runtime = runtime()?;
    let looking = move || {
        let (connected, client) = watch::channel(None);
        runtime.block_on(async {
            tokio::select! {
                () = look_repeatedly(&store_args, &pattern, interval, &connected, &sender) => {}
                () = unlock_requested(requested, client, &sender) => {}
            }
        });
    };
    spawn_without_signals("looks", looking)
        .map_err(|error| Failure::system("cannot start a thread", &error))?;
    Ok(Looks { reports, requests })
}

/// Returns when there is no view any more, or when no look can succeed.
async fn look_repeatedly(
    store_args: &StoreArgs,
    pattern: &str,
    interval: Duration,
    connected: &watch::Sender<Option<Client>>,
    sender: &mpsc::Sender<Report>,
) {
    loop {
        let begun = Instant::now();
        let looked = async {
            let known = connected.borrow().clone();
            let client = match known {
                Some(client) => client,
                None => {
                    let client = store::connect(store_args, Client::builder()).await?;
                    connected.send_replace(Some(client.clone()));
                    client
                }
            };
            look(&client, pattern).await
        };
        let report = match looked.await {
            Ok(look) => Report::Look(look),
            Err(failure) if failure.code == exit::UNAVAILABLE => Report::Failed(failure.message),
            Err(failure) => {
                let _ = sender.send(Report::Ended(failure)).await;
                return;
            }
        };
        let took = begun.elapsed();
        if sender.send(report).await.is_err() {
            return;
        }
        // Looks that take long are at most half of the time, for the sake of the store.
        tokio::time::sleep(interval.saturating_sub(took).max(took)).await;
    }
}

/// Looks at all locks. After an outage in between it looks again, but only once: the store may
/// always be slow.
async fn look(client: &Client, pattern: &str) -> Result<Look, Failure> {
    let (look, longest_answer) = look_once(client, pattern).await?;
    match longest_answer > LONGEST_ANSWER {
        true => Ok(look_once(client, pattern).await?.0),
        false => Ok(look),
    }
}

/// Returns what it has found, and how long an answer took at most.
async fn look_once(client: &Client, pattern: &str) -> Result<(Look, Duration), Failure> {
    let mut look = Look::new(Instant::now());
    let mut listing = client.list(pattern);
    let mut longest_answer = Duration::ZERO;
    loop {
        let asked = Instant::now();
        let Some(found) = listing.next().await? else {
            break;
        };
        longest_answer = longest_answer.max(asked.elapsed());
        look.add(found);
    }
    let graph = match client.wait_graph().await {
        Err(Error::NotPermitted { .. }) => {
            look.waits_refused = true;
            Default::default()
        }
        graph => graph?,
    };
    look.complete(&graph);
    Ok((look, longest_answer))
}

async fn unlock_requested(
    mut requested: mpsc::UnboundedReceiver<Unlock>,
    client: watch::Receiver<Option<Client>>,
    sender: &mpsc::Sender<Report>,
) {
    while let Some(Unlock { name, holders }) = requested.recv().await {
        let connected = client.borrow().clone();
        let result = match connected {
            Some(client) => unlock::force_unlock(&client, &name, Some(&holders)).await,
            None => Ok(format!("{name}: not unlocked: not connected")),
        };
        let text = result.unwrap_or_else(|failure| format!("{name}: {}", failure.message));
        if sender.send(Report::Unlocked(text)).await.is_err() {
            return;
        }
    }
}
