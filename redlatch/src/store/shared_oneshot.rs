//! A value that one task sends once to all tasks that wait for it.
//!
//! Waiters are woken in the order in which they started to wait. (`tokio::sync::watch` wakes them in random
//! order, so one seed would not always give the same simulation.)

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// Sends the value. If the sender is dropped before, the channel is closed without a value.
#[derive(Debug)]
pub(super) struct Sender<T>(Arc<Channel<T>>);

/// Receives the value. Clones receive the same one.
#[derive(Debug)]
pub(super) struct Receiver<T>(Arc<Channel<T>>);

#[derive(Debug)]
struct Channel<T> {
    state: Mutex<State<T>>,
    changed: Notify,
}

#[derive(Debug)]
enum State<T> {
    Pending,
    Ready(T),
    /// The sender was dropped.
    Closed,
}

/// Returns a sender and its first receiver.
pub(super) fn channel<T>() -> (Sender<T>, Receiver<T>) {
    let channel = Arc::new(Channel {
        state: Mutex::new(State::Pending),
        changed: Notify::new(),
    });
    (Sender(channel.clone()), Receiver(channel))
}

impl<T> Channel<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, to: State<T>) {
        let mut state = self.lock();
        if matches!(*state, State::Pending) {
            *state = to;
            drop(state);
            self.changed.notify_waiters();
        }
    }
}

impl<T> Sender<T> {
    pub(super) fn send(self, value: T) {
        self.0.set(State::Ready(value));
    }

    /// Returns another receiver.
    pub(super) fn subscribe(&self) -> Receiver<T> {
        Receiver(self.0.clone())
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        self.0.set(State::Closed);
    }
}

impl<T> Clone for Receiver<T> {
    fn clone(&self) -> Receiver<T> {
        Receiver(self.0.clone())
    }
}

impl<T: Clone> Receiver<T> {
    /// Returns whether the value may still be sent.
    pub(super) fn is_pending(&self) -> bool {
        matches!(*self.0.lock(), State::Pending)
    }

    /// Waits for the value; `None` if the sender was dropped. Cancel-safe.
    pub(super) async fn recv(&self) -> Option<T> {
        loop {
            let mut changed = std::pin::pin!(self.0.changed.notified());
            changed.as_mut().enable();
            match &*self.0.lock() {
                State::Pending => {}
                State::Ready(value) => return Some(value.clone()),
                State::Closed => return None,
            }
            changed.await;
        }
    }
}
