//! The task that watches a deployment for changes. It lives as long as its runtime; the next connection
//! starts another one.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::task::AbortHandle;

use crate::surroundings::task;

/// Once enough nodes have answered, the others get only this much more time.
pub(super) const BRIEFLY: Duration = Duration::from_millis(100);

/// Shortest time between two checks.
pub(super) const PAUSE: Duration = Duration::from_millis(50);

#[derive(Default)]
pub(super) struct Lookout(Mutex<Option<AbortHandle>>);

impl Lookout {
    /// Starts the task unless it is running. It ends when this is dropped.
    pub(super) fn keep<F: Future<Output = ()> + Send + 'static>(&self, watch: impl FnOnce() -> F) {
        let mut running = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if running.as_ref().is_none_or(AbortHandle::is_finished) {
            *running = Some(tokio::spawn(task(watch())).abort_handle());
        }
    }
}

impl Drop for Lookout {
    fn drop(&mut self) {
        let task = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(task) = task.take() {
            task.abort();
        }
    }
}
