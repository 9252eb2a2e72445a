//! One entry into a hold, which is released once. Every guard is built on it.

use crate::error::{Error, Loss, Result};
use crate::session::{Claim, Terms};

/// One acquired entry. Released in the background when dropped.
pub(crate) struct Held {
    pub(crate) claim: Claim,
    pub(crate) terms: Terms,
    left: bool,
    settled: bool,
}

impl Held {
    pub(crate) fn new(claim: Claim, terms: Terms) -> Held {
        Held {
            claim,
            terms,
            left: false,
            settled: false,
        }
    }

    /// Releases the entry and waits until the store has confirmed it. If that fails or is dropped,
    /// the release continues in the background.
    pub(crate) async fn give_back(mut self) -> Result<()> {
        self.leave();
        // Reported immediately; the drop of `self` settles what the store may still keep.
        self.check()?;
        let settled = self.claim.settle().await;
        self.settled = matches!(
            settled,
            Ok(_) | Err(Error::Lost { .. } | Error::WrongKind { .. })
        );
        match settled? {
            true => Ok(()),
            false => {
                let hold = &self.claim.hold;
                self.claim.session.watchdog.found_missing(hold);
                Err(hold.lost_error(Loss::NotHeld))
            }
        }
    }

    /// Leaves the hold to its lease: it is no longer renewed and never released. Returns an error
    /// if it was lost.
    pub(crate) fn detach(mut self) -> Result<()> {
        self.check()?;
        self.leave();
        let hold = &self.claim.hold;
        self.claim.session.watchdog.forget(hold);
        // The store keeps the hold intentionally: there is nothing to settle.
        hold.store_followed(hold.changes(), false);
        self.settled = true;
        Ok(())
    }

    /// Returns an error if the hold was lost.
    fn check(&self) -> Result<()> {
        let hold = &self.claim.hold;
        hold.loss()
            .map_or(Ok(()), |loss| Err(hold.lost_error(loss)))
    }

    fn leave(&mut self) {
        if !std::mem::replace(&mut self.left, true) {
            self.claim.leave(self.terms);
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.leave();
        if !self.settled {
            self.claim.settle_in_background(self.terms.lease);
        }
    }
}
