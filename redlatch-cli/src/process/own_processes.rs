//! Processes that `redlatch` starts for itself, also while CMD runs. redlatch neither counts nor
//! signals them as descendants of CMD. A thread waits for each of them ([`wait_for`]), while
//! `Child` (`run::child`) or `cron` waits for any child: as process 1 of a container, redlatch adopts
//! all orphans. The first of both reaps it, and this module keeps its status for the thread.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::{Errno, retry_on_intr};
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, WaitOptions, WaitStatus, kill_process_group, wait, waitid,
    waitpid,
};
use signal_hook::consts::SIGCHLD;
use signal_hook::flag;

/// The processes for which no [`wait_for`] has returned, each with its status if [`wait_for_any`]
/// has reaped it.
static ALL: Mutex<Vec<(Pid, Option<WaitStatus>)>> = Mutex::new(Vec::new());

fn all() -> MutexGuard<'static, Vec<(Pid, Option<WaitStatus>)>> {
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Handles SIGCHLD. While a process ignores it, the system does not report how a child has ended.
pub(crate) fn handle_sigchld() -> io::Result<()> {
    static IS_HANDLED: AtomicBool = AtomicBool::new(false);
    if !IS_HANDLED.load(Ordering::Relaxed) {
        flag::register(SIGCHLD, Arc::default())?;
        IS_HANDLED.store(true, Ordering::Relaxed);
    }
    Ok(())
}

/// Starts a process in a group of its own, without input. Returns its id and its output.
pub(crate) fn start(mut command: Command) -> io::Result<(Pid, ChildStdout)> {
    command.process_group(0);
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let (pid, process) = spawn(&mut command)?;
    let output = process.stdout;
    let output = output.ok_or_else(|| io::Error::other("a process without output"))?;
    Ok((pid, output))
}

/// Starts a process, which leads a group of its own soon. Returns its id, too.
pub(crate) fn spawn(command: &mut Command) -> io::Result<(Pid, Child)> {
    let _ = handle_sigchld();
    // `wait_for_any` must not reap it before it is in the list.
    let mut all = all();
    let process = command.spawn()?;
    let pid = i32::try_from(process.id()).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| io::Error::other("a process without a valid id"))?;
    all.push((pid, None));
    Ok((pid, process))
}

/// Kills the group of a process, unless `redlatch` has reaped that process.
pub(crate) fn kill(pid: Pid) {
    // Until then the system gives its id to no other process.
    let runs = |(one, taken): &(Pid, Option<WaitStatus>)| *one == pid && taken.is_none();
    if all().iter().any(runs) {
        let _ = kill_process_group(pid, Signal::KILL);
    }
}

/// Waits for a process, and then kills the others of its group. Blocks the thread.
pub(crate) fn wait_for(pid: Pid) -> io::Result<WaitStatus> {
    // Does not reap it, because `wait_for_any` may do so first.
    let ended = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    let waited = retry_on_intr(|| waitid(WaitId::Pid(pid), ended));
    let mut all = all();
    let at = all.iter().position(|(one, _)| *one == pid);
    let (_, taken) = all.swap_remove(at.ok_or(Errno::CHILD)?);
    if let Some(status) = taken {
        return Ok(status);
    }
    waited?;
    let _ = kill_process_group(pid, Signal::KILL);
    let ended = retry_on_intr(|| waitpid(Some(pid), WaitOptions::empty()))?;
    let (_, status) = ended.ok_or(Errno::CHILD)?;
    Ok(status)
}

/// Waits for any child, like [`wait`]. If this module has started it, keeps its status, and kills
/// the others of its group.
pub(crate) fn wait_for_any(options: WaitOptions) -> rustix::io::Result<Option<(Pid, WaitStatus)>> {
    let mut all = all();
    let ended = wait(options)?;
    if let Some((pid, status)) = ended
        && let Some((_, taken)) = all.iter_mut().find(|(one, _)| *one == pid)
        && !status.stopped()
    {
        *taken = Some(status);
        // The system may give its id to another process from now on, but not to a group while this
        // group has members.
        let _ = kill_process_group(pid, Signal::KILL);
    }
    Ok(ended)
}

/// Returns the groups of the processes for which no [`wait_for`] has returned.
pub(crate) fn groups() -> Vec<Pid> {
    all().iter().map(|(pid, _)| *pid).collect()
}
