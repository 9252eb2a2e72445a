//! CMD's process: started, signalled, waited for, and ended.

use std::ffi::OsString;
use std::io::{self, IsTerminal as _};
use std::process::ExitStatus;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process, kill_process_group, test_kill_process_group};
use tokio::process::Command;
use tokio::time::{Instant, sleep, sleep_until};

use crate::access;
use crate::args::Run;
use crate::holding::Holding;
use crate::signals::{Caught, Signals};

pub(crate) struct Child {
    process: tokio::process::Child,
    /// CMD's own process group, unless it shares ours.
    ///
    /// In a group of its own, CMD could not read from the terminal; in ours, a signal for all of
    /// CMD's processes would be one for us and whoever started us too.
    group: Option<Pid>,
}

impl Child {
    /// Starts CMD on the thread that this is called on, whose end is the end of CMD too.
    pub(crate) fn start(run: &Run, holding: &Holding) -> io::Result<Child> {
        let own_group = !io::stdin().is_terminal();
        let mut command = bound_to_us(&run.command);
        if !run.keep_passwords {
            for (variable, value) in access::for_cmd() {
                match value {
                    Some(value) => command.env(variable, value),
                    None => command.env_remove(variable),
                };
            }
        }
        command.envs(holding.environment());
        if own_group {
            command.process_group(0);
        }
        let process = command.spawn()?;
        let pid = pid_of(&process);
        Ok(Child {
            process,
            group: pid.filter(|_| own_group),
        })
    }

    /// Waits for CMD's end. Can be dropped at will, and asked again afterwards.
    pub(crate) async fn wait(&mut self) -> io::Result<ExitStatus> {
        self.process.wait().await
    }

    /// Passes on what came for us, unless CMD has had it too: keys pressed at a terminal are for
    /// everybody in the group.
    pub(crate) fn pass_on(&self, caught: Caught) {
        if self.group.is_some() || !caught.of_terminal {
            self.send(caught.signal);
            // A CMD that is stopped, as by asking a terminal that it is not in front of, would hear
            // of it only when it goes on; so it goes on.
            self.send(Signal::CONT);
        }
    }

    fn send(&self, signal: Signal) {
        // What cannot be signalled has ended, or has become another user; then nothing can be done.
        let _ = match (self.group, pid_of(&self.process)) {
            (Some(group), _) => kill_process_group(group, signal),
            (None, Some(pid)) => kill_process(pid, signal),
            (None, None) => Ok(()),
        };
    }

    /// Ends CMD and everything in its group: asks, and after `patience` no longer asks. Returns when
    /// nothing is left.
    pub(crate) async fn end(&mut self, patience: Duration, signals: &mut Signals) {
        self.send(Signal::TERM);
        // What was stopped must go on to be able to end.
        self.send(Signal::CONT);
        let mut killing = std::pin::pin!(sleep(patience));
        loop {
            tokio::select! {
                biased;
                () = self.gone() => return,
                () = &mut killing => break,
                caught = signals.next() => self.pass_on(caught),
            }
        }
        self.send(Signal::KILL);
        // Not for ever: the dead stay in a group as long as nobody collects them.
        let give_up = sleep_until(Instant::now() + Duration::from_secs(1));
        tokio::select! {
            () = self.gone() => {}
            () = give_up => {}
        }
    }

    async fn gone(&mut self) {
        let _ = self.wait().await;
        // Nobody tells when the last one leaves a group, so it has to be asked for.
        while let Some(group) = self.group
            && test_kill_process_group(group).is_ok()
        {
            sleep(Duration::from_millis(10)).await;
        }
    }
}

fn pid_of(process: &tokio::process::Child) -> Option<Pid> {
    let id = process.id()?;
    Pid::from_raw(i32::try_from(id).ok()?)
}

/// CMD, by way of ourselves: only in the new process, before it becomes CMD, can it be arranged that
/// the system kills it when we die. See `exec`.
#[cfg(target_os = "linux")]
fn bound_to_us(command: &[OsString]) -> Command {
    // Not our path, which may lead to a newer version by now or to nothing.
    let mut ourselves = Command::new("/proc/self/exe");
    ourselves.arg0("redlatch");
    ourselves.args(["__exec", &std::process::id().to_string(), "--"]);
    ourselves.args(command);
    ourselves
}

#[cfg(not(target_os = "linux"))]
fn bound_to_us(command: &[OsString]) -> Command {
    let mut ourselves = Command::new(std::env::current_exe().unwrap_or_else(|_| "redlatch".into()));
    ourselves.args(["__exec", &std::process::id().to_string(), "--"]);
    ourselves.args(command);
    ourselves
}
