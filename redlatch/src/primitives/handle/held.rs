//! One entry into a hold, which is given back once: what is below every guard.

use crate::error::{Error, Loss, Result};
use crate::session::{Claim, Terms};

/// What was won by one acquisition. Given back in the background when dropped.
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

    /// Gives it back and returns when the store has heard of it. What fails, and what is dropped,
    /// goes on in the background.
    pub(crate) async fn give_back(mut self) -> Result<()> {
        self.leave();
        // Said at once; whether anything was left behind is looked after when this is dropped.
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

    /// Leaves what is held to its lease: from here on nobody renews it or gives it back. An error if
    /// it has been lost.
    pub(crate) fn detach(mut self) -> Result<()> {
        self.check()?;
        self.leave();
        let hold = &self.claim.hold;
        self.claim.session.watchdog.forget(hold);
        // The store keeps it on purpose: there is nothing to settle.
        hold.store_followed(hold.changes(), false);
        self.settled = true;
        Ok(())
    }

    /// An error if it has been lost.
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
