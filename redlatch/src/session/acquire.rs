//! One attempt to acquire one object, or all or none of several.

use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::SmallVec;
use tokio::time::Instant;

use super::settle::OpenAttempt;
use super::{HoldRef, RequestedHold, Session, Terms};
use crate::error::{Error, Loss, Result};
use crate::hold::{AcquireParams, HoldKind, Share};
use crate::join::{Boxed, join_all};
use crate::lease::{Expiry, Lease};
use crate::step::{Outcome, Step};
use crate::store::{Confirmation, Delivery, Progress};

/// Result of an attempt to acquire all or none of several objects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum AllOrNone<T> {
    /// All were acquired, with these results.
    Acquired(Vec<T>),
    /// None was acquired: another owner holds the one with this index, for this long at most.
    Blocked(usize, Expiry),
}

/// One value for each object of an attempt: mostly one.
type Each<T> = SmallVec<[T; 1]>;

impl Session {
    /// Makes one attempt to acquire or re-enter all or none of several objects in one step. `step` creates the
    /// step for the hold counts so far; `blocked` returns, for its reply, the index of the object that another
    /// owner holds. All callers must use the same order of objects, so that two attempts never wait for each
    /// other's turns.
    ///
    /// However this ends, even by being dropped, settling in the background makes the store match this
    /// client.
    #[expect(
        clippy::manual_async_fn,
        reason = "an `async fn` stores its arguments twice"
    )]
    pub(crate) fn try_acquire<'a, R: Send>(
        &'a self,
        holds: &'a [RequestedHold<'a>],
        subscribe: Option<&'a str>,
        progress: &'a Progress,
        step: impl FnOnce(&[u32]) -> Step<'a, R> + Send + 'a,
        blocked: impl FnOnce(&R) -> Option<usize> + Send + 'a,
    ) -> impl Future<Output = Result<R>> + Send + 'a {
        async move {
            progress.leave_queue();
            progress.mark_unsent();
            let mut turns = Each::with_capacity(holds.len());
            for requested in holds {
                turns.push(requested.hold_ref.hold.turn().await?);
            }
            let acquired = async {
                let (step, unsettled, is_reentry) = {
                    let mut held: Each<u32> = Each::with_capacity(holds.len());
                    for requested in holds {
                        held.push(loop {
                            if let Some(count) = requested.settled_count() {
                                break count?;
                            }
                            requested.settle_changes().await?;
                        });
                    }
                    let with_counts = holds.iter().zip(&held);
                    let unsettled: Each<_> = with_counts
                        .map(|(requested, &held)| SettleOnDrop::new(requested, held, progress))
                        .collect();
                    (step(&held), unsettled, held.iter().any(|&held| held > 0))
                };
                // A re-entry blocks no other attempt, and must not delay its own renewal by queueing.
                let delivery = Delivery::acquisition(is_reentry);
                let answer = self.store.run(&step, subscribe, delivery, progress).await;
                let mark_settled = || unsettled.iter().for_each(SettleOnDrop::mark_settled);
                // By the object with this index, if that is known. If this is the answer to a repetition, the first one may have
                // acquired all, and other owners some since. So the rest stays to be settled.
                let refused = |by: Option<usize>| {
                    let is_first = !progress.was_repeated();
                    let of_each = unsettled.iter().enumerate();
                    of_each
                        .filter(|(i, one)| is_first || by == Some(*i) && one.is_whole())
                        .for_each(|(_, one)| one.mark_settled());
                };
                let answer = match answer {
                    Ok(answer) => answer,
                    Err(error) => {
                        if error.leaves_untouched() {
                            // But the first one may have put a waiter into the queue.
                            let is_queued = holds[0].waits && holds[0].kind.waiter_ttl().is_some();
                            refused((holds.len() == 1 && !is_queued).then_some(0));
                        }
                        if let Error::WrongKind { .. } = error {
                            holds.iter().for_each(RequestedHold::suspect);
                        }
                        return Err(error);
                    }
                };
                if let Some(i) = blocked(&answer.reply) {
                    refused(Some(i));
                    // With replicas, an attempt has to confirm the hold. Of an attempt that was sent twice, the store may
                    // already have granted the first.
                    if !progress.was_repeated() && answer.confirmation.is_none() {
                        for requested in holds {
                            let mut state = requested.hold_ref.hold.state();
                            let end = answer.sent_at + requested.terms.lease.duration();
                            state.ledger.expect_grant(requested.request_number, end);
                        }
                    }
                    if let Some(one) = unsettled.get(i).filter(|one| one.held > 0) {
                        one.hold_ref.mark_not_held();
                        // Nothing is lost if all guards have been released meanwhile.
                        one.hold_ref.hold.check_not_lost()?;
                    }
                    return Ok(answer.reply);
                }
                let sent_at = answer.sent_at;
                if let Some(confirmation) = answer.confirmation {
                    // Waiting for the replicas delays the renewal of a re-entered hold.
                    let reentered = holds.iter().zip(&unsettled).filter(|(_, one)| one.held > 0);
                    for (requested, one) in reentered {
                        let end = requested.end(one.held, sent_at);
                        let renewed = sent_at + self.watchdog.lease().duration();
                        let mut state = one.hold_ref.hold.state();
                        state.reentry_unconfirmed(end, renewed);
                    }
                    confirm(confirmation, progress, &unsettled).await?;
                }
                for (i, (requested, one)) in holds.iter().zip(&unsettled).enumerate() {
                    let end = requested.end(one.held, sent_at);
                    if let Err(error) = requested.add_guard(end) {
                        // Too late for this one, so for all. Dropping `unsettled` releases them.
                        for earlier in holds.iter().take(i) {
                            earlier.hold_ref.remove_guard(earlier.terms);
                        }
                        return Err(error);
                    }
                }
                mark_settled();
                for requested in holds {
                    self.guard_added(&requested.hold_ref.hold, sent_at);
                }
                Ok(answer.reply)
            }
            .await;
            for turn in &mut turns {
                turn.record_result(&acquired);
            }
            acquired
        }
    }
}

impl<'r> RequestedHold<'r> {
    /// Returns the request for a hold that is sent once and sets no limits.
    pub(crate) fn without_waiting(
        kind: &'r dyn HoldKind,
        hold_ref: &'r HoldRef,
        terms: Terms,
    ) -> RequestedHold<'r> {
        RequestedHold {
            kind,
            hold_ref,
            terms,
            hold_limits: None,
            waits: false,
            request_number: 0,
        }
    }

    /// Makes one attempt to acquire or re-enter the object: [`Session::try_acquire`].
    pub(crate) fn try_acquire<'a>(
        &'a self,
        subscribe: Option<&'a str>,
        progress: &'a Progress,
    ) -> impl Future<Output = Result<Outcome>> + Send + 'a {
        let step = |held: &[u32]| self.step(held.iter().sum());
        let blocked = |reply: &Outcome| matches!(reply, Outcome::Wait(_)).then_some(0);
        self.hold_ref.session.try_acquire(
            std::slice::from_ref(self),
            subscribe,
            progress,
            step,
            blocked,
        )
    }

    /// Returns the step that acquires the object once more than the owner holds it. It is created in the turn of the hold: a
    /// later acquisition of its owner gets its whole lease.
    pub(crate) fn step(&self, held: u32) -> Step<'r, Outcome> {
        let count = held + 1;
        self.kind.acquire(AcquireParams {
            hold: &self.hold_ref.hold,
            count,
            lease: self.hold_ref.lease(self.terms, count, Instant::now()),
            waits: self.waits,
            request_number: self.request_number,
        })
    }

    /// Returns the channel on which the request is woken.
    pub(crate) fn channel(&self) -> &'r str {
        self.kind.channel(&self.hold_ref.hold)
    }

    /// Returns how long the store may keep traces of an attempt: the lease, or longer if it remembers who waits.
    pub(super) fn trace_lifetime(&self) -> Lease {
        let remembered = self.kind.waiter_ttl().filter(|_| self.waits);
        remembered.map_or(self.terms.lease, |ttl| ttl.max(self.terms.lease))
    }

    /// Removes what the store may know of this waiter, in the background. If another request of the
    /// owner waits, it keeps that, and removes it when it waits no longer.
    pub(crate) fn remove_waiter(&self, store_may_know_waiter: bool) {
        let HoldRef { session, hold, .. } = self.hold_ref;
        if self.kind.waiter_ttl().is_none() {
            return;
        }
        // First: another request may end its wait just now.
        hold.state().left_place |= store_may_know_waiter;
        let object = hold.object.identity();
        if hold.waiter_channel.is_some()
            && session.waiting.channels.has_waiters(self.channel(), object)
        {
            return;
        }
        if std::mem::take(&mut hold.state().left_place) {
            let hold_ref = self.hold_ref.clone();
            let change = hold_ref.hold.state().ledger.waiter_left();
            let permit = None;
            let attempt = OpenAttempt { change, permit };
            hold_ref.settle_detached(self.trace_lifetime().duration(), Some(attempt));
        }
    }

    /// Has what the owner holds of the object and of its sibling checked, because the store says that the key has
    /// something else. Until then it does not pass on.
    fn suspect(&self) {
        let HoldRef { session, hold, .. } = self.hold_ref;
        let sibling = hold.kind.sibling();
        let sibling = sibling.and_then(|sibling| session.latest_hold(hold.owner, sibling));
        for hold in sibling.iter().chain([hold]) {
            if hold.state().held_period().is_some() {
                session.watchdog.suspect(hold);
            }
        }
    }

    /// Returns when the hold ends in the store, or earlier, if its owner held it `held` times when the step
    /// was sent. The limit of a revoked hold may have become known later; then the store has given it a
    /// longer lease.
    fn end(&self, held: u32, sent_at: Instant) -> Instant {
        sent_at
            + self
                .hold_ref
                .lease(self.terms, held + 1, sent_at)
                .duration()
    }

    /// Adds a guard after the store has granted the hold until `end`: see [`Hold::add_guard`].
    pub(super) fn add_guard(&self, end: Instant) -> Result<()> {
        let hold = &self.hold_ref.hold;
        hold.add_guard(end, self.terms.renewed, self.hold_limits)
    }

    /// Accepts the hold that the store granted to this attempt, if it is the owner's latest and the message has its
    /// number. Returns when the hold ends unless it is renewed. `None`: the next attempt finds the hold, if there is one.
    pub(crate) async fn accept_grant(&self, message: i64) -> Option<Instant> {
        if message != self.request_number {
            return None;
        }
        let hold = &self.hold_ref.hold;
        let _turn = hold.turn().await.ok()?;
        let end = hold.state().ledger.take_expected_grant(message)?;
        let lease = self.terms.lease.duration();
        if end.saturating_duration_since(Instant::now()) < lease / 3 {
            return None;
        }
        self.add_guard(end).ok()?;
        {
            // In the store the lease starts later, with the grant.
            let mut state = hold.state();
            state.period.longest = state.period.longest.max(lease);
        }
        self.hold_ref.session.guard_added(hold, end - lease);
        Some(end)
    }

    /// Returns how often the owner holds the object already, if it may acquire it now. `None`: what the owner has
    /// released before must be settled first.
    fn settled_count(&self) -> Option<Result<u32>> {
        let hold = &self.hold_ref.hold;
        let snapshot = hold.snapshot();
        if let Err(lost) = hold.check_not_lost() {
            return Some(Err(lost));
        }
        let is_settled = snapshot.is_settled;
        is_settled.then(|| match snapshot.count {
            1.. if !self.terms.reentrant => Err(Error::AlreadyHeld {
                name: hold.object.name().to_owned(),
            }),
            count => Ok(count),
        })
    }

    /// Settles, in this turn, what the owner has released before: the next acquisition is then a new one, with a lease
    /// and a fencing token of its own. Boxed: seldom needed.
    ///
    /// A guard may be removed meanwhile. Then the store has a higher count than this client, and the next acquisition
    /// would look like a repetition, with the fencing token of another one. So this is repeated until nothing is left.
    fn settle_changes(&self) -> Boxed<'_, Result<bool>> {
        let changes = {
            let mut state = self.hold_ref.hold.state();
            state.acquires_again = true;
            state.ledger.latest()
        };
        Box::pin(self.hold_ref.settle_in_turn(changes))
    }
}

/// Waits until the replicas have confirmed an attempt. If they do not, settles it. Boxed: most attempts wait for no
/// replica.
fn confirm<'a>(
    confirmation: Box<Confirmation>,
    progress: &'a Progress,
    unsettled: &'a [SettleOnDrop<'a>],
) -> Boxed<'a, Result<()>> {
    Box::pin(async move {
        let confirmed = confirmation.confirmed(progress).await;
        if confirmed.is_err() {
            // At once if possible, in the turns of this attempt: the caller may try elsewhere after this error.
            // If it fails, dropping `unsettled` settles.
            join_all(unsettled.iter().map(SettleOnDrop::settle_in_turn)).await;
        }
        confirmed
    })
}

impl HoldRef {
    /// Returns the lease of an acquisition with these terms that makes the hold count `count`: that of a re-entry is
    /// shorter than requested if the hold was revoked. A first acquisition gets its whole lease.
    pub(crate) fn lease(&self, terms: Terms, count: u32, now: Instant) -> Lease {
        match count {
            1 => terms.lease,
            _ => self.hold.state().period.limit_lease(terms.lease, now),
        }
    }

    /// Handles a reply that the owner does not hold the object: marks the hold as lost. Returns the error.
    pub(super) fn mark_not_held(&self) -> Error {
        self.hold.mark_lost(Loss::NotHeld);
        self.session.watchdog.watch(&self.hold);
        self.session.watchdog.report_missing(&self.hold);
        self.hold.not_held_error()
    }
}

/// An attempt with unknown outcome. If it was sent, dropping this settles it in the background: the
/// connection keeps order, so the release arrives after the attempt.
struct SettleOnDrop<'a> {
    hold_ref: &'a HoldRef,
    progress: &'a Progress,
    /// How long the store may keep traces of the attempt.
    trace_lifetime: Lease,
    /// The hold count before the attempt.
    held: u32,
    /// Number of the attempt, among the changes of the hold.
    change: u64,
    settled: AtomicBool,
}

impl<'a> SettleOnDrop<'a> {
    fn new(requested: &RequestedHold<'a>, held: u32, progress: &'a Progress) -> SettleOnDrop<'a> {
        SettleOnDrop {
            hold_ref: requested.hold_ref,
            progress,
            trace_lifetime: requested.trace_lifetime(),
            held,
            change: requested.hold_ref.hold.state().begin_acquisition(held),
            settled: AtomicBool::new(false),
        }
    }

    /// Records that the attempt has been answered.
    fn mark_settled(&self) {
        self.settled.store(true, Ordering::Relaxed);
        self.hold_ref.hold.state().attempt_answered(self.change);
    }

    /// Returns whether an owner has all of the object or nothing.
    fn is_whole(&self) -> bool {
        self.hold_ref.hold.kind.share() == Share::Whole
    }

    /// Settles the attempt in its own turn. If this fails, dropping `self` settles it.
    async fn settle_in_turn(&self) {
        if self.hold_ref.settle_in_turn(self.change).await.is_ok() {
            self.mark_settled();
        }
    }
}

impl Drop for SettleOnDrop<'_> {
    fn drop(&mut self) {
        let permit = self.progress.take_permit();
        if self.settled.load(Ordering::Relaxed) {
            return;
        }
        match self.progress.was_sent() {
            true => {
                let (hold_ref, change) = (self.hold_ref.clone(), self.change);
                let attempt = OpenAttempt { change, permit };
                hold_ref.settle_detached(self.trace_lifetime.duration(), Some(attempt));
            }
            // It never reached the store.
            false => self.hold_ref.hold.state().attempt_answered(self.change),
        }
    }
}
