//! Limits how many attempts to acquire may be in flight to one server.
//!
//! 1. An attempt takes a permit when there is a connection to send it on. It keeps the permit until it is
//!    answered or its connection breaks.
//! 2. If the caller drops the attempt without an answer, the permit passes to the task that settles it. So
//!    however many callers start and cancel attempts, at most [`MAX_ATTEMPTS_IN_FLIGHT`] are sent to a server
//!    that does not answer, and at most as many are left to be settled. Other callers send nothing and leave
//!    nothing behind.
//! 3. While a call waits for its permit, its response timeout restarts with each answer to another attempt.
//!    So no call times out at a busy server that answers. At a server that answers nothing, all calls time
//!    out together.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use crate::sync::Mutex;

/// Limit of attempts to acquire in flight. The others wait here and not inside the connection, where
/// renewals and releases would queue behind them.
pub(super) const MAX_ATTEMPTS_IN_FLIGHT: usize = 512;

/// The permits of one server.
#[derive(Debug)]
pub(crate) struct AttemptLimiter {
    semaphore: Arc<Semaphore>,
    /// Time of the latest answer to an attempt while others waited.
    latest_answer: Mutex<Option<Instant>>,
}

/// The right to have one attempt in flight. Released when dropped.
pub(crate) type AttemptPermit = OwnedSemaphorePermit;

impl AttemptLimiter {
    pub(super) fn new() -> Arc<AttemptLimiter> {
        Arc::new(AttemptLimiter {
            semaphore: Arc::new(Semaphore::new(MAX_ATTEMPTS_IN_FLIGHT)),
            latest_answer: Mutex::default(),
        })
    }

    /// Takes a permit if one is free and no other caller waits for it.
    pub(super) fn try_acquire(&self) -> Option<AttemptPermit> {
        self.semaphore.clone().try_acquire_owned().ok()
    }

    /// Waits for a permit. Callers are served in order of arrival.
    pub(super) async fn acquire(&self) -> Option<AttemptPermit> {
        self.semaphore.clone().acquire_owned().await.ok()
    }

    /// Records that the server has answered an attempt.
    pub(super) fn record_answer(&self) {
        if self.semaphore.available_permits() == 0 {
            *self.latest_answer.lock() = Some(Instant::now());
        }
    }

    /// Returns the time of the latest answer to an attempt while others waited.
    pub(crate) fn latest_answer(&self) -> Option<Instant> {
        *self.latest_answer.lock()
    }
}
