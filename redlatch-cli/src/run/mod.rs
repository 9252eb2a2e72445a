//! Commands that hold a lock. This module is `redlatch run`: acquires the lock, runs CMD, releases
//! the lock.
//!
//! 1. Catches all signals, checks names and settings on an embedded store, and connects.
//! 2. Acquires the lock, and reports a wait that takes longer than a second. At the limit it
//!    reports the holder and exits with the conflict code. A signal that ends a process ends the
//!    wait.
//! 3. Runs CMD while it holds the lock (`supervise`).

mod child;
pub(crate) mod elect;
pub(crate) mod exec;
mod held_lock;
pub(crate) mod of_parent;
mod once;
mod supervise;
pub(crate) mod ticket;
mod waiting;

use std::collections::HashSet;

use redlatch::{Client, ClientBuilder, Ticket};

use self::held_lock::HeldLock;
use self::supervise::{CmdEnd, run_cmd};
use self::waiting::{report_conflict, report_waiting};
use crate::args::run::{Cmd, Run};
use crate::exit::{self, Failure};
use crate::output::stderr::{detail, stderr};
use crate::process::signals::Signals;
use crate::store::args::StoreArgs;
use crate::store::{self, WaitLimits};
use crate::text;

pub(crate) async fn run(store_args: &StoreArgs, mut run: Run) -> Result<u8, Failure> {
    let mut signals = Signals::catch_all()?;
    let reading = async {
        match &run.ticket {
            Some(ticket) => ticket::read(ticket).await.map(Some),
            None => Ok(None),
        }
    };
    let ticket = tokio::select! {
        biased;
        code = signals.next_end() => return Ok(code),
        ticket = reading => ticket?,
    };
    validate_request(&run).await?;
    // A repeated name is held once.
    let mut named = HashSet::new();
    run.names.retain(|name| named.insert(name.clone()));
    let limits = WaitLimits::new(run.waiting.outage_limit(), run.waiting.wait);
    let settings = settings(&run.cmd).outage_limit(run.waiting.outage_limit());
    let client = tokio::select! {
        biased;
        code = signals.next_end() => return Ok(code),
        client = store::connect_within(store_args, settings, &limits) => client?,
    };
    let code = match &ticket {
        Some(ticket) => run_with_ticket(&client, &limits, &run, ticket, &mut signals).await,
        None => run_under_lock(&client, &limits, &run, &mut signals).await,
    };
    // Settles an interrupted acquisition, or a release without an answer.
    store::flush(&client).await;
    code
}

async fn run_under_lock(
    client: &Client,
    limits: &WaitLimits,
    run: &Run,
    signals: &mut Signals,
) -> Result<u8, Failure> {
    let earlier = tokio::select! {
        biased;
        code = signals.next_end() => return Ok(code),
        earlier = once::earlier_run(client, limits, run) => earlier?,
    };
    if let Some(earlier) = earlier {
        return Ok(once::report(run, &earlier));
    }
    let held_lock = tokio::select! {
        biased;
        code = signals.next_end() => return Ok(code),
        held_lock = acquire(client, limits, run) => held_lock?,
        never = report_waiting(client, &run.names) => match never {},
    };
    let Some(held_lock) = held_lock else {
        report_conflict(client, &run.names, run.waiting.wait).await;
        return Ok(run.conflict_exit_code);
    };
    detail!("{}: acquired by {}", held_lock.names(), held_lock.owner());
    let begun = tokio::select! {
        biased;
        code = signals.next_end() => return Ok(code),
        loss = held_lock.lost() => {
            stderr!("{}: lost before CMD began: {loss}", held_lock.names());
            return Ok(exit::LOST);
        }
        begun = once::begin(client, run) => begun?,
    };
    let once_run = match begun {
        Ok(once_run) => once_run,
        Err(earlier) => return Ok(once::report(run, &earlier)),
    };
    match run_cmd(client, held_lock, once_run, &run.cmd, signals).await? {
        CmdEnd::Ended { code, .. } => Ok(code),
        CmdEnd::Lost { .. } => Ok(exit::LOST),
    }
}

/// Runs CMD with the lock of a ticket.
async fn run_with_ticket(
    client: &Client,
    limits: &WaitLimits,
    run: &Run,
    ticket: &Ticket,
    signals: &mut Signals,
) -> Result<u8, Failure> {
    let held_lock = tokio::select! {
        biased;
        code = signals.next_end() => return Ok(code),
        held_lock = ticket::adopt(client, limits, ticket) => held_lock?,
    };
    detail!("{}: adopted by {}", held_lock.names(), held_lock.owner());
    match run_cmd(client, held_lock, None, &run.cmd, signals).await? {
        CmdEnd::Ended { code, .. } => Ok(code),
        CmdEnd::Lost { .. } => Ok(exit::LOST),
    }
}

async fn acquire(
    client: &Client,
    limits: &WaitLimits,
    run: &Run,
) -> Result<Option<HeldLock>, Failure> {
    // The inner error was not reported by the library, so it needs no explanation.
    let acquiring = async {
        if let (Some(permits), [name]) = (run.kind.permits, run.names.as_slice()) {
            let ensuring = limits.retry_through_outage(name, async || {
                held_lock::ensure_permits(client, name, permits, run.set_permits).await
            });
            if let Err(total) = ensuring.await? {
                let has = text::counted(total, "permit");
                return Ok(Err(Failure::wrong_kind(format!(
                    "{name} has {has}, not {permits}; if this semaphore is yours, change it with: \
                     redlatch run --permits {permits} --set-permits …"
                ))));
            }
        }
        Ok(Ok(HeldLock::acquire(client, limits, run).await?))
    };
    match acquiring.await {
        Ok(acquired) => acquired,
        Err(error) => {
            Err(store::explain_error(client, &run.names, run.kind.object_name(), error).await)
        }
    }
}

/// Returns the settings of the client that runs CMD.
fn settings(cmd: &Cmd) -> ClientBuilder {
    let settings = Client::builder().label(cmd.label());
    match cmd.watchdog {
        Some(lease) => settings.watchdog_lease(lease),
        None => settings,
    }
}

/// Requests the lock in a temporary embedded store first: the library reports an invalid name,
/// lease or setting before any server is contacted, and also without a server.
async fn validate_request(run: &Run) -> Result<(), Failure> {
    let client = settings(&run.cmd).connect_embedded(&redlatch::Embedded::new())?;
    if run.names.len() > 1 && (run.kind.fenced || run.kind.permits.is_some()) {
        return Err(Failure::usage(
            "--fenced and --permits work with one NAME; for several names, set the order of the \
             locks by running redlatch inside redlatch",
        ));
    }
    if run.names.len() > 1 && (run.at_least.is_some() || run.once(&client).is_some()) {
        return Err(Failure::usage(
            "--at-least, --once-per and --slot work with one NAME",
        ));
    }
    if let Some(once) = run.once(&client) {
        once.earlier_run().await.map_err(|error| match error {
            redlatch::Error::InvalidSetting { reason, .. } => {
                let option = if run.slot.is_some() {
                    "--slot"
                } else {
                    "--once-per"
                };
                Failure::usage(format!("invalid value for {option}: {reason}"))
            }
            other => other.into(),
        })?;
    }
    for name in &run.names {
        let lock = client.lock(name);
        let guard = lock.lock().await?;
        // The guard above holds the lock, so these check the options without acquiring. With an
        // acquisition, a short lease could end now and be reported as lost.
        let mut request = lock.try_lock();
        if let Some(lease) = run.lease {
            request = request.lease(lease);
        }
        if let Some(limit) = run.at_most {
            request = request.at_most(limit);
        }
        if let Some(at_least) = run.at_least {
            request = request.at_least(at_least);
        }
        let requested = request.await.map(drop);
        // A dropped guard is released in the background, and a warning is logged if this process
        // ends first.
        guard.unlock().await?;
        requested?;
    }
    Ok(())
}
