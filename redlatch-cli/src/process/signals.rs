//! Signals that `redlatch` receives while it waits for the lock, or while the command (CMD) runs
//! under the lock.
//!
//! 1. [`Signals`] blocks the signals that it catches, for this thread and for those that it starts.
//!    A thread takes one from the system when this process waits for the next one. The others stay
//!    pending there. On Linux, a stop signal stays pending until [`stop`] lets it take effect, so
//!    that SIGCONT discards it until then.
//! 2. A blocked signal is received even if it is ignored. So signals that were ignored when this
//!    process started stay ignored, and CMD inherits that. Before [`exec`](crate::run::exec)
//!    becomes CMD, it unblocks the signals that this module has blocked.
//! 3. A thread whose SIGTTOU is blocked writes to its terminal also from the background.
//!
//! No signal that can be caught may end or stop `redlatch` without CMD. Otherwise CMD would
//! continue after the lease expires, at the same time as the next holder.

use std::io;
use std::sync::{Arc, mpsc as blocking};

use nix::sys::signal::{SigSet, SigmaskHow, Signal as Named};
#[cfg(target_os = "linux")]
use nix::sys::signalfd::{SfdFlags, SignalFd};
#[cfg(target_os = "linux")]
use rustix::event::{PollFd, PollFlags, poll};
#[cfg(target_os = "linux")]
use rustix::io::retry_on_intr;
use rustix::process::{Signal, getpid, kill_process};
use signal_hook::flag;
use tokio::sync::mpsc;

use super::{own_processes, process_tree};
use crate::exit::{self, Failure};
use crate::threads::spawn_without_signals;

/// Signals that ask a program to end.
const ENDING: [Named; 4] = [Named::SIGINT, Named::SIGTERM, Named::SIGQUIT, Named::SIGHUP];

/// Signals that are caught even if they were ignored when this process started. A shell without job
/// control starts background commands with SIGINT and SIGQUIT ignored, but `redlatch` must still
/// obey these and SIGTERM. SIGCHLD reports that CMD has ended.
const ALWAYS_CAUGHT: [Named; 4] = [
    Named::SIGINT,
    Named::SIGQUIT,
    Named::SIGTERM,
    Named::SIGCHLD,
];

/// Job-control signals that stop a program.
const STOPPING: [Named; 3] = [Named::SIGTSTP, Named::SIGTTIN, Named::SIGTTOU];

/// Signals that `redlatch` does not catch while CMD runs: two cannot be caught, four report faults
/// of `redlatch` itself, and the others do not end a program.
const NOT_CAUGHT: [Named; 9] = [
    Named::SIGKILL,
    Named::SIGSTOP,
    Named::SIGSEGV,
    Named::SIGBUS,
    Named::SIGILL,
    Named::SIGFPE,
    Named::SIGCONT,
    Named::SIGPIPE,
    Named::SIGURG,
];

/// The real-time signals. They end a program that does not handle them, and have no names, so they
/// are only discarded.
#[cfg(target_os = "linux")]
const REAL_TIME: std::ops::RangeInclusive<i32> = 34..=64;
#[cfg(not(target_os = "linux"))]
const REAL_TIME: std::ops::RangeInclusive<i32> = 1..=0;

/// Receives signals that would otherwise affect this process.
pub(crate) struct Signals {
    /// Makes the thread take one signal from the system.
    requests: blocking::Sender<()>,
    is_requested: bool,
    caught: mpsc::UnboundedReceiver<Caught>,
    /// The signals that were blocked for this.
    blocked: SigSet,
}

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

impl Caught {
    fn new(named: Named) -> Option<Caught> {
        Some(match Signal::from_named_raw(named as i32)? {
            Signal::CHILD => Caught::Child,
            signal if ENDING.contains(&named) => Caught::End(signal),
            _ if STOPPING.contains(&named) => Caught::Stop,
            signal => Caught::Other(signal),
        })
    }
}

impl Signals {
    /// Catches the signals that ask a program to end.
    pub(crate) fn catch_ending() -> Result<Signals, Failure> {
        Signals::catch(ENDING.into_iter(), &[])
    }

    /// Catches the signals that ask a program to end, and those that stop and continue a job: the
    /// terminal is restored in between.
    pub(crate) fn catch_for_terminal() -> Result<Signals, Failure> {
        let all = ENDING.into_iter().chain([Named::SIGTSTP, Named::SIGCONT]);
        // A second signal ends a process that cannot react to the first one, because it is stuck in
        // writing to a terminal.
        Signals::catch(all, &[Named::SIGTERM, Named::SIGHUP])
    }

    /// Catches every signal that would end or stop this process without CMD, and SIGCHLD.
    pub(crate) fn catch_all() -> Result<Signals, Failure> {
        let ignored = ignored_mask();
        let is_ignored = |number: &i32| ignored & (1 << (number - 1)) != 0;
        for number in REAL_TIME.filter(|number| !is_ignored(number)) {
            // Fails for signals that the C library reserves.
            let _ = flag::register(number, Arc::default());
        }
        own_processes::handle_sigchld().map_err(failure)?;
        let all = Named::iterator().filter(|named| !NOT_CAUGHT.contains(named));
        Signals::catch(all, &[])
    }

    /// Catches none.
    #[cfg(test)]
    pub(crate) fn none() -> Signals {
        Signals {
            requests: blocking::channel().0,
            is_requested: false,
            caught: mpsc::unbounded_channel().1,
            blocked: SigSet::empty(),
        }
    }

    /// Catches these signals. After the first one that asks the program to end, each of `once` has
    /// its default effect.
    fn catch(
        signals: impl Iterator<Item = Named>,
        once: &'static [Named],
    ) -> Result<Signals, Failure> {
        let ignored = ignored_mask();
        let is_wanted = |named: &Named| {
            let is_ignored = ignored & (1 << (*named as i32 - 1)) != 0;
            Caught::new(*named).is_some() && (!is_ignored || ALWAYS_CAUGHT.contains(named))
        };
        let wanted: SigSet = signals.filter(is_wanted).collect();
        let original = wanted.thread_swap_mask(SigmaskHow::SIG_BLOCK);
        let original = original.map_err(|errno| failure(errno.into()))?;
        let is_new = |named: &Named| !original.contains(*named);
        let blocked = wanted.iter().filter(is_new).collect();
        let (requests, requested) = blocking::channel();
        let (sender, caught) = mpsc::unbounded_channel();
        let pending = Pending::new(wanted).map_err(failure)?;
        let take = move || {
            // With `once`, they are taken although this process cannot react to the earlier ones.
            while !once.is_empty() || requested.recv().is_ok() {
                let next = match once {
                    [] => pending.next(),
                    _ => wanted.wait().map_err(io::Error::from),
                };
                let Ok(named) = next else { return };
                if ENDING.contains(&named) {
                    let _ = SigSet::from_iter(once.iter().copied()).thread_unblock();
                }
                if Caught::new(named).is_some_and(|caught| sender.send(caught).is_err()) {
                    return;
                }
            }
        };
        spawn_without_signals("signals", take).map_err(failure)?;
        Ok(Signals {
            requests,
            is_requested: false,
            caught,
            blocked,
        })
    }

    /// Lets a signal be taken from the system before the next call of [`next`](Signals::next).
    pub(crate) fn request(&mut self) {
        self.is_requested = self.is_requested || self.requests.send(()).is_ok();
    }

    /// Waits for the next signal. Cancel safe.
    pub(crate) async fn next(&mut self) -> Caught {
        self.request();
        match self.caught.recv().await {
            Some(caught) => {
                self.is_requested = false;
                caught
            }
            // The thread ends only with the process.
            None => std::future::pending().await,
        }
    }

    /// Waits for the next signal that would end a process without handlers, and returns the exit
    /// code that reports it. When a signal asks this process to stop, stops it and waits on. Cancel
    /// safe.
    pub(crate) async fn next_end(&mut self) -> u8 {
        loop {
            match self.next().await {
                Caught::Other(Signal::WINCH) | Caught::Child => {}
                Caught::End(signal) | Caught::Other(signal) => {
                    return exit::by_signal(signal.as_raw());
                }
                Caught::Stop if can_stop() => stop(),
                Caught::Stop => discard_stop(),
            }
        }
    }

    /// Returns the numbers of the signals that were blocked to catch them, and that CMD has to
    /// unblock.
    pub(crate) fn blocked(&self) -> Vec<i32> {
        self.blocked.iter().map(|named| named as i32).collect()
    }
}

/// Unblocks the signals that ask a program to end, for a command that catches none. Its parent may
/// have blocked them.
pub(crate) fn unblock_ending() {
    let _ = SigSet::from_iter(ENDING).thread_unblock();
}

/// Unblocks all signals for this thread.
pub(crate) fn unblock_all() -> io::Result<()> {
    Ok(SigSet::empty().thread_set_mask()?)
}

/// Unblocks signals, given by their numbers, for this thread.
pub(crate) fn unblock(numbers: &[i32]) -> io::Result<()> {
    let named = numbers.iter().map(|&number| Named::try_from(number));
    Ok(named.collect::<nix::Result<SigSet>>()?.thread_unblock()?)
}

/// Discards the blocked signals of keys at the terminal.
pub(crate) fn discard_keys() -> io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        let keys = SigSet::from_iter([Named::SIGINT, Named::SIGQUIT]);
        let pending = SignalFd::with_flags(&keys, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
        while pending.read_signal()?.is_some() {}
    }
    Ok(())
}

/// Returns whether a shell can continue a stopped process of this group. In an orphaned group it
/// cannot, and the system ignores SIGTSTP, SIGTTIN and SIGTTOU there.
pub(crate) fn can_stop() -> bool {
    !process_tree::is_group_orphaned()
}

/// Stops this process, if it has caught a stop signal with [`Signals::next`] that SIGCONT has not
/// discarded since. Returns after SIGCONT.
pub(crate) fn stop() {
    if cfg!(not(target_os = "linux")) {
        return stop_now();
    }
    if let Ok(mask) = SigSet::from_iter(STOPPING).thread_swap_mask(SigmaskHow::SIG_UNBLOCK) {
        // The system has stopped this thread in the call above.
        let _ = mask.thread_set_mask();
    }
}

/// Stops this process without regard to earlier signals. Returns after SIGCONT.
pub(crate) fn stop_now() {
    let _ = kill_process(getpid(), Signal::STOP);
}

/// Discards a stop signal that was caught and shall have no effect.
pub(crate) fn discard_stop() {
    let _ = kill_process(getpid(), Signal::CONT);
}

/// Blocked signals that have arrived.
#[cfg(target_os = "linux")]
struct Pending {
    any: SignalFd,
    without_stops: SignalFd,
}

#[cfg(target_os = "linux")]
impl Pending {
    fn new(wanted: SigSet) -> io::Result<Pending> {
        let is_stop = |named: &Named| STOPPING.contains(named);
        let without_stops: SigSet = wanted.iter().filter(|named| !is_stop(named)).collect();
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        Ok(Pending {
            any: SignalFd::with_flags(&wanted, flags)?,
            without_stops: SignalFd::with_flags(&without_stops, flags)?,
        })
    }

    /// Waits for a signal and takes it from the system. A stop signal, returned as SIGTSTP, stays
    /// there.
    fn next(&self) -> io::Result<Named> {
        retry_on_intr(|| poll(&mut [PollFd::new(&self.any, PollFlags::IN)], None))?;
        match self.without_stops.read_signal()? {
            Some(taken) => Ok(Named::try_from(taken.ssi_signo.cast_signed())?),
            None => Ok(Named::SIGTSTP),
        }
    }
}

/// Elsewhere a stop signal is taken, too. A SIGCONT just after that is lost.
#[cfg(not(target_os = "linux"))]
struct Pending(SigSet);

#[cfg(not(target_os = "linux"))]
impl Pending {
    fn new(wanted: SigSet) -> io::Result<Pending> {
        Ok(Pending(wanted))
    }

    fn next(&self) -> io::Result<Named> {
        Ok(self.0.wait()?)
    }
}

fn failure(error: io::Error) -> Failure {
    Failure::system("cannot watch for signals", &error)
}

/// Returns the signals that were ignored when this process started (`nohup` ignores SIGHUP), as a
/// mask: bit `n - 1` for signal `n`. They stay ignored, so that CMD inherits this. Without `/proc`
/// the mask is empty.
fn ignored_mask() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| {
        let mask = line.strip_prefix("SigIgn:")?;
        u64::from_str_radix(mask.trim(), 16).ok()
    });
    mask.unwrap_or_default()
}
