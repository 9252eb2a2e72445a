//! Turns: limits how many attempts to acquire may be in flight to one server.
//!
//! 1. An attempt takes a turn when there is a connection to send it on. It keeps the turn until it is
//!    answered or its connection breaks.
//! 2. If the caller drops the attempt without an answer, the turn passes to the task that settles it. So
//!    however many callers come and go, at most [`ATTEMPTS`] attempts are sent to a server that does not
//!    answer, and at most as many are left to be settled. Other callers send nothing and leave nothing
//!    behind.
//! 3. While a call waits for its turn, its response timeout restarts with each answer to another attempt. A
//!    busy server that answers costs no caller its turn; at a server that answers nothing, all callers give
//!    up together.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

/// Number of attempts to acquire in flight. The others wait here and not inside the connection, where
/// renewals and releases would queue behind them.
pub(super) const ATTEMPTS: usize = 512;

/// The turns of one server.
#[derive(Debug)]
pub(crate) struct Turns {
    free: Arc<Semaphore>,
    /// Time of the latest answer to an attempt while others waited.
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

    /// Takes a turn if one is free and no other caller waits for it.
    pub(super) fn free(&self) -> Option<Turn> {
        self.free.clone().try_acquire_owned().ok()
    }

    /// Waits for a turn. Callers are served in order of arrival.
    pub(super) async fn next(&self) -> Option<Turn> {
        self.free.clone().acquire_owned().await.ok()
    }

    /// Records that the server has answered an attempt.
    pub(super) fn answered(&self) {
        if self.free.available_permits() == 0 {
            *self.lock() = Some(Instant::now());
        }
    }

    /// Returns the time of the latest answer to an attempt while others waited.
    pub(crate) fn latest_answer(&self) -> Option<Instant> {
        *self.lock()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Instant>> {
        self.answered.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
