//! CMD and its descendant processes: starts CMD, and signals, stops, continues and ends all of
//! them. *Stop* and *continue* mean job control (SIGSTOP, SIGCONT); *end* means terminate.
//!
//! CMD always has its own process group, so that a signal also reaches its children. At a terminal
//! that group is put into the foreground, as a shell does with a job. After a stop, the shell can
//! continue only the group of `redlatch` itself. `redlatch` then checks the lock, and continues CMD
//! only if the lock is still held.

use std::collections::HashSet;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitOptions, WaitStatus, getpid, kill_current_process_group, kill_process,
    kill_process_group, test_kill_process_group,
};
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::held_lock::HeldLock;
use crate::args::run::Cmd;
use crate::process::own_processes;
use crate::process::process_tree::{self, State};
use crate::process::signals::{self, Caught, Signals};
use crate::process::terminal::Terminal;
use crate::process::wrapper::{Unblock, exec_command};
use crate::store::args::env_changes_for_cmd;

/// The pause between two checks of processes that are to end. SIGCHLD shortens it.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// How many pauses after SIGKILL [`Child::end`] waits before it gives up. Not a time: this process
/// may have been stopped since the signal was due.
const MAX_PAUSES: u32 = 20;

pub(crate) struct Child {
    /// CMD's process id, and the id of its process group.
    cmd: Pid,
    status: Option<WaitStatus>,
    /// Children that this process had before it started CMD: those of a shell that replaced itself
    /// with `redlatch` (`exec`).
    earlier_children: HashSet<Pid>,
    /// Whether orphaned descendants become children of this process.
    is_subreaper: bool,
    /// Whether the last `wait` failed with ECHILD: no child, running or ended, is left.
    no_children_left: bool,
    terminal: Option<Terminal>,
    /// Whether CMD's group was put into the foreground of the terminal.
    in_foreground: bool,
    /// Whether a signal that asks CMD to end was forwarded to it.
    end_requested: bool,
    /// Whether CMD was ended because another client has asked for the lock.
    pub(crate) ended_for_request: bool,
    /// Descendants that [`stop_all`](Child::stop_all) stopped.
    stopped_pids: HashSet<Pid>,
    /// Whether [`kill_stopped`](Child::kill_stopped) has killed the processes.
    is_killed: bool,
    /// When [`end`](Child::end) sends SIGKILL. `None` until its first call; `Some(None)` means
    /// never, because that time is beyond the range of the clock.
    kill_at: Option<Option<Instant>>,
    /// How many pauses of `end` have passed after SIGKILL.
    pauses: u32,
}

/// What happened to CMD.
pub(crate) enum ChildEvent {
    Ended(WaitStatus),
    /// Job control stopped CMD with this signal, so this process's group must stop, too.
    Stopped(Signal),
}

impl Child {
    /// Starts CMD on the calling thread. On Linux, CMD is killed when that thread ends.
    pub(crate) fn start(cmd: &Cmd, held_lock: &HeldLock, signals: &Signals) -> io::Result<Child> {
        let terminal = Terminal::open();
        let in_foreground = terminal
            .as_ref()
            .is_some_and(Terminal::starts_cmd_in_foreground);
        let mut command = exec_command(
            &cmd.command,
            in_foreground,
            Unblock::These(&signals.blocked()),
        );
        if !cmd.keep_passwords {
            for (variable, value) in env_changes_for_cmd() {
                match value {
                    Some(value) => command.env(variable, value),
                    None => command.env_remove(variable),
                };
            }
        }
        command.envs(held_lock.environment());
        command.process_group(0);
        process_tree::keep_descriptors().map_err(start_error)?;
        let earlier_children = process_tree::descendants(&HashSet::new()).map_err(start_error)?;
        let is_subreaper = process_tree::adopt_orphans();
        let process = command.spawn().map_err(start_error)?;
        let pid = i32::try_from(process.id()).ok().and_then(Pid::from_raw);
        Ok(Child {
            cmd: pid.ok_or_else(|| io::Error::other("the process id of CMD is out of range"))?,
            status: None,
            earlier_children: earlier_children.iter().map(|process| process.pid).collect(),
            is_subreaper,
            no_children_left: false,
            terminal,
            in_foreground,
            end_requested: false,
            ended_for_request: false,
            stopped_pids: HashSet::new(),
            is_killed: false,
            kill_at: None,
            pauses: 0,
        })
    }

    /// Returns what happened to CMD since the last call, if anything. Must be called after each
    /// [`Caught::Child`]. Also reaps adopted processes that have ended.
    pub(crate) fn poll_event(&mut self) -> io::Result<Option<ChildEvent>> {
        loop {
            match own_processes::wait_for_any(WaitOptions::NOHANG | WaitOptions::UNTRACED) {
                Ok(Some((pid, status))) if pid == self.cmd => match status.stopping_signal() {
                    Some(number) => {
                        let signal = Signal::from_named_raw(number).unwrap_or(Signal::STOP);
                        if self.handle_stop(signal) {
                            return Ok(Some(ChildEvent::Stopped(signal)));
                        }
                    }
                    None => {
                        self.status = Some(status);
                        return Ok(Some(ChildEvent::Ended(status)));
                    }
                },
                Ok(Some((pid, status))) => {
                    if !status.stopped() {
                        self.earlier_children.remove(&pid);
                    }
                }
                Err(Errno::INTR) => {}
                Ok(None) => return Ok(None),
                Err(Errno::CHILD) => {
                    self.no_children_left = true;
                    return match self.status {
                        Some(_) => Ok(None),
                        None => Err(Errno::CHILD.into()),
                    };
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Returns whether this process must stop because CMD has stopped. If CMD stopped because it
    /// needs the terminal, and this process is in the foreground, puts CMD into the foreground and
    /// continues it instead.
    fn handle_stop(&mut self, signal: Signal) -> bool {
        let Some(terminal) = &self.terminal else {
            return false;
        };
        let wants_terminal = matches!(signal, Signal::TTIN | Signal::TTOU);
        if wants_terminal && terminal.is_foreground() && terminal.set_foreground(self.cmd) {
            self.in_foreground = true;
            self.send(Signal::CONT);
            return false;
        }
        wants_terminal || signal == Signal::TSTP || self.in_foreground
    }

    /// Forwards a signal to CMD's group. After a signal that asks CMD to end, also continues CMD. A
    /// stop signal has no effect.
    pub(crate) fn forward(&mut self, caught: Caught) {
        match caught {
            Caught::End(signal) => {
                self.end_requested = true;
                self.send(signal);
                // A stopped CMD receives the signal only when it is continued.
                self.send(Signal::CONT);
            }
            Caught::Other(signal) => self.send(signal),
            Caught::Stop => signals::discard_stop(),
            Caught::Child => {}
        }
    }

    /// Returns whether CMD has ended, even if its end was not polled yet.
    pub(crate) fn has_ended(&mut self) -> bool {
        let _ = self.poll_event();
        self.status.is_some()
    }

    /// Returns how CMD has ended, if its end was polled.
    pub(crate) fn status(&self) -> Option<WaitStatus> {
        self.status
    }

    /// Returns whether a signal that asks CMD to end was forwarded to it.
    pub(crate) fn end_requested(&self) -> bool {
        self.end_requested
    }

    /// Sends `signal` to CMD's group. Errors are ignored: processes of another user cannot be
    /// signaled.
    fn send(&self, signal: Signal) {
        // After CMD has been reaped and its group is empty, the system may give the group's id to
        // another group. So check first that the group still has a member.
        let in_group = |process: &process_tree::Process| process.group == Some(self.cmd);
        if self.status.is_none() || !self.is_subreaper || self.descendants().iter().any(in_group) {
            let _ = kill_process_group(self.cmd, signal);
        }
    }

    /// Sends the stop signal to this process's group, the shell's job, as the terminal would have
    /// done without `redlatch`. Returns before this process stops, because it catches the signal
    /// and stops CMD first.
    pub(crate) fn stop_own_group(&self, signal: Signal) {
        let _ = kill_current_process_group(match signal {
            // SIGSTOP would stop this process immediately, without a check of the lock when it
            // continues.
            Signal::STOP => Signal::TSTP,
            signal => signal,
        });
    }

    /// Continues CMD after a stop. For the case that no shell controls this process's group:
    /// nothing else could continue CMD. A CMD that stopped because it needs the terminal (SIGTTIN,
    /// SIGTTOU) stays stopped.
    pub(crate) fn decline_stop(&self, signal: Signal) {
        if !matches!(signal, Signal::TTIN | Signal::TTOU) {
            self.send(Signal::CONT);
        }
    }

    /// Returns CMD and its descendants that have not ended, if the system lists them.
    fn descendants(&self) -> Vec<process_tree::Process> {
        process_tree::descendants(&self.earlier_children).unwrap_or_default()
    }

    /// Returns a function that counts [`descendants`](Child::descendants) without borrowing `self`.
    pub(crate) fn descendant_counter(&self) -> impl FnOnce() -> usize + use<> {
        let earlier_children = self.earlier_children.clone();
        move || process_tree::descendants(&earlier_children).map_or(0, |all| all.len())
    }

    /// Names the processes that have outlasted [`end`](Child::end): `4711 (sleep)`. `None` if all
    /// have ended.
    pub(crate) fn remaining(&mut self) -> Option<String> {
        if self.all_ended() {
            return None;
        }
        let mut named = self.descendants().into_iter().map(|process| {
            let name = process_tree::name(process.pid).unwrap_or_default();
            format!("{} ({name})", process.pid)
        });
        Some(match named.next() {
            Some(first) => named.fold(first, |list, one| format!("{list}, {one}")),
            // The system does not list processes.
            None => format!("processes of group {}", self.cmd),
        })
    }

    /// Stops all descendants. Repeats until none is running, because a running process may start
    /// others.
    pub(crate) fn stop_all(&mut self) {
        self.send(Signal::STOP);
        loop {
            let mut running = self.descendants();
            running.retain(|process| {
                process.state == State::Alive && !self.stopped_pids.contains(&process.pid)
            });
            if running.is_empty() {
                return;
            }
            for process in running {
                let _ = kill_process(process.pid, Signal::STOP);
                self.stopped_pids.insert(process.pid);
            }
        }
    }

    /// Continues the processes that [`stop_all`](Child::stop_all) has stopped. Puts CMD into the
    /// foreground if it was there and the shell has put `redlatch` there.
    pub(crate) fn continue_all(&mut self) {
        if let Some(terminal) = &self.terminal
            && self.in_foreground
        {
            self.in_foreground = terminal.is_foreground() && terminal.set_foreground(self.cmd);
        }
        self.continue_processes();
    }

    fn continue_processes(&mut self) {
        self.send(Signal::CONT);
        if !self.stopped_pids.is_empty() {
            for process in self.descendants() {
                if self.stopped_pids.contains(&process.pid) {
                    let _ = kill_process(process.pid, Signal::CONT);
                }
            }
            self.stopped_pids.clear();
        }
    }

    /// Kills the processes that [`stop_all`](Child::stop_all) has stopped, without continuing them.
    pub(crate) fn kill_stopped(&mut self) {
        self.kill();
        self.is_killed = true;
        self.kill_at = Some(Some(Instant::now()));
    }

    /// Returns whether [`kill_stopped`](Child::kill_stopped) was called.
    pub(crate) fn is_killed(&self) -> bool {
        self.is_killed
    }

    /// Returns whether a signal to CMD or to `redlatch` ended CMD. An exit code of 128 + n counts,
    /// too: with it, shells report that signal n ended their child.
    pub(crate) fn ended_by_signal(&self, status: WaitStatus) -> bool {
        self.end_requested || ending_signal(status).is_some()
    }

    /// Returns whether the children of an ended CMD received the signal that ended it: `redlatch`
    /// forwarded it to CMD's group, or a key at the terminal sent it to that group.
    pub(crate) fn children_were_signaled(&self, status: WaitStatus) -> bool {
        self.end_requested || self.ended_by_key(status).is_some()
    }

    /// Returns the signal that ended CMD if it probably came from a key at the terminal (Ctrl-C or
    /// Ctrl-\\), which signals only CMD's group.
    fn ended_by_key(&self, status: WaitStatus) -> Option<Signal> {
        let signal = ending_signal(status).and_then(Signal::from_named_raw)?;
        let may_be_key = self.in_foreground && !self.end_requested;
        (may_be_key && matches!(signal, Signal::INT | Signal::QUIT)).then_some(signal)
    }

    /// Waits until no descendant is left. With `send_term`, sends them SIGTERM first. Sends SIGKILL
    /// to those that are left after `kill_after`, counted from the first call.
    ///
    /// A process in an uninterruptible system call, or of another user, may outlast SIGKILL: with
    /// `waits_for_all` this waits for it, otherwise it returns after [`MAX_PAUSES`]. Cancel safe.
    pub(crate) async fn end(
        &mut self,
        send_term: bool,
        waits_for_all: bool,
        kill_after: Duration,
        signals: &mut Signals,
    ) {
        let kill_at = *self
            .kill_at
            .get_or_insert_with(|| Instant::now().checked_add(kill_after));
        let mut terminated = HashSet::new();
        if send_term {
            self.send(Signal::TERM);
            for &pid in &self.stopped_pids {
                let _ = kill_process(pid, Signal::TERM);
                terminated.insert(pid);
            }
            // A stopped process must continue before it can end.
            self.continue_processes();
        }
        let mut pause = interval(POLL_INTERVAL);
        pause.set_missed_tick_behavior(MissedTickBehavior::Delay);
        pause.reset();
        while !self.all_ended() {
            let kills = kill_at.is_some_and(|at| at <= Instant::now());
            if kills {
                self.kill();
            } else if send_term {
                self.terminate_orphans(&mut terminated);
            }
            tokio::select! {
                _ = pause.tick() => {
                    self.pauses += u32::from(kills);
                    if self.pauses >= MAX_PAUSES && !waits_for_all {
                        return;
                    }
                }
                caught = signals.next() => self.forward(caught),
            }
        }
    }

    /// Sends SIGTERM to orphans outside CMD's group, once to each of them, and adds them to
    /// `terminated`. A process with a live parent is left to that parent, which may be another
    /// `redlatch` or a shell.
    fn terminate_orphans(&self, terminated: &mut HashSet<Pid>) {
        for process in self.descendants() {
            let orphan = process.parent == Some(getpid()) && process.group != Some(self.cmd);
            if orphan && terminated.insert(process.pid) {
                let _ = kill_process(process.pid, Signal::TERM);
                let _ = kill_process(process.pid, Signal::CONT);
            }
        }
    }

    fn kill(&self) {
        self.send(Signal::KILL);
        for process in self.descendants() {
            let _ = kill_process(process.pid, Signal::KILL);
        }
    }

    /// Returns whether CMD and all of its descendants have ended.
    fn all_ended(&mut self) -> bool {
        while let Ok(Some(_)) = self.poll_event() {}
        match self.is_subreaper {
            // `wait` sees every descendant: an orphan becomes a child of this process at the moment
            // its parent ends.
            true if self.earlier_children.is_empty() && own_processes::groups().is_empty() => {
                self.no_children_left
            }
            true => {
                let left = process_tree::descendants(&self.earlier_children);
                self.status.is_some() && left.is_ok_and(|left| left.is_empty())
            }
            false => self.status.is_some() && test_kill_process_group(self.cmd).is_err(),
        }
    }

    /// If a key (Ctrl-C, Ctrl-\\) ended CMD, sends its signal to this process's group, too, as the
    /// terminal would have done.
    pub(crate) fn resend_key_signal(&self) {
        if let Some(signal) = self.status.and_then(|status| self.ended_by_key(status)) {
            let _ = kill_current_process_group(signal);
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if let Some(terminal) = &self.terminal
            && self.in_foreground
        {
            terminal.restore_foreground(self.cmd);
        }
    }
}

/// Returns the signal that ended CMD or, if CMD exited with 128 + n, the signal n that ended a
/// child of CMD.
fn ending_signal(status: WaitStatus) -> Option<i32> {
    let number = match status.exit_status() {
        Some(code) => code - 128,
        None => status.terminating_signal()?,
    };
    (1..=64).contains(&number).then_some(number)
}

/// Adds the cause to the error of a process that could not be started.
fn start_error(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::NotFound if cfg!(target_os = "linux") => io::Error::other(format!(
            "redlatch executes itself as /proc/self/exe: {error}; is /proc mounted?"
        )),
        _ => error,
    }
}
