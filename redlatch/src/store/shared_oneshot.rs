//! A value that one task sends once to all tasks that wait for it.
//!
//! Waiters are woken in the order in which they started to wait. (`tokio::sync::watch` wakes them in random
//! order, so one seed would not always give the same simulation.)

use std::sync::Arc;

use tokio::sync::Notify;

use crate::sync::{Mutex, wait_for};

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
    fn set(&self, to: State<T>) {
        let mut state = self.state.lock();
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
        matches!(*self.0.state.lock(), State::Pending)
    }

    /// Waits for the value; `None` if the sender was dropped. Cancel-safe.
    pub(super) async fn recv(&self) -> Option<T> {
        let value = || match &*self.0.state.lock() {
            State::Pending => None,
            State::Ready(value) => Some(Some(value.clone())),
            State::Closed => Some(None),
        };
        wait_for(&self.0.changed, value).await
    }
}
