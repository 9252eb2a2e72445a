//! Polling for the effects of other processes.

use std::time::{Duration, Instant};

/// Longer than any condition takes to become true, even on a busy machine.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// Polls until `check` succeeds, and returns its result. The error of `check` names the
/// missing condition.
///
/// # Panics
///
/// If it takes too long.
pub(crate) fn until<T>(what: &str, mut check: impl FnMut() -> Result<T, String>) -> T {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        match check() {
            Ok(found) => return found,
            Err(missing) if Instant::now() > deadline => {
                panic!("{what}: timed out after {TIMEOUT:?}: {missing}")
            }
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}
