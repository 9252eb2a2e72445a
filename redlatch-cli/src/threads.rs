//! Threads of the command, and the runtime of each.

use std::io;
use std::os::unix::net::UnixStream;
use std::thread::{self, JoinHandle};

use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;

use crate::exit::Failure;

/// Starts a thread to which the system delivers no signals. A signal goes to any thread that does
/// not block it, and those that were started before
/// [`Signals`](crate::process::signals::Signals) would not.
pub(crate) fn spawn_without_signals<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let mask = SigSet::all().thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
    let spawned = thread::Builder::new().name(name.to_owned()).spawn(work);
    mask.thread_set_mask()?;
    spawned
}

/// Runs work that may wait for another program in a thread of its own, so that this one receives
/// signals meanwhile. Unlike the threads of tokio, one that cannot be started is no panic. If the
/// work reads a terminal in the background, the system stops this process until `fg`, as it stops
/// other programs. While SIGTTIN is blocked, the read would fail.
pub(crate) async fn run_in_thread<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    let (done, result) = oneshot::channel();
    spawn_without_signals(name, move || {
        let _ = SigSet::from_iter([Signal::SIGTTIN]).thread_unblock();
        let _ = done.send(work());
    })?;
    result.await.map_err(io::Error::other)
}

/// Starts a runtime for one thread. Without descriptors for its handling of signals, which other crates of
/// the workspace enable, tokio panics. So those of a runtime are tried first: six.
pub(crate) fn runtime() -> Result<Runtime, Failure> {
    let tried: io::Result<Vec<_>> = (0..3).map(|_| UnixStream::pair()).collect();
    tried
        .map(drop)
        .and_then(|()| Builder::new_current_thread().enable_all().build())
        .map_err(|error| Failure::system("cannot start the tokio runtime", &error))
}
