//! Waiting for what other processes do.

use std::time::{Duration, Instant};

/// Longer than anything takes, also on a machine that is busy with other things.
const PATIENCE: Duration = Duration::from_secs(60);

/// Looks until there is what is wanted. `look` says what is still missing.
///
/// # Panics
///
/// When it takes too long.
pub(crate) fn until<T>(what: &str, mut look: impl FnMut() -> Result<T, String>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match look() {
            Ok(found) => return found,
            Err(missing) if Instant::now() > deadline => {
                panic!("{what}: not within {PATIENCE:?}: {missing}")
            }
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}
