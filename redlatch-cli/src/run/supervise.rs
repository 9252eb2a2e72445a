//! Runs CMD while this process holds a lock, and then releases the lock.
//!
//! 1. Starts CMD, unless the lock is already lost, and passes signals on to it. A stop signal stops
//!    CMD's processes and then `redlatch`. When it continues, it checks the lock first; an ending
//!    signal does not wait for the answer.
//! 2. If CMD ends by itself, releases the lock. If a signal ended CMD, first waits for its child
//!    processes, and kills them after --kill-after. A signal also ends the wait for a store that
//!    does not answer the release.
//! 3. If another client asks for the lock, ends CMD and its child processes, and then releases the
//!    lock.
//! 4. If the lock is lost meanwhile, or the release finds it lost, ends CMD and its child
//!    processes, and exits with [`exit::LOST`]. Those that job control has stopped are killed:
//!    continued for SIGTERM, they would work beside the next owner.

use std::convert::Infallible;
use std::pin::pin;
use std::time::Duration;

use redlatch::{Client, Error, Loss, OnceRun};
use rustix::process::WaitStatus;
use tokio::time::{sleep, timeout};

use super::child::{Child, ChildEvent};
use super::held_lock::{BoxFuture, HeldLock};
use super::once;
use super::waiting::REPORT_DELAY;
use crate::args::run::Cmd;
use crate::duration;
use crate::exit::{self, Failure};
use crate::output::stderr::{detail, note, stderr};
use crate::process::signals::{self, Caught, Signals};

/// How long the store may take after a signal has asked `redlatch` to end, or without the lock. A
/// second signal that ends CMD may arrive at any time, and is no reason to leave the lock held.
const RELEASE_GRACE: Duration = Duration::from_secs(1);

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

/// Runs CMD while the lock is held, and then releases it. `once_run`: where its outcome is
/// recorded.
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
                Err(code) => {
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
            if !held_lock.is_of_parent() {
                stderr!("{names}: lost: {loss}; ending CMD: {how}");
            }
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
/// then returns the exit code. `work` then continues in the background, and
/// [`flush`](crate::store::flush) reports it.
async fn unless_ended<T>(work: impl Future<Output = T>, signals: &mut Signals) -> Result<T, u8> {
    let mut work = pin!(work);
    tokio::select! {
        biased;
        done = &mut work => Ok(done),
        code = signals.next_end() => timeout(RELEASE_GRACE, work).await.map_err(|_| code),
    }
}

enum RunOutcome {
    /// CMD has ended, and no process is left that needs the lock.
    CmdEnded(WaitStatus),
    Lost(Loss),
}

/// Waits until CMD ends, or the lock is lost, whichever is first. `asked`: completes when another
/// client asks for the lock, which ends CMD.
///
/// Invariant: while this process holds the lock, or has lost it, it watches every running process
/// of CMD. It stops only after all of them have stopped, and continues them only after it has
/// checked the lock, or, for an ending signal, the local lease. If a signal ended CMD, it keeps the
/// lock until the last of them has ended.
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
                    if let Some(loss) = stop_and_check(child, held_lock, client, signals).await {
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

/// Stops this process, whose CMD is stopped, and checks the lock when it continues. A signal that
/// asks CMD to end does not wait for the store: the local lease decides then.
async fn stop_and_check(
    child: &mut Child,
    held_lock: &HeldLock,
    client: &Client,
    signals: &mut Signals,
) -> Option<Loss> {
    loop {
        signals::stop();
        let mut check = pin!(held_lock.check_loss(client));
        // Until another stop: an answer from before it proves nothing.
        loop {
            tokio::select! {
                biased;
                loss = &mut check => return loss,
                caught = signals.next() => match caught {
                    Caught::Stop if signals::can_stop() => break,
                    Caught::End(_) => {
                        let loss = held_lock.known_loss().await;
                        if loss.is_none() {
                            child.forward(caught);
                        }
                        return loss;
                    }
                    caught => child.forward(caught),
                },
            }
        }
    }
}

/// Ends CMD and its child processes, because another client asks for the lock.
async fn end_asked(
    child: &mut Child,
    held_lock: &HeldLock,
    cmd: &Cmd,
    signals: &mut Signals,
) -> std::io::Result<RunOutcome> {
    child.ended_for_request = true;
    if !held_lock.is_of_parent() {
        let (names, kill_after) = (held_lock.names(), duration::short(cmd.kill_after));
        stderr!(
            "{names}: asked to release it; ending CMD: SIGTERM now, SIGKILL after {kill_after}"
        );
    }
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
    use crate::args::run::Run;
    use crate::args::{Args, Command};
    use crate::store::WaitLimits;

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
    #[tokio::test(start_paused = true)]
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
