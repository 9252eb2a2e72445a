//! `redlatch run`: acquires the lock, runs CMD, releases the lock.
//!
//! 1. Catches all signals, checks names and settings on an embedded store, and connects.
//! 2. Acquires the lock, and reports a wait that takes longer than a second. At the limit it reports
//!    the holder and exits with the conflict code. A signal that ends a process ends the wait.
//! 3. Starts CMD, unless the lock is already lost, and passes signals on to it. A stop signal stops CMD's processes and then `redlatch`.
//!    When it continues, it checks the lock first.
//! 4. If CMD ends by itself, releases the lock. If a signal ended CMD, first waits for its child
//!    processes, and kills them after --kill-after. A signal also ends the wait for a store that
//!    does not answer the release.
//! 5. If another client asks for the lock, ends CMD and its child processes, and then releases the lock.
//! 6. If the lock is lost meanwhile, or the release finds it lost, ends CMD and its child processes,
//!    and exits with [`exit::LOST`]. Those that job control has stopped are killed: continued for
//!    SIGTERM, they would work beside the next owner.

use std::collections::HashSet;
use std::convert::Infallible;
use std::pin::pin;
use std::time::Duration;

use redlatch::inspect::ObjectState;
use redlatch::{Client, Error, Expiry, Loss, OnceRun, Ticket};
use rustix::process::{Signal, WaitStatus};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use crate::args::{Cmd, Run};
use crate::child::{Child, ChildEvent};
use crate::exit::{self, Failure};
use crate::held_lock::{self, BoxFuture, HeldLock};
use crate::registered;
use crate::show::lease_text;
use crate::signals::{self, Caught, Signals};
use crate::stderr::{self, detail, note, stderr};
use crate::store::WaitLimits;
use crate::store_args::StoreArgs;
use crate::{duration, once, store, ticket};

/// How long `run` waits before it prints a message. A lock that is free soon needs none.
const REPORT_DELAY: Duration = Duration::from_secs(1);

/// How long the store may take after a signal has asked `redlatch` to end, or without the lock. A
/// second signal that ends CMD may arrive at any time, and is no reason to leave the lock held.
const RELEASE_GRACE: Duration = Duration::from_secs(1);

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
        signal = signals.next_end() => return Ok(exit::by_signal(signal.as_raw())),
        ticket = reading => ticket?,
    };
    store::validate_request(&run).await?;
    // A repeated name is held once.
    let mut named = HashSet::new();
    run.names.retain(|name| named.insert(name.clone()));
    let limits = WaitLimits::new(run.waiting.outage_limit(), run.waiting.wait);
    let settings = store::settings(&run.cmd).outage_limit(run.waiting.outage_limit());
    let client = tokio::select! {
        biased;
        signal = signals.next_end() => return Ok(exit::by_signal(signal.as_raw())),
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
        signal = signals.next_end() => return Ok(exit::by_signal(signal.as_raw())),
        earlier = once::earlier_run(client, limits, run) => earlier?,
    };
    if let Some(earlier) = earlier {
        once::report(run, &earlier);
        return Ok(exit::ALREADY_RAN);
    }
    let held_lock = tokio::select! {
        biased;
        signal = signals.next_end() => return Ok(exit::by_signal(signal.as_raw())),
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
        signal = signals.next_end() => return Ok(exit::by_signal(signal.as_raw())),
        loss = held_lock.lost() => {
            stderr!("{}: lost before CMD began: {loss}", held_lock.names());
            return Ok(exit::LOST);
        }
        begun = once::begin(client, run) => begun?,
    };
    let once_run = match begun {
        Ok(once_run) => once_run,
        Err(earlier) => {
            once::report(run, &earlier);
            return Ok(exit::ALREADY_RAN);
        }
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
        signal = signals.next_end() => return Ok(exit::by_signal(signal.as_raw())),
        held_lock = ticket::adopt(client, limits, ticket) => held_lock?,
    };
    detail!("{}: adopted by {}", held_lock.names(), held_lock.owner());
    match run_cmd(client, held_lock, None, &run.cmd, signals).await? {
        CmdEnd::Ended { code, .. } => Ok(code),
        CmdEnd::Lost { .. } => Ok(exit::LOST),
    }
}

/// How CMD has ended.
pub(crate) enum CmdEnd {
    /// By itself or by a signal. The lock has been released.
    Ended {
        code: u8,
        /// It was ended because another client asked for the lock, and by no signal to `redlatch`.
        asked: bool,
    },
    /// The lock was lost, so CMD was not started, or CMD and its children were ended.
    Lost {
        /// CMD had ended by itself before the loss was noticed.
        cmd_ended: bool,
        /// A signal has asked CMD to end.
        end_requested: bool,
        /// Processes of CMD could not be ended and continue.
        remains: bool,
    },
}

/// Runs CMD while the lock is held, and then releases it. `once_run`: where its outcome is recorded.
pub(crate) async fn run_cmd(
    client: &Client,
    mut held_lock: HeldLock,
    once_run: Option<OnceRun>,
    cmd: &Cmd,
    signals: &mut Signals,
) -> Result<CmdEnd, Failure> {
    let names = held_lock.names();
    // This process may have been stopped since it acquired the lock.
    if let Some(loss) = held_lock.known_loss().await {
        stderr!("{names}: lost before CMD began: {loss}");
        let outcome = "lost the lock before CMD began";
        once::finish(once_run, &names, outcome, sleep(RELEASE_GRACE)).await;
        return Ok(CmdEnd::Lost {
            cmd_ended: false,
            end_requested: false,
            remains: false,
        });
    }
    let mut child = match Child::start(cmd, &held_lock, signals) {
        Ok(child) => child,
        Err(error) => {
            let outcome = "could not be started";
            once::finish(once_run, &names, outcome, sleep(RELEASE_GRACE)).await;
            return Err(Failure::system("cannot start a process", &error));
        }
    };
    let asked = held_lock.take_asked();
    let unfinished = match supervise(&mut child, &held_lock, asked, client, cmd, signals).await {
        Ok(RunOutcome::CmdEnded(status)) => {
            let releasing = async {
                let outcome = once::outcome(status);
                once::finish(once_run, &names, &outcome, held_lock.lost()).await;
                held_lock.unlock().await
            };
            let released = match unless_ended(releasing, signals).await {
                Ok(released) => released,
                Err(signal) => {
                    let code = exit::by_signal(signal.as_raw());
                    child.resend_key_signal();
                    return Ok(CmdEnd::Ended { code, asked: false });
                }
            };
            let ended = CmdEnd::Ended {
                code: exit::by_status(status),
                asked: child.ended_for_request && !child.end_requested(),
            };
            match released {
                Ok(()) => {
                    detail!("{names}: released");
                    child.resend_key_signal();
                    return Ok(ended);
                }
                Err(error @ (Error::Lost { .. } | Error::WrongKind { .. })) => stderr!("{error}"),
                Err(error) => {
                    stderr!("{names}: not released: {error}");
                    stderr!("{names}: it is free when its lease ends");
                    child.resend_key_signal();
                    return Ok(ended);
                }
            }
            None
        }
        Ok(RunOutcome::Lost(loss)) => {
            let how = match child.is_killed() {
                true => "SIGKILL now".to_owned(),
                false => format!(
                    "SIGTERM now, SIGKILL after {}",
                    duration::short(cmd.kill_after)
                ),
            };
            stderr!("{names}: lost: {loss}; ending CMD: {how}");
            once_run
        }
        Err(error) => {
            child.end(true, true, cmd.kill_after, signals).await;
            return Err(Failure::system("cannot wait for CMD", &error));
        }
    };
    let cmd_ended = child.has_ended() && !child.ended_for_request;
    // Even if CMD itself has ended: its children still rely on the lock.
    let send_term = !child.is_killed();
    child.end(send_term, false, cmd.kill_after, signals).await;
    let remaining = child.remaining();
    if let Some(remaining) = &remaining {
        stderr!("{names}: these processes could not be ended and continue: {remaining}");
    }
    once::finish(unfinished, &names, "lost the lock", sleep(RELEASE_GRACE)).await;
    child.resend_key_signal();
    Ok(CmdEnd::Lost {
        cmd_ended,
        end_requested: child.end_requested(),
        remains: remaining.is_some(),
    })
}

/// Waits for `work`. After a signal that ends a process, waits for at most [`RELEASE_GRACE`], and
/// then returns the signal. `work` then continues in the background, and [`store::flush`] reports
/// it.
async fn unless_ended<T>(
    work: impl Future<Output = T>,
    signals: &mut Signals,
) -> Result<T, Signal> {
    let mut work = pin!(work);
    tokio::select! {
        biased;
        done = &mut work => Ok(done),
        signal = signals.next_end() => timeout(RELEASE_GRACE, work).await.map_err(|_| signal),
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
                let noun = held_lock::permits_noun(total);
                return Ok(Err(Failure::wrong_kind(format!(
                    "{name} has {total} {noun}, not {permits}; if this semaphore is yours, change it with: \
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

/// If the wait takes long, reports once which lock is awaited and which owner holds it.
pub(crate) async fn report_waiting(client: &Client, names: &[String]) -> Infallible {
    if !stderr::output().verbose {
        tokio::time::sleep(REPORT_DELAY).await;
    }
    for name in names {
        if let Some(holder_text) = holder_text(client, name).await {
            note!("waiting for {name}, {holder_text}");
        }
    }
    std::future::pending().await
}

/// Reports why the lock was not acquired. Does not wait for a slow store, because the limit has
/// passed.
pub(crate) async fn report_conflict(client: &Client, names: &[String], wait: Option<Duration>) {
    let deadline = Instant::now() + REPORT_DELAY;
    let shown = names.join(" ");
    let what = match wait {
        Some(wait) => format!("not acquired within {}", duration::short(wait)),
        None => "not acquired".into(),
    };
    let mut reasons = Vec::new();
    for name in names {
        let holder_text = timeout_at(deadline, holder_text(client, name)).await;
        if let Ok(Some(holder_text)) = holder_text {
            reasons.push(match names.len() {
                1 => holder_text,
                _ => format!("{name} is {holder_text}"),
            });
        }
    }
    match reasons.is_empty() {
        true => note!("{shown}: {what}: another owner held it"),
        false => note!("{shown}: {what}: {}", reasons.join("; ")),
    }
}

/// Describes the holder of `name`, and when its lease ends if it is not renewed.
async fn holder_text(client: &Client, name: &str) -> Option<String> {
    let state = client.inspect(name).await.ok().flatten()?;
    let holders = state.holders();
    if let Some(first) = holders.first() {
        let others = match holders.len() - 1 {
            0 => String::new(),
            others => format!(" and {others} more"),
        };
        if let Some(entry) = &first.registered {
            let (who, lease) = (registered::text(entry), lease_text(first.remaining));
            return Some(format!("held by {who}{lease}{others}"));
        }
        // All have to expire, so the latest expiry counts.
        let latest = holders.iter().map(|holder| holder.remaining).max();
        let until = match latest.and_then(Expiry::duration) {
            Some(latest) => format!(" for up to {}", duration::rough(latest)),
            None => " forever".into(),
        };
        return Some(format!("held by {}{others}{until}", first.owner));
    }
    match &state {
        ObjectState::ExpirableSemaphore { held, .. } => {
            // One permit is enough.
            let until = held.iter().map(|permit| permit.remaining).min();
            let until = until.and_then(Expiry::duration);
            let until = until.map_or(String::new(), |until| {
                format!(" for up to {}", duration::rough(until))
            });
            Some(match held.len() {
                1 => format!("its only permit is in use{until}"),
                all => format!("all {all} permits are in use{until}"),
            })
        }
        ObjectState::Lock { queue, .. } => queue
            .first()
            .map(|next| format!("next in its queue is {}", next.owner)),
        _ => None,
    }
}

enum RunOutcome {
    /// CMD has ended, and no process is left that needs the lock.
    CmdEnded(WaitStatus),
    Lost(Loss),
}

/// Waits until CMD ends, or the lock is lost, whichever is first. `asked`: completes when another client asks for the lock, which
/// ends CMD.
///
/// Invariant: while this process holds the lock, or has lost it, it watches every running process
/// of CMD. It stops only after all of them have stopped, and continues them only after it has
/// checked the lock. If a signal ended CMD, it keeps the lock until the last of them has ended.
async fn supervise(
    child: &mut Child,
    held_lock: &HeldLock,
    mut asked: BoxFuture<'static, ()>,
    client: &Client,
    cmd: &Cmd,
    signals: &mut Signals,
) -> std::io::Result<RunOutcome> {
    let status = loop {
        match child.poll_event()? {
            Some(ChildEvent::Ended(status)) => break status,
            Some(ChildEvent::Stopped(signal)) if signals::can_stop() => {
                child.stop_own_group(signal)
            }
            Some(ChildEvent::Stopped(signal)) => child.decline_stop(signal),
            None => {}
        }
        tokio::select! {
            // After a pause of this process, several events may be ready. A loss comes first.
            biased;
            lost = held_lock.lost() => return Ok(RunOutcome::Lost(lost)),
            caught = signals.next() => match caught {
                Caught::Stop if signals::can_stop() => {
                    child.stop_all();
                    signals::stop();
                    if let Some(loss) = held_lock.check_loss(client).await {
                        child.kill_stopped();
                        return Ok(RunOutcome::Lost(loss));
                    }
                    child.continue_all();
                }
                caught => child.forward(caught),
            },
            () = &mut asked => match child.poll_event()? {
                // By itself, just before.
                Some(ChildEvent::Ended(status)) => break status,
                Some(ChildEvent::Stopped(_)) | None => {
                    return end_asked(child, held_lock, cmd, signals).await;
                }
            },
        }
    };
    if !child.ended_by_signal(status) {
        return Ok(RunOutcome::CmdEnded(status));
    }
    // CMD's children may still need time to end.
    let send_term = !child.children_were_signaled(status);
    let count_remaining = child.descendant_counter();
    tokio::select! {
        biased;
        lost = held_lock.lost() => return Ok(RunOutcome::Lost(lost)),
        () = child.end(send_term, true, cmd.kill_after, signals) => {}
        never = report_remaining(held_lock.names(), cmd, count_remaining) => match never {},
    }
    Ok(RunOutcome::CmdEnded(status))
}

/// Ends CMD and its child processes, because another client asks for the lock.
async fn end_asked(
    child: &mut Child,
    held_lock: &HeldLock,
    cmd: &Cmd,
    signals: &mut Signals,
) -> std::io::Result<RunOutcome> {
    child.ended_for_request = true;
    let kill_after = duration::short(cmd.kill_after);
    stderr!(
        "{}: asked to release it; ending CMD: SIGTERM now, SIGKILL after {kill_after}",
        held_lock.names()
    );
    tokio::select! {
        biased;
        lost = held_lock.lost() => return Ok(RunOutcome::Lost(lost)),
        () = child.end(true, true, cmd.kill_after, signals) => {}
    }
    let status = child.status();
    let status = status.ok_or_else(|| std::io::Error::other("the end of CMD is unknown"))?;
    Ok(RunOutcome::CmdEnded(status))
}

/// Reports once that processes outlive CMD.
async fn report_remaining(names: String, cmd: &Cmd, count: impl FnOnce() -> usize) -> Infallible {
    tokio::time::sleep(REPORT_DELAY).await;
    note!(
        "{names}: CMD has ended, but {} of its child processes have not; the lock is held until they \
         end (SIGKILL {} after CMD)",
        count(),
        duration::short(cmd.kill_after)
    );
    std::future::pending().await
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::{Args, Command};

    fn run_args(cmd: &str) -> Run {
        let args = Args::parse_from(["redlatch", "run", "--slot", "1", "name", "--", cmd]);
        let Command::Run(run) = args.command else {
            unreachable!("it is `run`");
        };
        run
    }

    async fn outcome(client: &Client, run: &Run) -> Option<String> {
        let limits = WaitLimits::new(None, None);
        let earlier = once::earlier_run(client, &limits, run).await.unwrap();
        earlier.and_then(|earlier| earlier.outcome)
    }

    /// An example of a failure: the system has no arguments with a NUL.
    #[tokio::test]
    async fn slot_of_cmd_that_could_not_be_started_says_so() {
        let client = Client::embedded();
        let guard = client.lock("name").lock().await.unwrap();
        let held_lock = HeldLock::from_guard(guard, None);
        let run = run_args("\0");
        let once_run = once::begin(&client, &run).await.unwrap().unwrap();
        let mut signals = Signals::none();
        let end = run_cmd(&client, held_lock, once_run, &run.cmd, &mut signals).await;
        assert!(end.is_err_and(|failure| failure.code == exit::SYSTEM));
        let outcome = outcome(&client, &run).await;
        assert_eq!(outcome.as_deref(), Some("could not be started"));
    }

    /// The process was stopped between the acquisition and the start of CMD.
    #[tokio::test]
    async fn cmd_is_not_started_after_a_loss() {
        let client = Client::embedded();
        let acquiring = client.lock("name").lock().lease(Duration::from_millis(1));
        let held_lock = HeldLock::from_guard(acquiring.await.unwrap(), None);
        let run = run_args("true");
        let once_run = once::begin(&client, &run).await.unwrap().unwrap();
        held_lock.lost().await;
        let mut signals = Signals::none();
        let end = run_cmd(&client, held_lock, once_run, &run.cmd, &mut signals).await;
        assert!(matches!(
            end,
            Ok(CmdEnd::Lost {
                cmd_ended: false,
                end_requested: false,
                remains: false
            })
        ));
        let outcome = outcome(&client, &run).await;
        assert_eq!(outcome.as_deref(), Some("lost the lock before CMD began"));
    }
}
