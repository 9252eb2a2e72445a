//! One of several acquired locks.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;

use super::take::Prize;
use crate::error::{Error, Result};
use crate::hold::Hold;
use crate::lease::Lease;
use crate::primitives::handle::Held;
use crate::session::{Claim, Terms};
use crate::several::all;

/// One acquired lock. Released in the background when dropped.
pub(crate) struct Share {
    held: Held,
    prize: Prize,
}

impl Share {
    pub(crate) fn new(claim: Claim, terms: Terms, prize: Prize) -> Share {
        Share {
            held: Held::new(claim, terms),
            prize,
        }
    }

    pub(crate) fn hold(&self) -> &Arc<Hold> {
        &self.held.claim.hold
    }

    pub(crate) fn lease(&self) -> Lease {
        self.held.terms.lease
    }

    pub(crate) fn claim(&self) -> &Claim {
        &self.held.claim
    }

    pub(crate) fn prize(&self) -> &Prize {
        &self.prize
    }

    /// Releases the lock: [`Held::give_back`].
    pub(crate) async fn give_back(self) -> Result<()> {
        self.held.give_back().await
    }
}

/// Releases all locks concurrently. Returns the errors, in order.
pub(crate) async fn give_back(shares: Vec<Share>) -> Vec<Error> {
    let giving = shares.into_iter().map(Share::give_back);
    let given = all(giving).await;
    given.into_iter().filter_map(Result::err).collect()
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
