//! What the client needs from its environment: random numbers, owner numbers, tasks and its process. (Connections are
//! made in `store::redis::connector`.) It is in one file so that a simulation can provide all of it.

use std::cell::Cell;

use tokio::runtime::{Handle, Id};

use crate::error::{Error, Result};
use crate::join::Boxed;
#[cfg(feature = "simulation")]
use crate::simulation;

/// Returns a random number of 122 bits (a version 4 UUID).
pub(crate) fn random() -> uuid::Uuid {
    #[cfg(feature = "simulation")]
    if let Some(process) = simulation::current() {
        return uuid::Builder::from_random_bytes(process.random().to_be_bytes()).into_uuid();
    }
    uuid::Uuid::new_v4()
}

/// Returns the number of the next owner if a simulated process assigns it.
pub(crate) fn simulated_owner_number() -> Option<u64> {
    #[cfg(feature = "simulation")]
    return simulation::current().map(|process| process.owner_number());
    #[cfg(not(feature = "simulation"))]
    None
}

/// Returns a random number below `end` in a simulated process.
pub(crate) fn simulated_number(end: usize) -> Option<usize> {
    #[cfg(feature = "simulation")]
    return simulation::current().map(|process| (process.random() % end as u128) as usize);
    #[cfg(not(feature = "simulation"))]
    {
        let _ = end;
        None
    }
}

thread_local! {
    /// The runtime in which this thread has asked for the id of its process, and that id.
    static PROCESS: Cell<Option<(Id, u32)>> = const { Cell::new(None) };
}

/// Returns the id of this process, as far as the thread knows. Each acquisition needs it, and the system takes longer for it
/// than a lock that passes on in the client. So a thread asks once in each runtime. A child that `fork` creates may go on with
/// the runtime of its parent: what begins something new asks again.
pub(crate) fn known_process_id() -> u32 {
    let known = PROCESS.try_with(Cell::get).ok().flatten();
    match (known, Handle::try_current()) {
        (Some((known, process)), Ok(runtime)) if known == runtime.id() => process,
        _ => process_id(),
    }
}

/// Asks for the id of this process.
pub(crate) fn process_id() -> u32 {
    let process = std::process::id();
    if let Ok(runtime) = Handle::try_current() {
        // While the thread ends, nothing is kept.
        let _ = PROCESS.try_with(|known| known.set(Some((runtime.id(), process))));
    }
    process
}

/// The process that created a value. A child that `fork` creates has a copy of the value, but not the threads, and shares
/// the sockets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Creator(u32);

impl Creator {
    /// Returns the calling process.
    pub(crate) fn this_process() -> Creator {
        Creator(process_id())
    }

    /// Returns whether the calling process is the creator.
    pub(crate) fn is_here(self) -> bool {
        self == Creator(known_process_id())
    }

    /// Checks that the calling process is the creator.
    ///
    /// # Errors
    ///
    /// [`Error::NoRuntime`].
    pub(crate) fn check(self) -> Result<()> {
        self.is_here().then_some(()).ok_or(Error::NoRuntime)
    }

    /// Returns another process.
    #[cfg(all(test, feature = "blocking"))]
    pub(crate) fn other_process() -> Creator {
        Creator(std::process::id() + 1)
    }
}

impl Default for Creator {
    fn default() -> Creator {
        Creator::this_process()
    }
}

/// The process that a client runs in, for people.
pub(crate) struct ProcessInfo {
    pub(crate) host: String,
    pub(crate) pid: u32,
    pub(crate) program: String,
}

/// Returns the process that the client runs in. Unknown parts are `?`.
pub(crate) fn process_info() -> ProcessInfo {
    let unknown = || "?".to_owned();
    #[cfg(feature = "simulation")]
    if simulation::current().is_some() {
        return ProcessInfo {
            host: unknown(),
            pid: 0,
            program: unknown(),
        };
    }
    // There is no safe function for the name of the machine in the standard library.
    let read = |path| std::fs::read_to_string(path).ok();
    let host = read("/proc/sys/kernel/hostname")
        .or_else(|| std::env::var("HOSTNAME").ok())
        .or_else(|| std::env::var("COMPUTERNAME").ok());
    let program = std::env::args_os().next().map(std::path::PathBuf::from);
    let program = program.as_deref().and_then(std::path::Path::file_name);
    ProcessInfo {
        host: host.map_or_else(unknown, |host| host.trim().to_owned()),
        pid: std::process::id(),
        program: program.map_or_else(unknown, |name| name.to_string_lossy().into_owned()),
    }
}

/// Returns the id of the current task, if there is one. Simulated processes have none, because ids are numbered over all runs.
pub(crate) fn task_id() -> Option<tokio::task::Id> {
    #[cfg(feature = "simulation")]
    if simulation::current().is_some() {
        return None;
    }
    tokio::task::try_id()
}

/// Returns a random number from 0 to 1.
pub(crate) fn random_fraction() -> f64 {
    let (high, _) = random().as_u64_pair();
    // The first 32 bits: later ones contain the version.
    f64::from((high >> 32) as u32) / f64::from(u32::MAX)
}

/// Checks that connections can be made here.
///
/// # Errors
///
/// [`Error::NoRuntime`](crate::Error::NoRuntime).
pub(crate) fn check_sockets() -> Result<()> {
    #[cfg(feature = "simulation")]
    if simulation::current().is_some() {
        return Ok(());
    }
    crate::runtime::check_sockets()
}

/// Wraps the work of a task. Every task of the library is spawned with this wrapper, so that a simulated
/// process can stop its tasks. All have one type, for which tokio's code is compiled once.
pub(crate) fn task<T>(work: impl Future<Output = T> + Send + 'static) -> Boxed<'static, T> {
    #[cfg(feature = "simulation")]
    let work = simulation::Inside::new(simulation::current(), work);
    Box::pin(work)
}
