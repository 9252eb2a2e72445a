//! Polling for the effects of other processes.

use std::time::{Duration, Instant};

/// Longer than any condition takes to become true, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Polls until `look` succeeds, and returns its result. The error of `look` names the
/// missing condition.
///
/// # Panics
///
/// If it takes too long.
pub(crate) fn until<T>(what: &str, mut look: impl FnMut() -> Result<T, String>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match look() {
            Ok(found) => return found,
            Err(missing) if Instant::now() > deadline => {
                panic!("{what}: timed out after {PATIENCE:?}: {missing}")
            }
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}
