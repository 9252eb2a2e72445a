//! Threads of the command.

use std::io;
use std::thread::{self, JoinHandle};

use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use tokio::sync::oneshot;

/// Starts a thread to which the system delivers no signals. A signal goes to any thread that does
/// not block it, and those that were started before
/// [`Signals`](crate::signals::Signals) would not.
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
