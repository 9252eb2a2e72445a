//! An answer of the store, and the confirmation of its replicas.

use std::time::Duration;

use tokio::time::Instant;

use super::nodes::ServerId;
use super::progress::Progress;
use super::shared_oneshot::Receiver;
use crate::error::{Error, Result};

/// A reply, and how it was acquired.
pub(crate) struct Answer<R> {
    pub(crate) reply: R,
    /// When the answered step was sent. Leases count from here, because the server cannot have started them
    /// earlier.
    pub(crate) sent_at: Instant,
    /// Whether the step was sent before without an answer, so that this may be the reply to a repetition.
    pub(crate) repeated: bool,
    /// For an acquisition that replicas have to confirm: resolves when they have.
    pub(crate) confirmation: Option<Confirmation>,
    pub(crate) server: ServerId,
}

/// Resolves when the replicas have confirmed an acquisition.
pub(crate) struct Confirmation {
    outcome: Receiver<WaitResult>,
    timeout: Duration,
}

/// Result of a WAIT: how many replicas were required, and how many acknowledged.
pub(super) type WaitResult = Result<(usize, usize)>;

impl Confirmation {
    /// A WAIT that gives the replicas this long was sent, or is about to be.
    pub(super) fn pending(outcome: Receiver<WaitResult>, timeout: Duration) -> Confirmation {
        Confirmation { outcome, timeout }
    }

    /// Waits until enough replicas have acknowledged. Fails if too few did, or if that cannot be
    /// determined. Until then the request has no answer: it is unknown whether it has acquired anything.
    pub(crate) async fn confirmed(self, progress: &Progress) -> Result<()> {
        progress.expect_answer();
        match self.outcome.recv().await {
            Some(Ok((needed, in_sync))) if in_sync < needed => Err(Error::NotReplicated {
                needed,
                in_sync,
                within: self.timeout,
            }),
            Some(Ok(_)) => Ok(()),
            Some(Err(error)) => Err(error),
            None => Err(Error::unavailable(
                "the connection broke before the replicas answered",
            )),
        }
    }
}
