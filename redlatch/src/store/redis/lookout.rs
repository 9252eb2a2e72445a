//! The task that looks out for changes in a deployment: there is one while its runtime lives, and
//! another one begins with the next connection.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::task::AbortHandle;

use crate::surroundings::task;

/// When enough of those that were asked have answered, the others are not waited for longer than this.
pub(super) const BRIEFLY: Duration = Duration::from_millis(100);

/// How much time there is between two looks at least.
pub(super) const PAUSE: Duration = Duration::from_millis(50);

#[derive(Default)]
pub(super) struct Lookout(Mutex<Option<AbortHandle>>);

impl Lookout {
    /// Begins the task unless it is there. Ends with this.
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
