//! Signals that `redlatch` receives while it waits for the lock, or while the command (CMD) runs
//! under the lock.
//!
//! No signal that can be caught may end or stop `redlatch` without CMD. Otherwise CMD would
//! continue after the lease expires, at the same time as the next holder.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;

use rustix::process::{Signal, kill_process};
use signal_hook::consts::{
    SIGABRT, SIGALRM, SIGCHLD, SIGCONT, SIGHUP, SIGINT, SIGIO, SIGPROF, SIGQUIT, SIGSYS, SIGTERM,
    SIGTRAP, SIGTSTP, SIGTTIN, SIGTTOU, SIGUSR1, SIGUSR2, SIGVTALRM, SIGWINCH, SIGXCPU, SIGXFSZ,
};
use signal_hook::flag;
use signal_hook::iterator::Signals as IncomingSignals;
use tokio::sync::mpsc;

use crate::exit::Failure;
use crate::process_tree;
use crate::stderr::warning;

/// Signals that ask a program to end.
const ENDING: [i32; 4] = [SIGINT, SIGTERM, SIGQUIT, SIGHUP];

/// Signals that are caught even if they were ignored when this process started. A shell without job
/// control starts background commands with SIGINT and SIGQUIT ignored, but `redlatch` must still obey
/// these and SIGTERM. SIGCHLD reports that CMD has ended.
const ALWAYS_CAUGHT: [i32; 4] = [SIGINT, SIGQUIT, SIGTERM, SIGCHLD];

/// Job-control signals that stop a program.
const STOPPING: [i32; 3] = [SIGTSTP, SIGTTIN, SIGTTOU];

/// Other signals that end a program which does not handle them, and SIGWINCH, which programs at a
/// terminal use. SIGBUS is omitted although signal-hook can catch it: after a handler returns, the
/// faulting instruction would run and fault again.
const OTHERS: [i32; 12] = [
    SIGUSR1, SIGUSR2, SIGALRM, SIGXCPU, SIGXFSZ, SIGVTALRM, SIGPROF, SIGIO, SIGABRT, SIGTRAP,
    SIGSYS, SIGWINCH,
];

/// SIGSTKFLT, SIGPWR and the real-time signals, which also end a program that does not handle them.
/// Some cannot be caught on every system; those are skipped.
#[cfg(target_os = "linux")]
const OPTIONAL: &[std::ops::RangeInclusive<i32>] = &[16..=16, 30..=30, 34..=64];
#[cfg(not(target_os = "linux"))]
const OPTIONAL: &[std::ops::RangeInclusive<i32>] = &[];

/// Receives signals that would otherwise affect this process.
pub(crate) struct Signals(mpsc::UnboundedReceiver<Caught>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Caught {
    /// Asks the program to end.
    End(Signal),
    /// Any other signal. While CMD runs, it is forwarded to CMD.
    Other(Signal),
    /// Asks the program to stop until SIGCONT.
    Stop,
    /// A child process has ended or stopped.
    Child,
}

impl Signals {
    /// Catches the signals that ask a program to end.
    pub(crate) fn catch_ending() -> Result<Signals, Failure> {
        Signals::catch(ENDING.into_iter(), &[])
    }

    /// Catches the signals that ask a program to end, and those that stop and continue a job: the terminal is restored in between.
    pub(crate) fn catch_for_terminal() -> Result<Signals, Failure> {
        // A second signal ends a process that cannot react to the first one, because it is stuck in writing to a terminal.
        let is_ending = Arc::new(AtomicBool::new(false));
        for number in [SIGTERM, SIGHUP] {
            flag::register_conditional_default(number, is_ending.clone())
                .and_then(|_| flag::register(number, is_ending.clone()))
                .map_err(|error| Failure::system("cannot watch for signals", &error))?;
        }
        Signals::catch(ENDING.into_iter().chain([SIGTSTP, SIGCONT]), &[])
    }

    /// Catches every signal that would end or stop this process without CMD, and SIGCHLD.
    pub(crate) fn catch_all() -> Result<Signals, Failure> {
        let others = STOPPING.into_iter().chain(OTHERS);
        Signals::catch(ENDING.into_iter().chain(others).chain([SIGCHLD]), OPTIONAL)
    }

    /// Catches none.
    #[cfg(test)]
    pub(crate) fn none() -> Signals {
        Signals(mpsc::unbounded_channel().1)
    }

    fn catch(
        numbers: impl Iterator<Item = i32>,
        optional: &[std::ops::RangeInclusive<i32>],
    ) -> Result<Signals, Failure> {
        let failure = |error| Failure::system("cannot watch for signals", &error);
        let ignored = ignored_mask();
        let is_wanted =
            |number: &i32| ignored & (1 << (number - 1)) == 0 || ALWAYS_CAUGHT.contains(number);
        let mut incoming = IncomingSignals::new(numbers.filter(is_wanted)).map_err(failure)?;
        for number in optional.iter().cloned().flatten().filter(is_wanted) {
            // Fails for signals that the C library reserves.
            let _ = incoming.handle().add_signal(number);
        }
        let (sender, receiver) = mpsc::unbounded_channel();
        let forward = move || {
            for number in incoming.forever() {
                let Some(signal) = Signal::from_named_raw(number) else {
                    warning!(
                        "signal {number} was ignored: real-time signals are not forwarded to CMD"
                    );
                    continue;
                };
                let caught = match number {
                    SIGCHLD => Caught::Child,
                    _ if ENDING.contains(&number) => Caught::End(signal),
                    _ if STOPPING.contains(&number) => Caught::Stop,
                    _ => Caught::Other(signal),
                };
                if sender.send(caught).is_err() {
                    return;
                }
            }
        };
        thread::Builder::new()
            .name("signals".into())
            .spawn(forward)
            .map_err(failure)?;
        Ok(Signals(receiver))
    }

    /// Waits for the next signal. Cancel safe.
    pub(crate) async fn next(&mut self) -> Caught {
        match self.0.recv().await {
            Some(caught) => caught,
            // The thread ends only with the process.
            None => std::future::pending().await,
        }
    }

    /// Waits for the next signal that would end a process without handlers, and returns it. When a
    /// signal asks this process to stop, stops it and waits on. Cancel safe.
    pub(crate) async fn next_end(&mut self) -> Signal {
        loop {
            match self.next().await {
                Caught::End(signal) => return signal,
                Caught::Other(signal) if signal != Signal::WINCH => return signal,
                Caught::Stop if can_stop() => stop(),
                Caught::Stop | Caught::Child | Caught::Other(_) => {}
            }
        }
    }
}

/// Returns whether a shell can continue a stopped process of this group. In an orphaned group it cannot,
/// and the system ignores SIGTSTP, SIGTTIN and SIGTTOU there.
pub(crate) fn can_stop() -> bool {
    !process_tree::is_group_orphaned()
}

/// Stops this process. Returns after SIGCONT.
pub(crate) fn stop() {
    let _ = kill_process(rustix::process::getpid(), Signal::STOP);
}

/// Returns the signals that were ignored when this process started (`nohup` ignores SIGHUP), as a mask: bit
/// `n - 1` for signal `n`. They stay ignored, so that CMD inherits this. Without `/proc` the mask is empty.
fn ignored_mask() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| {
        let mask = line.strip_prefix("SigIgn:")?;
        u64::from_str_radix(mask.trim(), 16).ok()
    });
    mask.unwrap_or_default()
}
