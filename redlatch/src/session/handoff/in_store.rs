//! Puts a successor in the place of an owner in the store, with one step
//! ([`HoldKind::handoff`](crate::hold::HoldKind::handoff)), instead of a release, a message and an
//! acquisition.
//!
//! 1. A full release has a [`Successor`] if the object must not be free: the ticket that its hold has
//!    not adopted yet, or a *keeper* until the minimum time has passed. Otherwise it may claim the
//!    first waiter of the queue
//!    ([`WaitQueues::claim_first`](crate::wait::WaitQueues::claim_first)): one that cannot take a
//!    hold over [locally](super::LocalHandoff), because a caller has named one of the owners, as
//!    always in `blocking`; a lease is fixed; or each acquisition has a token.
//! 2. For a waiter, the release takes the turn of its hold, too. As often as beside local handoffs, and
//!    if the waiter's lease is shorter than the rest of the present one, the step counts the other clients that wait.
//!    If there are any, it changes nothing, and a release follows.
//! 3. The waiter is offered its hold, and adds a guard. If it does not within 10 ms, or a later step
//!    of its owner was sent, the hold is released in the background.
//! 4. Without an answer, the outcome is unknown for both holds. Each is settled by a release behind
//!    the step.
//!
//! Invariant: while the step may take effect, it is the latest step of both holds. What must not
//! happen, and what prevents it:
//!
//! - *The waiter has left, or its owner has released meanwhile.* Point 3, and the turns of both
//!   holds. Mutants `transfer-without-turn-of-waiter`, `transferred-hold-not-released`.
//! - *The step takes effect late, when its owner holds the lock again.* Without an answer, both
//!   holds have an unacknowledged change: a release behind the step, on the same connection, must
//!   be answered first. Mutant `unanswered-transfer-not-settled`.
//! - *A release waits for replicas, or overtakes an earlier handoff.* Where acquisitions wait for
//!   replicas, as on Sentinel and Cluster by default, a release uses another connection. So no waiter
//!   is claimed there.
//! - *A writer passes readers of this client over.* While they wait, no waiter is claimed; those of
//!   other clients count as clients that wait.

use std::sync::Arc;

use tokio::time::Instant;

use super::super::settle::PendingRelease;
use super::super::{HoldRef, RequestedHold};
use crate::background::Counted;
use crate::environment::random_fraction;
use crate::error::{Error, Result};
use crate::hold::{Chain, Handoff, HandoffParams, Hold, HoldSnapshot, To};
use crate::lease::Lease;
use crate::owner::Owner;
use crate::wait::ClaimedWaiter;

/// The owner that a full release puts in the place of another one.
pub(in super::super) enum Successor {
    /// A waiter of this client.
    Waiter(Claimed),
    /// An owner that no request of this client has: a keeper, or a returned ticket.
    Other {
        /// As the store knows it.
        field: String,
        lease: Lease,
        to: To,
    },
}

/// A waiter for which a release may acquire the object.
pub(in super::super) struct Claimed {
    waiter: ClaimedWaiter,
    hold_ref: HoldRef,
    /// Other clients get their turn after the same time as if the owner had not changed.
    chain: Chain,
    /// Whether the step has to ask if other clients wait.
    asks: bool,
}

impl HoldRef {
    /// Returns the successor of a full release of the hold `from`, if it has one.
    pub(in super::super) fn successor(
        &self,
        from: &Hold,
        snapshot: &HoldSnapshot,
    ) -> Option<Successor> {
        {
            let state = from.state();
            if let Some(ticket) = &state.adopts {
                return Some(Successor::Other {
                    field: ticket.field.to_string(),
                    lease: ticket.lease,
                    to: To::ReturnedTicket,
                });
            }
            if let Some(lease) = state.period.retained_for(Instant::now()) {
                let keeper = self.session.id.owner_id(Owner::anonymous());
                let field = from.object.field(keeper.into());
                let to = To::Keeper;
                return Some(Successor::Other { field, lease, to });
            }
        }
        let claimed = snapshot.may_pass_on().then(|| self.claim_waiter(from));
        claimed.flatten().map(Successor::Waiter)
    }

    /// Claims a waiter for a release of the hold `from`, if the object may pass to it now.
    fn claim_waiter(&self, from: &Hold) -> Option<Claimed> {
        let session = &self.session;
        if !from.kind.spec().store_handoff || session.waiting.channels.is_empty() {
            return None;
        }
        let can_count = session.store.counts_subscribers();
        let (chain, asks) =
            from.state()
                .period
                .chain
                .store_handoff(can_count, Instant::now(), random_fraction)?;
        let waiter = session.waiting.claim_first(&from.object)?;
        let left = from.state().period.latest_end() - Instant::now();
        // Waiters of other clients may sleep until the end of the present lease, and a handoff publishes nothing.
        let shortens = waiter.claim.lease.duration() < left;
        if shortens && !can_count {
            return None;
        }
        let hold_ref = session.claimed(&waiter.claim)?;
        Some(Claimed {
            waiter,
            hold_ref,
            chain,
            asks: asks || shortens,
        })
    }

    /// Puts the successor in the place of the owner of `from`. Returns whether the owner held the
    /// object. `None`: nothing has changed, so the object has to be released.
    pub(in super::super) async fn hand_off(
        &self,
        from: &Arc<Hold>,
        snapshot: &HoldSnapshot,
        successor: Successor,
    ) -> Result<Option<bool>> {
        match successor {
            Successor::Waiter(claimed) => self.hand_to_waiter(from, snapshot, claimed).await,
            Successor::Other { field, lease, to } => {
                let handoff = HandoffParams {
                    from,
                    successor: &field,
                    lease,
                    to,
                };
                self.hand_to_other(from, snapshot, handoff).await
            }
        }
    }

    async fn hand_to_other(
        &self,
        from: &Arc<Hold>,
        snapshot: &HoldSnapshot,
        handoff: HandoffParams<'_>,
    ) -> Result<Option<bool>> {
        let Some(step) = from.kind.handoff(handoff) else {
            return Ok(None);
        };
        let release = PendingRelease::new(from, 0);
        from.state().begin_release(0);
        // The successor holds the object now, so the queue of a fair lock is not served.
        self.end_chain(from);
        let (store, progress) = (&self.session.store, &release.progress);
        let answer = store.run(&step, None, snapshot.delivery(), progress).await;
        release.record_result(&answer);
        let answer = answer?;
        let held = answer.reply != Handoff::NotHeld;
        self.handle_release_answer(from, snapshot, 0, held, progress.was_repeated())
            .map(Some)
    }

    async fn hand_to_waiter(
        &self,
        from: &Arc<Hold>,
        snapshot: &HoldSnapshot,
        claimed: Claimed,
    ) -> Result<Option<bool>> {
        let session = &self.session;
        let Claimed {
            mut waiter,
            hold_ref,
            mut chain,
            asks,
        } = claimed;
        let (to, lease) = (hold_ref.hold.clone(), waiter.claim.lease);
        let channels = &session.waiting.channels;
        let own_subscriptions = u32::from(channels.is_subscribed(from.object.channel()));
        let step = to.kind.handoff(HandoffParams {
            from,
            successor: &to.field,
            lease,
            to: To::Waiter {
                own_subscriptions: asks.then_some(own_subscriptions),
            },
        });
        let (Some(step), Some(mut turn)) = (step, to.try_turn()) else {
            return Ok(None);
        };
        // While a slot moves, a node can release a lock, but not run a step with another key as
        // well.
        if step.keys().len() > 1 && session.store.has_slots() {
            return Ok(None);
        }
        let Some(mut receiver) = Receiver::begin(hold_ref, lease) else {
            return Ok(None);
        };
        let release = PendingRelease::new(from, 0);
        from.state().begin_release(0);
        waiter.request_started();
        let asked_at = Instant::now();
        let (store, progress) = (&session.store, &release.progress);
        let answer = store.run(&step, None, snapshot.delivery(), progress).await;
        release.record_result(&answer);
        turn.record_result(&answer);
        drop(turn);
        if answer
            .as_ref()
            .is_err_and(|error| release.changed_nothing(error))
        {
            receiver.disarm();
        }
        let answer = match answer {
            Err(Error::NotMovable { .. } | Error::Asked { .. }) => return Ok(None),
            answer => answer?,
        };
        match answer.reply {
            Handoff::Done { token } => {
                if asks {
                    chain.answered(asked_at, None, Instant::now());
                }
                let handoff = StoreHandoff {
                    receiver,
                    sent_at: answer.sent_at,
                    token,
                    chain,
                };
                let running = session.background.begin(&from.object);
                waiter.offer(Counted::new(Box::new(handoff), running));
            }
            // The first of the repeated steps may have been applied. Dropping `receiver` settles
            // that.
            Handoff::NotHeld if progress.was_repeated() => {}
            Handoff::NotHeld => {
                receiver.disarm();
                return Ok(None);
            }
            Handoff::Kept { others } => {
                receiver.disarm();
                let others = Some(others);
                let mut from = from.state();
                from.period.chain.answered(asked_at, others, Instant::now());
                return Ok(None);
            }
        }
        let held = answer.reply != Handoff::NotHeld;
        self.handle_release_answer(from, snapshot, 0, held, progress.was_repeated())
            .map(Some)
    }
}

/// The hold of a waiter, or of a ticket, to which a handoff may have given the object. Dropping it
/// settles the hold in the background.
pub(super) struct Receiver {
    /// `None` when there is nothing to settle: a waiter has taken it, or the handoff was answered.
    hold_ref: Option<HoldRef>,
    /// Number of the handoff among the changes of the hold.
    change: u64,
    lease: Lease,
}

impl Receiver {
    /// Begins a handoff to this hold. `None`: its owner has a hold, or must settle one first.
    pub(super) fn begin(hold_ref: HoldRef, lease: Lease) -> Option<Receiver> {
        let change = hold_ref.hold.state().begin_handoff(lease.duration())?;
        Some(Receiver {
            hold_ref: Some(hold_ref),
            change,
            lease,
        })
    }

    /// Records that there is nothing to settle: the store has not handed the object off, or to a
    /// ticket.
    pub(super) fn disarm(&mut self) {
        if let Some(hold_ref) = self.hold_ref.take() {
            hold_ref.hold.state().attempt_answered(self.change);
        }
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        if let Some(hold_ref) = self.hold_ref.take() {
            hold_ref.settle_detached(self.lease.duration(), None);
        }
    }
}

/// The object that the store has given to a waiter, until the waiter takes it.
pub(crate) struct StoreHandoff {
    receiver: Receiver,
    /// When the step was sent: the hold ends a lease later unless it is renewed.
    sent_at: Instant,
    /// The fencing token of the waiter, if the kind has one.
    token: u64,
    chain: Chain,
}

impl StoreHandoff {
    /// Adds a guard, if the hold is that of this request, with its lease, and the handoff was its
    /// latest step. Returns the fencing token, and when the hold ends unless it is renewed.
    pub(crate) fn take(self, requested: &RequestedHold<'_>) -> Option<(u64, Instant)> {
        let HoldRef { session, hold, .. } = requested.hold_ref;
        let mut receiver = self.receiver;
        let same = |own: &HoldRef| Arc::ptr_eq(&own.hold, hold);
        // The waiter that was claimed may have left. Another one of its owner may want another lease.
        if !receiver.hold_ref.as_ref().is_some_and(same) || receiver.lease != requested.terms.lease
        {
            return None;
        }
        let _turn = hold.try_turn()?;
        if !hold.state().accept_handoff(receiver.change) {
            return None;
        }
        let end = self.sent_at + receiver.lease.duration();
        requested.add_guard(end).ok()?;
        hold.state().period.chain = self.chain;
        receiver.hold_ref = None;
        session.guard_added(hold, self.sent_at);
        tracing::debug!(lock = hold.object.full_name(), owner = %hold.field, "transferred");
        Some((self.token, end))
    }
}
