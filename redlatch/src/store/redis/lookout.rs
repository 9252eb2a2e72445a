//! The task that looks out for changes in a deployment: there is one while its runtime lives, and
//! another one begins with the next connection.

use std::sync::{Mutex, PoisonError};

use tokio::task::AbortHandle;

#[derive(Default)]
pub(super) struct Lookout(Mutex<Option<AbortHandle>>);

impl Lookout {
    /// Begins the task unless it is there. Ends with this.
    pub(super) fn keep<F: Future<Output = ()> + Send + 'static>(&self, watch: impl FnOnce() -> F) {
        let mut task = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if task.as_ref().is_none_or(AbortHandle::is_finished) {
            *task = Some(tokio::spawn(watch()).abort_handle());
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
