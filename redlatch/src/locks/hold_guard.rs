//! The guard of one count of a hold, which is released once. Every public guard contains it.

use std::sync::Arc;

use tokio::time::Instant;

use crate::error::{Error, Result};
use crate::hold::{Hold, HoldLimits, NoHandoff};
use crate::lease::Lease;
use crate::metrics::GuardTimer;
use crate::session::{HoldRef, LocalHandoff, Terms};

/// One count of an acquired hold. Released in the background when dropped.
pub(crate) struct HoldGuard {
    pub(crate) hold_ref: HoldRef,
    pub(crate) terms: Terms,
    /// Whether this guard has been removed from the local hold count.
    removed: bool,
    /// Whether the store has the same count, so that there is nothing left to settle.
    settled: bool,
    timer: GuardTimer,
}

impl HoldGuard {
    pub(crate) fn new(hold_ref: HoldRef, terms: Terms) -> HoldGuard {
        HoldGuard {
            timer: hold_ref.hold.metrics.guard(),
            hold_ref,
            terms,
            removed: false,
            settled: false,
        }
    }

    pub(crate) fn hold(&self) -> &Arc<Hold> {
        &self.hold_ref.hold
    }

    /// Releases it and waits until the store has confirmed it. If that fails or is dropped,
    /// the release continues in the background.
    ///
    /// If another request of this client waits, it may get the hold instead: see [`LocalHandoff`].
    #[expect(
        clippy::manual_async_fn,
        reason = "an `async fn` stores its arguments twice"
    )]
    pub(crate) fn release(mut self) -> impl Future<Output = Result<()>> + Send {
        async move {
            // Not a function of its own: the future would be larger.
            let released = 'released: {
                let mut handed_off = self.hand_off();
                if handed_off == Err(NoHandoff::CheckFirst) {
                    // Boxed: only after long sections.
                    let (hold_ref, released_at) = (&self.hold_ref, Instant::now());
                    let offer = LocalHandoff::offer_after_check(hold_ref, self.terms, released_at);
                    handed_off = Box::pin(offer).await;
                }
                if handed_off.is_ok() {
                    (self.removed, self.settled) = (true, true);
                    break 'released Ok(());
                }
                self.remove();
                // Reported immediately; the drop of `self` settles what the store may still keep.
                if let Err(lost) = self.hold().check_not_lost() {
                    break 'released Err(lost);
                }
                let settled = self.hold_ref.settle().await;
                self.settled = settled.as_ref().err().is_none_or(Error::is_loss);
                settled.and_then(|is_held| {
                    if is_held {
                        return Ok(());
                    }
                    let hold = self.hold();
                    self.hold_ref.session.watchdog.report_missing(hold);
                    Err(hold.not_held_error())
                })
            };
            self.timer.released(&released);
            released
        }
    }

    /// Leaves the hold to its lease: it is no longer renewed and never released. Returns an error
    /// if it was lost.
    pub(crate) fn detach(mut self) -> Result<()> {
        self.hold_ref.leave_guard(self.terms)?;
        self.hold_ref.session.watchdog.unwatch(self.hold());
        (self.removed, self.settled) = (true, true);
        Ok(())
    }

    /// Moves the hold to `ticket`, with this lease. The error contains this guard if nothing has changed. If this is
    /// dropped, both are released in the background.
    pub(crate) async fn move_to_ticket(
        mut self,
        ticket: HoldRef,
        lease: Lease,
    ) -> Result<(), (Option<HoldGuard>, Error)> {
        let moving = self.hold_ref.move_to_ticket(self.terms, ticket, lease);
        match moving.await {
            Ok(Ok(())) => {
                (self.removed, self.settled) = (true, true);
                self.timer.released(&Ok(()));
                Ok(())
            }
            Ok(Err(error)) => Err((Some(self), error)),
            Err(error) => Err((None, error)),
        }
    }

    /// Starts the limits of the request for several locks that this guard is a part of. Not before, because a request that
    /// fails must not limit a hold that its owner had.
    pub(crate) fn start_limits(&self, limits: Option<&HoldLimits>) {
        if let Some(limits) = limits {
            self.hold().start_limits(limits);
            self.hold_ref.session.watchdog.watch(self.hold());
        }
    }

    /// Returns the error, if the hold was lost.
    pub(crate) fn loss(&self) -> Option<Error> {
        self.hold().check_not_lost().err()
    }

    /// Hands the hold over to a waiting request of this client, if it may be.
    fn hand_off(&self) -> Result<(), NoHandoff> {
        match self.terms.local_handoff {
            true => {
                let now = Instant::now();
                LocalHandoff::offer(&self.hold_ref, self.terms, now, now)
            }
            false => Err(NoHandoff::Release),
        }
    }

    fn remove(&mut self) {
        if !std::mem::replace(&mut self.removed, true) {
            self.hold_ref.remove_guard(self.terms);
        }
    }
}

impl Drop for HoldGuard {
    fn drop(&mut self) {
        if !self.removed {
            match self.hand_off() {
                Ok(()) => return,
                Err(NoHandoff::CheckFirst) => {
                    return LocalHandoff::offer_in_background(&self.hold_ref, self.terms);
                }
                Err(NoHandoff::Release) => self.remove(),
            }
        }
        if !self.settled {
            self.hold_ref.settle_removed_guard(self.terms);
        }
    }
}

impl std::fmt::Debug for HoldGuard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let hold = self.hold();
        f.debug_struct("HoldGuard")
            .field("name", &hold.object.name())
            .field("owner", &&*hold.field)
            .field("valid_for", &hold.valid_for())
            .finish_non_exhaustive()
    }
}
