//! The task that watches a deployment for changes. It lives as long as its runtime; the next connection
//! starts another one.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::task::AbortHandle;

use crate::environment::task;

/// Time that the other nodes still get once enough nodes have answered.
pub(super) const STRAGGLER_LIMIT: Duration = Duration::from_millis(100);

/// Shortest time between two checks.
pub(super) const MIN_REFRESH_INTERVAL: Duration = Duration::from_millis(50);

#[derive(Default)]
pub(super) struct RefreshTask(Mutex<Option<AbortHandle>>);

impl RefreshTask {
    /// Starts the task unless it is running. The task ends when `self` is dropped.
    pub(super) fn ensure_running<F: Future<Output = ()> + Send + 'static>(
        &self,
        refresh: impl FnOnce() -> F,
    ) {
        let mut running = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if running.as_ref().is_none_or(AbortHandle::is_finished) {
            *running = Some(tokio::spawn(task(refresh())).abort_handle());
        }
    }
}

impl Drop for RefreshTask {
    fn drop(&mut self) {
        let task = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(task) = task.take() {
            task.abort();
        }
    }
}
