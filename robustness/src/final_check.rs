//! The final check by a separate client: when all others have ended, every lock must be free, and this client
//! leaves nothing behind.

use std::time::Duration;

use redlatch::{Client, Error};
use tokio::runtime::{Builder, Runtime};
use tokio::time::{Instant, sleep};

use crate::Result;
use crate::checker::FAIR_GRACE_PERIOD;
use crate::history::PERMITS;
use crate::names::has_queue;
use crate::worker::Handle;

/// Acquires and releases each lock once, in a runtime of its own.
pub(crate) fn check_all_free_blocking(
    url: &str,
    names: &[String],
    limit: Duration,
) -> Result<Vec<String>> {
    runtime()?.block_on(check_all_free(url, names, limit, limit))
}

/// Acquires and releases each lock once, with this lease. Returns those that could not be acquired within the
/// limit, which is for all of them together; a fair lock may take a grace period longer, for dead waiters.
pub async fn check_all_free(
    url: &str,
    names: &[String],
    lease: Duration,
    limit: Duration,
) -> Result<Vec<String>> {
    let client = Client::connect(url).await?;
    let begun = Instant::now();
    let mut kept = Vec::new();
    for name in names {
        let grace = match has_queue(name) {
            true => FAIR_GRACE_PERIOD,
            false => Duration::ZERO,
        };
        let end = begun + limit + grace;
        let handle = Handle::new(&client, name, lease)?;
        loop {
            let acquired = handle.acquire_and_release().await;
            if matches!(acquired, Ok(true)) {
                break;
            }
            if Instant::now() > end {
                let why = acquired.err().map(|error| error.to_string());
                kept.push(format!("{name} {}", why.unwrap_or_default()));
                break;
            }
            sleep(Duration::from_millis(20)).await;
        }
    }
    client.flush().await;
    Ok(kept)
}

/// Sets the permits of the expirable semaphores, in a runtime of its own.
pub(crate) fn set_permits_blocking(url: &str, names: &[String], limit: Duration) -> Result<()> {
    runtime()?.block_on(set_permits(url, names, limit))
}

/// Sets the permits of the expirable semaphores after a store has lost them.
pub async fn set_permits(url: &str, names: &[String], limit: Duration) -> Result<()> {
    let client = Client::builder()
        .response_timeout(limit)
        .connect(url)
        .await?;
    for name in names.iter().filter(|name| name.starts_with("permits")) {
        let semaphore = client.expirable_semaphore(name);
        while let Err(error) = semaphore.try_set_permits(PERMITS).await {
            if !matches!(error, Error::OutcomeUnknown { .. }) {
                return Err(error.into());
            }
        }
    }
    Ok(())
}

fn runtime() -> Result<Runtime> {
    Ok(Builder::new_current_thread().enable_all().build()?)
}
