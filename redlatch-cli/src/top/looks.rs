//! Looks at the store again and again, in a thread of its own, so that it does not delay the keys.
//! Also unlocks there.

use std::time::{Duration, Instant};

use redlatch::Client;
use tokio::sync::{mpsc, watch};

use crate::exit::{self, Failure};
use crate::look::Look;
use crate::look::reader::{self, Reader};
use crate::store::args::StoreArgs;
use crate::threads::{runtime, spawn_without_signals};
use crate::unlock;

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
        let reader = Reader::new(store_args, pattern);
        let client = reader.client();
        runtime.block_on(async {
            tokio::select! {
                () = look_repeatedly(reader, interval, &sender) => {}
                () = unlock_requested(requested, client, &sender) => {}
            }
        });
    };
    spawn_without_signals("looks", looking)
        .map_err(|error| Failure::system("cannot start a thread", &error))?;
    Ok(Looks { reports, requests })
}

/// Returns when there is no view any more, or when no look can succeed.
async fn look_repeatedly(mut reader: Reader, interval: Duration, sender: &mpsc::Sender<Report>) {
    loop {
        let begun = Instant::now();
        let report = match reader.look().await {
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
        tokio::time::sleep(reader::rest(interval, took)).await;
    }
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
