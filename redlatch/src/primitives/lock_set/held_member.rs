//! One of several held locks.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;

use super::ErasedGrant;
use crate::error::{Error, Result};
use crate::hold::Hold;
use crate::join::join_all;
use crate::lease::Lease;
use crate::primitives::lock::HoldGuard;
use crate::session::{HoldRef, Terms};

/// One held lock. Released in the background when dropped.
#[derive(Debug)]
pub(crate) struct HeldMember {
    held: HoldGuard,
    grant: ErasedGrant,
}

impl HeldMember {
    pub(crate) fn new(hold_ref: HoldRef, terms: Terms, grant: ErasedGrant) -> HeldMember {
        HeldMember {
            held: HoldGuard::new(hold_ref, terms),
            grant,
        }
    }

    pub(crate) fn hold(&self) -> &Arc<Hold> {
        &self.held.hold_ref.hold
    }

    pub(crate) fn lease(&self) -> Lease {
        self.held.terms.lease
    }

    pub(crate) fn hold_ref(&self) -> &HoldRef {
        &self.held.hold_ref
    }

    pub(crate) fn grant(&self) -> &ErasedGrant {
        &self.grant
    }

    /// Returns the error, if the lock was lost.
    pub(crate) fn loss(&self) -> Option<Error> {
        self.held.loss()
    }

    /// Releases the lock: [`HoldGuard::release`].
    pub(crate) async fn release(self) -> Result<()> {
        self.held.release().await
    }
}

/// Releases all locks concurrently. Returns the errors, in order.
pub(crate) async fn release_all(held_members: Vec<HeldMember>) -> Vec<Error> {
    let releases = held_members.into_iter().map(HeldMember::release);
    let released = join_all(releases).await;
    released.into_iter().filter_map(Result::err).collect()
}

/// Returns when one of these holds is lost.
pub(crate) async fn any_lost(holds: impl IntoIterator<Item = Arc<Hold>>) {
    let losses = holds
        .into_iter()
        .map(|hold| async move { hold.lost().await });
    let mut losses: Vec<_> = losses.map(Box::pin).collect();
    poll_fn(|cx| {
        let mut lost = losses.iter_mut().map(|loss| loss.as_mut().poll(cx));
        match lost.any(|loss| loss.is_ready()) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    })
    .await;
}
