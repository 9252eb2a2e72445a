//! A mutex without poisoning, and waiting for a condition.

use std::pin::pin;
use std::sync::{MutexGuard, PoisonError};

use tokio::sync::Notify;

/// A mutex that ignores poisoning: a panic while it is locked leaves the value usable.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(std::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Mutex<T> {
        Mutex(std::sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits until `check` returns a value. It is called at first and after each notification.
pub(crate) async fn wait_for<T>(notify: &Notify, check: impl Fn() -> Option<T>) -> T {
    loop {
        let mut notified = pin!(notify.notified());
        notified.as_mut().enable();
        if let Some(value) = check() {
            return value;
        }
        notified.await;
    }
}
