//! Turns: how many attempts to acquire may be in flight to one server at once.
//!
//! An attempt takes a turn when there is a connection to send it on, and keeps it until it is answered or
//! its connection breaks. An attempt whose caller leaves without the answer passes its turn on to the task that
//! settles it. So however many callers come and go, a server that does not answer is sent [`ATTEMPTS`]
//! attempts and no more, and as many are left to be settled; the other callers send nothing, and leave
//! nothing behind.
//!
//! The response timeout of a call that waits for its turn counts from the latest answer to an attempt: a
//! busy server that answers costs no caller its turn, and behind a server that answers nothing all callers
//! give up together.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

/// How many attempts to acquire may be on their way at once. The rest wait here and not inside the
/// connection, where renewals and releases would have to queue behind them.
pub(super) const ATTEMPTS: usize = 512;

/// The turns of one server.
#[derive(Debug)]
pub(crate) struct Turns {
    free: Arc<Semaphore>,
    /// When an attempt was answered last, while others waited.
    answered: Mutex<Option<Instant>>,
}

/// The right to have one attempt in flight. Released when dropped.
pub(crate) type Turn = OwnedSemaphorePermit;

impl Turns {
    pub(super) fn new() -> Arc<Turns> {
        Arc::new(Turns {
            free: Arc::new(Semaphore::new(ATTEMPTS)),
            answered: Mutex::default(),
        })
    }

    /// A turn, if one is free and no other caller waits for it.
    pub(super) fn free(&self) -> Option<Turn> {
        self.free.clone().try_acquire_owned().ok()
    }

    /// Waits for a turn. Callers are served in order of arrival.
    pub(super) async fn next(&self) -> Option<Turn> {
        self.free.clone().acquire_owned().await.ok()
    }

    /// Notes that the server has answered an attempt.
    pub(super) fn answered(&self) {
        if self.free.available_permits() == 0 {
            *self.lock() = Some(Instant::now());
        }
    }

    /// When an attempt was answered last, while others waited.
    pub(crate) fn latest_answer(&self) -> Option<Instant> {
        *self.lock()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Instant>> {
        self.answered.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
