//! Hands a hold off to a ticket, which another process may adopt. Adopting one is
//! an attempt like any other ([`Session::try_acquire`]), whose settling gives the hold back to the
//! ticket.
//!
//! 1. A ticket is an owner in the store that no client has. It is derived from the text of the
//!    ticket, so only a process that has the text can name it. (If the owner stayed, with a record
//!    of the ticket beside it, late steps of the former holder would affect the adopter.)
//! 2. [`HoldRef::move_to_ticket`] puts the ticket in the place of the owner, in one step. Until
//!    this is answered, the hold of the ticket is in the registry.
//! 3. An adoption puts an owner of its client in the place of the ticket, in one step.
//!
//! Invariant: at no time are there two valid guards for one ticket. Each step names the owner that
//! it replaces, and an adopted ticket never becomes an owner again. What must not happen, and what
//! prevents it:
//!
//! - *Two processes adopt one ticket.* The second finds the first adopter. Mutant
//!   `adoption-ignores-owner`.
//! - *The process that made the ticket counts as holder.* Its guard is consumed. Without an answer,
//!   it is not returned, and owner and ticket are both released behind the step, on the same
//!   connection. Mutant `other-guard-valid-after-ticket`.
//! - *A ticket is adopted when its lease has ended and the same owner holds the lock again.* The
//!   store does not have the owner of the ticket, which is random and no client's.
//! - *An adoption is repeated after a lost answer.* The script finds the adopter, and extends the
//!   lease. The client's next attempt has the same owner (`Session::adopter`), and follows when the
//!   first is settled. Mutant `repeated-adoption-keeps-lease`.
//! - *A used ticket is adopted by an owner that holds the lock otherwise.* It would look like a
//!   repetition. So an adopter is a new owner.
//! - *An owner has several guards.* The guard is returned. The script refuses a writer that also
//!   reads, because a request for the read side may be granted just before.
//! - *A release of another guard behind the step reports a loss.* Without an answer, the step
//!   counts as a release. Mutant `release-behind-canceled-ticket-reports-loss`.
//! - *A former owner waits for a message that is not for it.* Its place in a fair queue ended with
//!   its hold. Its local queue is woken, as after a release, so its next request joins again.
//! - *A hold passes on that may be a ticket.* Until it is answered, the step is an unacknowledged
//!   change.
//! - *A renewal in flight.* The step takes its turn behind it. A later one finds no such owner.

use std::sync::Arc;

use tokio::time::Instant;

use super::super::settle::PendingRelease;
use super::super::{HoldRef, Session, Terms};
use super::in_store::Receiver;
use crate::error::{Error, Result};
use crate::hold::{Handoff, HandoffParams, Hold, To};
use crate::lease::Lease;
use crate::name::ObjectKeys;
use crate::owner::Owner;
use crate::store::Delivery;

impl Session {
    /// Returns the owner of an adoption of this ticket that did not succeed and is not settled yet.
    pub(crate) fn adopter(&self, object: &Arc<ObjectKeys>, ticket: &str) -> Option<Owner> {
        let holds = self.holds.lock();
        let adopts = |hold: &Hold| {
            let state = hold.state();
            let adopted = state.adopts.as_ref();
            adopted.is_some_and(|adopted| *adopted.field == *ticket)
        };
        let mut found = holds
            .iter()
            .filter(|((_, other), entry)| other == object && adopts(&entry.hold));
        found.next().map(|((owner, _), _)| *owner)
    }
}

impl HoldRef {
    /// Puts the owner of `ticket` in the place of this one, which then has no guard any more. The inner error: nothing has
    /// changed, and the guard is as valid as before. The outer one: the hold was lost, or the outcome is unknown, and
    /// dropping both references settles them.
    pub(crate) async fn move_to_ticket(
        &self,
        terms: Terms,
        ticket: HoldRef,
        lease: Lease,
    ) -> Result<Result<()>> {
        let (session, hold) = (&self.session, &self.hold);
        self.settle_sibling().await;
        let mut turn = match hold.turn().await {
            Ok(turn) => turn,
            Err(error) => return Ok(Err(error)),
        };
        hold.check_not_lost()?;
        // A refusal says nothing about earlier changes, such as a canceled re-entry.
        let snapshot = hold.snapshot();
        if !snapshot.is_settled {
            // Boxed: seldom needed.
            let settled = Box::pin(self.settle_in_turn(snapshot.latest)).await;
            turn.record_result(&settled);
            hold.check_not_lost()?;
            if let Err(error) = settled {
                return Ok(Err(error));
            }
        }
        let not_movable = |reason| Error::NotMovable {
            name: hold.object.name().to_owned(),
            reason,
        };
        if let Some(reason) = hold.state().why_not_movable(Instant::now()) {
            return Ok(Err(not_movable(reason)));
        }
        let of_ticket = ticket.hold.clone();
        let step = hold.kind.handoff(HandoffParams {
            from: hold,
            successor: &of_ticket.field,
            lease,
            to: To::Ticket,
        });
        let receiver = Receiver::begin(ticket, lease);
        let (Some(step), Some(mut receiver)) = (step, receiver) else {
            return Ok(Err(not_movable("this kind of lock cannot")));
        };
        // An attempt: until it is answered, the hold passes to no other request, and a release is sent behind it.
        let change = hold.state().ledger.begin_attempt();
        let mut refused = || {
            receiver.disarm();
            hold.state().attempt_answered(change);
        };
        // A release, too: another one of this owner, which may wait behind this, does not find it afterwards.
        let release = PendingRelease::new(hold, 0);
        let progress = &release.progress;
        // The release of the ticket, if this is not answered, follows on the same connection.
        let delivery = Delivery::acquisition(true);
        let answer = session.store.run(&step, None, delivery, progress).await;
        turn.record_result(&answer);
        let answer = match answer {
            Err(error) if release.changed_nothing(&error) => {
                release.answered();
                refused();
                return Ok(Err(error));
            }
            answer => answer?,
        };
        if answer.reply == Handoff::NotHeld {
            release.answered();
            refused();
            return Err(self.mark_not_held());
        }
        if let Some(confirmation) = answer.confirmation {
            confirmation.confirmed(progress).await?;
        }
        release.answered();
        self.remove_guard(terms);
        {
            let mut state = hold.state();
            let changes = state.ledger.latest();
            state.release_answered(changes, true);
        }
        receiver.disarm();
        session.watchdog.unwatch(hold);
        session.wake_owner(hold);
        tracing::debug!(lock = hold.object.full_name(), owner = %hold.field, ticket = %of_ticket.field,
            "became a ticket");
        Ok(Ok(()))
    }
}
