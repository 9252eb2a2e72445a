//! Processes that `redlatch` starts for itself, also while CMD runs. They are not of CMD: they do not count as its
//! descendants, and get none of its signals. Their ends are taken from the system here, whoever waits first.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::{ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};

use rustix::io::{Errno, retry_on_intr};
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, WaitOptions, WaitStatus, kill_process_group, wait, waitid,
    waitpid,
};
use signal_hook::consts::SIGCHLD;
use signal_hook::flag;

/// Those that nobody has waited for with [`wait_for`], each with its status if [`wait_for_any`] has taken it.
static ALL: Mutex<Vec<(Pid, Option<WaitStatus>)>> = Mutex::new(Vec::new());

fn all() -> MutexGuard<'static, Vec<(Pid, Option<WaitStatus>)>> {
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts a process in a group of its own, without input. Returns its id and its output.
pub(crate) fn start(mut command: Command) -> io::Result<(Pid, ChildStdout)> {
    command.process_group(0);
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    static HANDLER: Once = Once::new();
    // If this process ignores SIGCHLD, the system takes the ends of its children itself. A handler ends that.
    HANDLER.call_once(|| drop(flag::register(SIGCHLD, Arc::default())));
    // Until it is known here, nobody may take its end.
    let mut all = all();
    let mut process = command.spawn()?;
    let pid = i32::try_from(process.id()).ok().and_then(Pid::from_raw);
    let (pid, output) = pid
        .zip(process.stdout.take())
        .ok_or_else(|| io::Error::other("a process without a valid id, or without output"))?;
    all.push((pid, None));
    Ok((pid, output))
}

/// Kills the group of a process that has not been waited for.
pub(crate) fn kill(pid: Pid) {
    // The system gives the id to no other process while its end has not been taken.
    let runs = |(one, taken): &(Pid, Option<WaitStatus>)| *one == pid && taken.is_none();
    if all().iter().any(runs) {
        let _ = kill_process_group(pid, Signal::KILL);
    }
}

/// Waits until a process has ended, and kills what is left of its group. Blocks the thread.
pub(crate) fn wait_for(pid: Pid) -> io::Result<WaitStatus> {
    // Leaves the status, which somebody may take before.
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

/// Waits for any child, like [`wait`]. Keeps the status of one that was started here, and kills what is left of its group.
pub(crate) fn wait_for_any(options: WaitOptions) -> rustix::io::Result<Option<(Pid, WaitStatus)>> {
    let mut all = all();
    let ended = wait(options)?;
    if let Some((pid, status)) = ended
        && let Some((_, taken)) = all.iter_mut().find(|(one, _)| *one == pid)
        && !status.stopped()
    {
        *taken = Some(status);
        // Its id may be that of another process from now on, but not of a group while this one has members.
        let _ = kill_process_group(pid, Signal::KILL);
    }
    Ok(ended)
}

/// Returns the ids of all that have not been waited for, which are also those of their groups.
pub(crate) fn ids() -> Vec<Pid> {
    all().iter().map(|(pid, _)| *pid).collect()
}
