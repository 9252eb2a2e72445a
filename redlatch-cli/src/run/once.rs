//! `redlatch run --once-per` and `--slot`: CMD runs at most once for each slot, in the whole fleet.
//!
//! 1. Before it waits for the lock, `run` checks whether the slot has had its run already.
//! 2. When it holds the lock, it begins the run in the store, which decides. Then CMD starts.
//! 3. When CMD has ended, it records how, and only then releases the lock. So a process that waited
//!    for the lock reads the outcome.

use std::time::SystemTime;

use redlatch::{AlreadyRan, Client, OnceRun};
use rustix::process::WaitStatus;

use crate::args::run::Run;
use crate::exit::{self, Failure};
use crate::output::stderr::{note, warning};
use crate::store::WaitLimits;
use crate::text;

/// Returns the run that the slot has had already. `None`: it has had none, or `run` has no slot.
pub(crate) async fn earlier_run(
    client: &Client,
    limits: &WaitLimits,
    run: &Run,
) -> Result<Option<AlreadyRan>, Failure> {
    let Some(once) = run.once(client) else {
        return Ok(None);
    };
    let looking = limits.retry_through_outage(once.name(), async || once.earlier_run().await);
    Ok(looking.await?)
}

/// Begins the run of the slot, if `run` has one. The inner error is the run that the slot has had
/// already.
pub(crate) async fn begin(
    client: &Client,
    run: &Run,
) -> Result<Result<Option<OnceRun>, AlreadyRan>, Failure> {
    match run.once(client) {
        Some(once) => Ok(once.begin().await?.map(Some)),
        None => Ok(Ok(None)),
    }
}

/// Records how CMD has ended, and waits for the store until `limit` completes. If the store cannot
/// be reached, that is only reported: the slot counts as used.
pub(crate) async fn finish(
    once_run: Option<OnceRun>,
    name: &str,
    outcome: &str,
    limit: impl Future<Output = impl Sized>,
) {
    let Some(once_run) = once_run else { return };
    let finished = tokio::select! {
        biased;
        finished = once_run.finish(outcome) => finished.map_err(|error| error.to_string()),
        _ = limit => Err("the store does not answer".to_owned()),
    };
    if let Err(error) = finished {
        warning!("{name}: how CMD ended was not recorded: {error}");
    }
}

/// Returns how CMD has ended.
pub(crate) fn outcome(status: WaitStatus) -> String {
    match status.terminating_signal() {
        Some(signal) => format!("signal {signal}"),
        None => format!("exit code {}", exit::by_status(status)),
    }
}

/// Prints which machine has run CMD, and when and how. Returns the exit code.
pub(crate) fn report(run: &Run, earlier: &AlreadyRan) -> u8 {
    let name = run.names.join(" ");
    let age = SystemTime::now().duration_since(earlier.at);
    let time = text::clock(earlier.at, age.unwrap_or_default());
    let host = &earlier.host;
    match &earlier.outcome {
        Some(outcome) => note!("{name}: ran on {host} at {time}, {outcome}"),
        None => note!("{name}: started on {host} at {time}, not finished"),
    }
    exit::ALREADY_RAN
}
