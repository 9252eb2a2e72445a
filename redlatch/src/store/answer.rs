//! An answer of the store, and the confirmation of its replicas.

use std::any::Any;
use std::sync::Arc;

use tokio::time::Instant;

use super::nodes::ServerId;
use super::progress::Progress;
use super::shared_oneshot::Receiver;
use crate::error::{Error, Result};

/// A reply, and how it was acquired.
pub(crate) struct Answer<R> {
    pub(crate) reply: R,
    /// When the answered step was sent. Leases count from here, because the server cannot have
    /// started them earlier.
    pub(crate) sent_at: Instant,
    /// For an acquisition that replicas have to confirm: resolves when they have. Boxed, because
    /// every request has place for it.
    pub(crate) confirmation: Option<Box<Confirmation>>,
    pub(crate) server: ServerId,
}

/// Resolves when the replicas have confirmed an acquisition.
pub(crate) struct Confirmation {
    outcome: Receiver<Result<()>>,
    /// The node of a cluster that made the acquisition. It is known for as long as this or a clone
    /// exists.
    pub(crate) node: Option<KeptNode>,
}

/// Keeps a node of a cluster that has lost all slots, so that an acquisition can be settled there.
pub(crate) type KeptNode = Arc<dyn Any + Send + Sync>;

impl Confirmation {
    /// A WAIT with this outcome was sent, or is about to be.
    pub(super) fn pending(outcome: Receiver<Result<()>>) -> Box<Confirmation> {
        let node = None;
        Box::new(Confirmation { outcome, node })
    }

    /// Waits until enough replicas have acknowledged. Fails if too few did, or if that cannot be
    /// determined. Until then the request has no answer: it is unknown whether it has acquired
    /// anything.
    pub(crate) async fn confirmed(self: Box<Self>, progress: &Progress) -> Result<()> {
        progress.expect_answer();
        let broken = || {
            let reason = "the connection broke before the replicas answered";
            Err(Error::unavailable(reason))
        };
        self.outcome.recv().await.unwrap_or_else(broken)
    }
}
