//! A writer that also reads: what the write sides of the read-write lock and of the fair one have in common.
//!
//! The store lets the owner that writes also read, without waiting. So if it refuses the read side, the write hold is lost, and the
//! request fails instead of waiting.

use std::sync::Arc;

use super::{Acquire, Guard, Lock, OwnedKind};
use crate::error::{Error, Loss, Result};
use crate::hold::{AcquireParams, Hold, PeriodId};
use crate::session::Session;
use crate::step::{Outcome, Step};

/// The write side of a read-write lock, or of a fair one. The guard of a writer can also read.
#[expect(private_bounds, reason = "sealed: only this crate implements it")]
pub trait WriteSide: OwnedKind + ToReadSide<<Self as WriteSide>::Read> {
    /// The read side of the same lock.
    type Read: OwnedKind;
}

/// Returns the other side of the same lock, for the owner of a write hold.
pub(crate) trait ToReadSide<R> {
    fn read_side(&self, required: RequiredWriteHold) -> R;
}

/// The write hold that lets its owner also read. If it is lost, the request fails instead of waiting.
#[derive(Clone)]
pub(crate) struct RequiredWriteHold {
    session: Arc<Session>,
    write_hold: Arc<Hold>,
    granted_in: PeriodId,
    /// The loss that was known before the request.
    lost: Option<Loss>,
}

impl std::fmt::Debug for RequiredWriteHold {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RequiredWriteHold").finish_non_exhaustive()
    }
}

impl RequiredWriteHold {
    /// Returns the write hold on which an acquisition of the read side relies. An owner that already reads keeps that hold,
    /// even if its write hold is lost now. The caller may have named another owner, which has no write hold.
    pub(crate) fn of<'a>(
        required: Option<&'a RequiredWriteHold>,
        params: AcquireParams<'_>,
    ) -> Option<&'a RequiredWriteHold> {
        required.filter(|it| params.count == 1 && it.write_hold.owner == params.hold.owner)
    }

    /// Adds the check of its outcome to the step of such an acquisition.
    pub(crate) fn checked<'a>(
        required: Option<&'a RequiredWriteHold>,
        step: Step<'a, Outcome>,
    ) -> Step<'a, Outcome> {
        match required {
            None => step,
            Some(required) => step.map(move |outcome| required.checked_outcome(outcome)),
        }
    }

    /// Returns an error if the write hold was lost before the request.
    pub(crate) fn check(&self) -> Result<()> {
        match self.lost {
            Some(loss) => Err(self.write_hold.lost_error(loss)),
            None => Ok(()),
        }
    }

    /// Returns the outcome of an acquisition of the read side that relies on this write hold, which may turn
    /// out to be lost.
    fn checked_outcome(&self, outcome: Outcome) -> Result<Outcome> {
        if let Outcome::Wait(_) = outcome {
            // No other owner can block a writer, so it does not hold the write side any more. This is not the turn of the
            // write hold: a step that is in flight may have made a ticket of it. Then the watchdog checks it behind that step.
            match self.write_hold.try_turn() {
                Some(_turn) if self.write_hold.state().period.granted_in == self.granted_in => {
                    if self.write_hold.mark_lost(Loss::NotHeld) {
                        self.session.watchdog.report_missing(&self.write_hold);
                    }
                }
                _ => self.session.watchdog.suspect(&self.write_hold),
            }
        }
        match (self.write_hold.loss(), outcome) {
            (Some(_), _) | (None, Outcome::Wait(_)) => Err(self.write_hold.not_held_error()),
            (None, done) => Ok(done),
        }
    }
}

impl<K: WriteSide> Guard<Lock<K>> {
    /// Acquires the read side as well, for the same owner, without waiting, because no other owner
    /// can block it. Both sides are then held and may be released in any order.
    ///
    /// [`Error::Lost`], immediately, if the write side was lost: either already known here, or
    /// detected because the store reports another holder.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// let lock = client.read_write_lock("a");
    /// let writer = lock.write().lock().await?;
    /// let reader = writer.reenter_read().await?;
    /// writer.unlock().await?;
    /// assert!(lock.read().is_held_by(reader.owner()).await?);
    /// # reader.unlock().await }
    /// ```
    pub fn reenter_read(&self) -> Acquire<Lock<K::Read>> {
        let reading = self.read_side().lock().continuing(self.hold_ref().clone());
        reading.limited_as(&self.hold_ref().hold)
    }

    /// Releases the write side and keeps reading, with no other writer in between. Other owners may
    /// then read, too. A fixed lease starts anew.
    ///
    /// If the write side was re-entered, this releases only this guard; the others continue to exclude
    /// other owners.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`]: the write side was no longer held, so other owners may have written
    /// meanwhile. The error of the store, if it did not answer or refused the read side. In all cases this
    /// guard no longer holds either side; what the store still has of it is released in the background.
    /// Other guards of the owner are not affected. A release of the
    /// write side that the store does not answer is not an error: it continues in the background.
    ///
    /// # Cancel safety
    ///
    /// When dropped, both sides are released in the background.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// let lock = client.read_write_lock("a");
    /// let writer = lock.write().lock().await?;
    /// let reader = writer.downgrade().await?;
    /// assert!(!lock.write().is_locked().await?);
    /// assert!(lock.read().is_locked().await?);
    /// # reader.unlock().await }
    /// ```
    pub async fn downgrade(self) -> Result<Guard<Lock<K::Read>>> {
        let hold = self.hold_ref().hold.clone();
        if let Some(loss) = hold.loss() {
            return Err(hold.lost_error(loss));
        }
        let reading = self.read_side().try_lock();
        let mut reading = reading
            .continuing(self.hold_ref().clone())
            .limited_as(&hold);
        if !self.terms().renewed {
            reading = reading.lease(self.terms().lease.duration());
        }
        // The writer can always read. If another owner blocks it, the write hold is lost.
        let Some(reader) = reading.await? else {
            return Err(hold.not_held_error());
        };
        match self.unlock().await {
            Err(lost @ Error::Lost { .. }) => Err(lost),
            _ => Ok(reader),
        }
    }

    /// Returns the other side of the same lock, for the owner of this hold.
    ///
    /// The feared interleaving: the store answers that another owner writes, so this hold is lost, and
    /// the guard passes the hold on to a local waiter. So that answer concerns the write hold.
    fn read_side(&self) -> Lock<K::Read> {
        let (write, write_hold) = (self.handle(), self.hold_ref().hold.clone());
        let granted_in = write_hold.state().period.granted_in;
        let required = RequiredWriteHold {
            session: write.session.clone(),
            granted_in,
            lost: write_hold.loss(),
            write_hold,
        };
        Lock::from_kind(write.session, write.kind.read_side(required))
    }
}
