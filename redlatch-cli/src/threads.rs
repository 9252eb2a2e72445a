//! Threads of the command.

use std::io;
use std::thread::{self, JoinHandle};

use nix::sys::signal::{SigSet, SigmaskHow};

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
