//! A value that one task sends once to all tasks that wait for it.
//!
//! Waiters are woken in the order in which they started to wait. (`tokio::sync::watch` wakes them in random
//! order, so one seed would not always give the same simulation.)

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// Sends the value. If it is dropped before, there is none.
#[derive(Debug)]
pub(super) struct Teller<T>(Arc<Told<T>>);

/// Receives the value. Clones receive the same one.
#[derive(Debug)]
pub(super) struct Listener<T>(Arc<Told<T>>);

#[derive(Debug)]
struct Told<T> {
    state: Mutex<State<T>>,
    changed: Notify,
}

#[derive(Debug)]
enum State<T> {
    Untold,
    Told(T),
    /// The sender was dropped.
    Never,
}

/// Returns a sender and its first receiver.
pub(super) fn channel<T>() -> (Teller<T>, Listener<T>) {
    let told = Arc::new(Told {
        state: Mutex::new(State::Untold),
        changed: Notify::new(),
    });
    (Teller(told.clone()), Listener(told))
}

impl<T> Told<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, to: State<T>) {
        let mut state = self.lock();
        if matches!(*state, State::Untold) {
            *state = to;
            drop(state);
            self.changed.notify_waiters();
        }
    }
}

impl<T> Teller<T> {
    pub(super) fn tell(self, value: T) {
        self.0.set(State::Told(value));
    }

    /// Returns another receiver.
    pub(super) fn listener(&self) -> Listener<T> {
        Listener(self.0.clone())
    }
}

impl<T> Drop for Teller<T> {
    fn drop(&mut self) {
        self.0.set(State::Never);
    }
}

impl<T> Clone for Listener<T> {
    fn clone(&self) -> Listener<T> {
        Listener(self.0.clone())
    }
}

impl<T: Clone> Listener<T> {
    /// Returns whether the value may still be sent.
    pub(super) fn is_open(&self) -> bool {
        matches!(*self.0.lock(), State::Untold)
    }

    /// Waits for the value; `None` if the sender was dropped. Cancel-safe.
    pub(super) async fn heard(&self) -> Option<T> {
        loop {
            let mut changed = std::pin::pin!(self.0.changed.notified());
            changed.as_mut().enable();
            match &*self.0.lock() {
                State::Untold => {}
                State::Told(value) => return Some(value.clone()),
                State::Never => return None,
            }
            changed.await;
        }
    }
}
