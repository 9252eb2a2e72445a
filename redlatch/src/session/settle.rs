//! Makes the store match this client: sends the current hold count, at once or in the background.
//!
//! Unlocking, dropping a guard, dropping an attempt and an attempt without an answer all end here.
//! The connection keeps order, so a later request takes effect after those in flight. What must not
//! happen, and what prevents it:
//!
//! - *An attempt in flight acquires behind its own release.* The release goes to the connection of
//!   the attempts, behind it. An attempt that was never sent needs no release. Mutant
//!   `canceled-request-not-settled`.
//! - *A release removes a later hold.* A hold that another settling has released is not released
//!   again. The hold's turn orders the rest.
//! - *A release for an attempt ends what a later attempt of the same owner has:* permits that a
//!   caller has taken out, or a place in a fair queue. It is repeated in the background, while the
//!   request settles the attempt itself and is granted the next one. So it is sent only while the
//!   attempt is not acknowledged. Tests: `ledger/exploration` (permits),
//!   `permits_taken_out_are_not_released_for_an_earlier_attempt`,
//!   `waiter_keeps_its_place_while_an_earlier_attempt_is_settled`,
//!   `waiter_keeps_its_place_while_an_earlier_one_of_its_owner_is_removed`.
//! - *A refused repetition leaves what the first attempt acquired:* the other members of a multi-lock,
//!   or some of several permits. The refusal does not acknowledge them. Tests:
//!   `members_behind_the_one_that_refuses_a_repetition_are_released`,
//!   `rest_of_permits_is_released_if_a_repetition_is_refused`.
//! - *An inner release frees the lock.* A release carries the count to keep. Mutant
//!   `inner-release-unlocks-outer`.
//! - *A repeated release reports a loss.* If the repetition finds nothing, the first one succeeded.
//!   Mutant `repeated-release-reports-loss`.
//! - *A waiter that gives up leaves its place in a fair queue, or a writer's mark.* For a hold that
//!   was not acquired, a release means: remove everything of this owner. Mutant
//!   `waiter-stays-in-fair-queue`.
//! - *A flush returns before that.* `background` counts this work. Mutant `flush-ends-early`.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::{Instant, timeout, timeout_at};

use super::hold_ref::MOVED;
use super::{HoldRef, Session, Terms};
use crate::background::{Tries, WorkRef};
use crate::error::{Error, Loss, Result};
use crate::hold::{Hold, HoldSnapshot, ReleaseParams};
use crate::store::{AttemptPermit, Progress};

/// How long after the end of a lease a release is retried. No flush waits for that: the store has the lock at most until a step
/// that takes effect late, such as an attempt which a frozen server executes when it continues, has been undone.
pub(super) const SETTLE_GRACE: Duration = Duration::from_secs(10);

/// How long a flush waits at least for a store that has no response timeout, and at most for work
/// that settles nothing.
const FIRST_TRY: Duration = Duration::from_secs(1);

impl Session {
    /// Lets the store pass the object, which was just released, to the queue of a fair lock with
    /// the same key, in the background. A failure harms only the order: owners in that queue ask
    /// from time to time. So a flush waits for one try, and has nothing to report.
    fn serve_queue(&self, hold: &Arc<Hold>) {
        let (store, hold) = (self.store.clone(), hold.clone());
        let running = self.background.begin(&hold.object);
        running.to_ref().unnamed();
        self.background.spawn_begun(running, async move {
            let Some(step) = hold.kind.serve_queue(&hold.object) else {
                return;
            };
            let served = timeout(FIRST_TRY, store.run_urgent(&step)).await;
            let after = FIRST_TRY;
            if let Err(error) = served.unwrap_or(Err(Error::ResponseTimeout { after })) {
                let lock = hold.object.full_name();
                tracing::debug!(lock, %error, "the queue of the fair lock was not served");
            }
        });
    }

    /// Wakes the requests of an owner that has released the object, if each owner has its own
    /// channel: the release also removed their places in the store.
    pub(super) fn wake_owner(&self, hold: &Hold) {
        if let Some(channel) = &hold.waiter_channel {
            self.waiting.wake(channel);
        }
    }
}

impl HoldRef {
    /// Removes one guard. [`HoldRef::settle`] then updates the store.
    pub(crate) fn remove_guard(&self, terms: Terms) {
        let change = self.hold.state().remove_guard(terms.renewed);
        self.guard_removed(change);
    }

    /// Removes one guard whose hold the store keeps on purpose: there is nothing to settle. Only for permits: their hold has one
    /// guard, beside which no release is sent, so all earlier changes are acknowledged. If the hold was lost, which is settled,
    /// this fails.
    pub(crate) fn leave_guard(&self, terms: Terms) -> Result<()> {
        let left = self.hold.state().leave_guard(terms.renewed);
        let change = left.map_err(|loss| self.hold.lost_error(loss))?;
        self.guard_removed(change);
        Ok(())
    }

    fn guard_removed(&self, change: u64) {
        let earlier = self.removed_at.swap(change, Ordering::Relaxed);
        debug_assert_ne!(earlier, MOVED);
    }

    /// Makes the store match this client: sends the current hold count, which may be 0. Returns whether the
    /// owner still held it.
    ///
    /// Sending it twice has the effect of one. It is repeated when the connection breaks. "Not held" in
    /// reply to the repetition means that the first one took effect.
    pub(crate) async fn settle(&self) -> Result<bool> {
        let up_to_change = self.change_to_settle();
        let mut turn = self.hold.turn().await?;
        let settled = self.settle_in_turn(up_to_change).await;
        turn.record_result(&settled);
        settled
    }

    /// Returns the latest change that must be settled.
    fn change_to_settle(&self) -> u64 {
        match self.removed_at.load(Ordering::Relaxed) {
            0 => self.hold.state().ledger.latest(),
            removed_at => removed_at,
        }
    }

    /// Returns whether this is the reference of a guard that was removed.
    fn has_removed_guard(&self) -> bool {
        !matches!(self.removed_at.load(Ordering::Relaxed), 0 | MOVED)
    }

    /// Settles in the background, as [`HoldRef::settle`] does, or only what an attempt may have left. Once a release behind that
    /// was answered, nothing is left to settle: what the store has of the owner is a later attempt's, such as its place in a queue.
    async fn settle_in_background(&self, attempt: Option<&mut OpenAttempt>) -> Result<bool> {
        let (key, change) = (
            self.hold.object.key(),
            attempt.as_ref().map(|one| one.change),
        );
        let up_to_change = change.unwrap_or_else(|| self.change_to_settle());
        let mut permit = self.session.store.settling_permit(key).await;
        let mut turn = match self.hold.try_turn() {
            Some(turn) => turn,
            None => {
                // Whoever has the turn may wait for a permit, and settles all this before its next attempt.
                permit.take();
                if let Some(attempt) = attempt {
                    attempt.permit = None;
                }
                self.hold.turn().await?
            }
        };
        if self.hold.state().ledger.has_acknowledged(up_to_change) {
            return Ok(true);
        }
        let settled = self.settle_in_turn(up_to_change).await;
        turn.record_result(&settled);
        settled
    }

    /// Settles for a caller that has the turn. `up_to_change`: the latest change that must be settled.
    pub(super) async fn settle_in_turn(&self, up_to_change: u64) -> Result<bool> {
        let snapshot = self.hold.snapshot();
        if !snapshot.superseded {
            let is_released = snapshot.released_at >= up_to_change;
            return self.settle_hold(&self.hold, &snapshot, is_released).await;
        }
        // It was lost. The store's state of this owner now belongs to the latest generation. Its request may have been
        // canceled before it released what this generation left there.
        if let Some(latest) = self.session.latest_hold(self.hold.owner, &self.hold.object)
            && let snapshot = latest.snapshot()
            && !snapshot.is_settled
        {
            let is_released = snapshot.released_at >= snapshot.latest;
            // Boxed: seldom needed.
            Box::pin(self.settle_hold(&latest, &snapshot, is_released)).await?;
        }
        self.hold.check_not_lost().map(|()| false)
    }

    /// Settles the latest generation of the hold. `is_released`: a release that was answered has sent all changes that must be
    /// settled.
    async fn settle_hold(
        &self,
        hold: &Arc<Hold>,
        snapshot: &HoldSnapshot,
        is_released: bool,
    ) -> Result<bool> {
        let session = &self.session;
        let keep = match snapshot.is_lost {
            false => snapshot.count,
            // The store may still have it: a limit was reached, or the answer to an attempt came too late.
            true => 0,
        };
        if keep == 0 {
            session.watchdog.unwatch(hold);
            if is_released {
                // A release through another reference has sent the same count.
                return Ok(true);
            }
        }
        if keep == 0
            && let Some(successor) = self.successor(hold, snapshot)
            // Boxed: most releases have none.
            && let Some(held) = Box::pin(self.hand_off(hold, snapshot, successor)).await?
        {
            return Ok(held);
        }
        // A hold that was revoked is not extended.
        let lease = (snapshot.is_renewed && !snapshot.is_asked).then(|| session.watchdog.lease());
        let step = hold.kind.release(ReleaseParams { hold, keep, lease });
        let release = PendingRelease::new(hold, keep);
        hold.state().begin_release(keep);
        let serves_queue = match keep {
            0 => self.end_chain(hold),
            _ => false,
        };
        let frees = keep == 0 && hold.kind.spec().release_frees;
        if frees {
            session.waiting.record_release(hold.object.channel());
        }
        let (store, progress) = (&session.store, &release.progress);
        let answer = store.run(&step, None, snapshot.delivery(), progress).await;
        release.record_result(&answer);
        let answer = answer?;
        let repeated = progress.was_repeated();
        let held = self.handle_release_answer(hold, snapshot, keep, answer.reply, repeated)?;
        if serves_queue {
            session.serve_queue(hold);
        }
        if keep > 0 {
            if !held {
                hold.mark_lost(Loss::NotHeld);
                session.watchdog.report_missing(hold);
            } else if let Some(lease) = lease {
                hold.state()
                    .period
                    .extend(answer.sent_at + lease.duration());
            }
            session.watchdog.watch(hold);
        }
        Ok(held)
    }

    /// Records that the chain of a hold ends with a release: other clients get their turn. Returns whether some of them wait in
    /// the queue of a fair lock.
    pub(super) fn end_chain(&self, hold: &Hold) -> bool {
        let session = &self.session;
        let chain = hold.state().period.chain;
        let yields = chain.yields(Instant::now());
        session.metrics().chain_ended(chain.handoffs());
        session.waiting.yield_to(&hold.object, yields);
        yields.to.in_queue
    }

    /// Handles the answer to a release: `reply` is whether the owner held the object. Returns whether it did, or had
    /// released it before.
    pub(super) fn handle_release_answer(
        &self,
        hold: &Arc<Hold>,
        snapshot: &HoldSnapshot,
        keep: u32,
        reply: bool,
        repeated: bool,
    ) -> Result<bool> {
        let session = &self.session;
        if keep == 0 && hold.kind.spec().release_frees && !reply {
            // There may be no message, so another waiter's request is necessary to learn who holds it now.
            session.waiting.wake(hold.object.channel());
        }
        tracing::debug!(lock = hold.object.full_name(), owner = %hold.field, keep,
            held = reply, "released");
        if keep == 0 {
            session.wake_owner(hold);
        }
        // An earlier release of the same count may have found it.
        let held = reply || (keep == 0 && (repeated || snapshot.maybe_released));
        let fully_released = keep == 0 && held && !snapshot.is_lost;
        {
            let mut state = hold.state();
            state.release_answered(snapshot.latest, fully_released);
            if keep == 0 {
                // It is kept now, or was not held.
                state.period.retention_ended();
            }
        }
        if snapshot.is_lost {
            hold.check_not_lost()?;
        }
        Ok(held)
    }

    /// Settles the removal of a guard in the background.
    pub(crate) fn settle_removed_guard(&self, terms: Terms) {
        let lease = self.hold.state().longest_time_in_store(
            terms.renewed,
            terms.lease.duration(),
            self.session.watchdog.lease().duration(),
            Instant::now(),
        );
        self.clone().settle_detached(lease, None);
    }

    /// Settles in the background: this attempt, or all changes. Retries until the lease in the store must have ended.
    pub(super) fn settle_detached(self, lease: Duration, attempt: Option<OpenAttempt>) {
        let background = self.session.background.clone();
        let running = background.begin(&self.hold.object);
        let (unstarted, work) = (WarnIfDropped(Some(self)), running.to_ref());
        background.spawn_begun(running, async move {
            let mut unstarted = unstarted;
            if let Some(hold_ref) = unstarted.0.take() {
                // If the lease has ended already, the first try is awaited all the same.
                let response_timeout = hold_ref.session.store.response_timeout();
                let ends = Instant::now() + lease.max(response_timeout.unwrap_or(FIRST_TRY));
                let settling = hold_ref.settle_with_retries(ends, attempt, &work);
                let mut settling = pin!(settling);
                if timeout_at(ends, settling.as_mut()).await.is_err() {
                    // One that had ended before was free without the release.
                    if !lease.is_zero() {
                        tracing::warn!(lock = hold_ref.hold.object.full_name(),
                            owner = %hold_ref.hold.field, "release failed until the lease ended");
                    }
                    work.needless();
                    settling.await;
                }
            }
        });
    }

    /// `ends`: when the lease has ended that the store has without a further step.
    pub(super) async fn settle_with_retries(
        &self,
        ends: Instant,
        mut attempt: Option<OpenAttempt>,
        work: &WorkRef,
    ) {
        // A step in flight may take effect this late; its lease starts then.
        let mut tries = Tries::new(work.clone(), ends + SETTLE_GRACE);
        let (lock, owner) = (self.hold.object.full_name(), &self.hold.field);
        loop {
            let settled = self.settle_in_background(attempt.as_mut()).await;
            drop(attempt.as_mut().map(|one| one.permit.take()));
            let error = match settled {
                Ok(is_held) => {
                    if !is_held && self.has_removed_guard() && self.hold.loss().is_none() {
                        self.session.watchdog.report_missing(&self.hold);
                    }
                    return;
                }
                Err(error) if error.is_loss() => break,
                Err(error) => error,
            };
            // After any error, even a refusal: its cause may end before the lease does.
            let Some((pause, is_refused)) = tries.failed(&error, Instant::now()) else {
                tracing::debug!(lock, %owner, %error, "release abandoned");
                break;
            };
            tracing::debug!(lock, %owner, %error, "release failed; retrying");
            if is_refused {
                tracing::warn!(lock, %owner, %error,
                    "release refused; the lock is free when its lease ends");
            }
            tokio::time::sleep(pause).await;
        }
        self.hold.state().ledger.settling_abandoned();
    }
}

/// What an attempt may have left, which is settled in the background: it has no answer, or its request waits no longer.
pub(super) struct OpenAttempt {
    /// The number of the attempt, or of the end of waiting, among the changes of the hold.
    pub(super) change: u64,
    /// It may still be in flight, so it keeps its permit until the first try to settle it has ended, or has to wait for the turn.
    /// So the attempts that wait for settling are limited like those in flight, however many callers start and cancel attempts.
    pub(super) permit: Option<AttemptPermit>,
}

/// A release that can be canceled or fail between being sent and being answered. Its hold remembers that:
/// before the next acquisition, another release must be answered. That one, which may be another caller's,
/// counts as a repetition. If it finds nothing, the first one took effect, and nothing was lost.
pub(super) struct PendingRelease<'a> {
    hold: &'a Hold,
    keep: u32,
    pub(super) progress: Progress,
    is_answered: AtomicBool,
}

impl<'a> PendingRelease<'a> {
    pub(super) fn new(hold: &'a Hold, keep: u32) -> PendingRelease<'a> {
        let progress = Progress::default();
        PendingRelease {
            hold,
            keep,
            progress,
            is_answered: AtomicBool::new(false),
        }
    }

    /// Records the result. After an answer, the release is not pending any more.
    pub(super) fn record_result<T>(&self, result: &Result<T>) {
        if result.as_ref().err().is_none_or(Error::leaves_untouched) {
            self.answered();
        }
    }

    /// Records that it was answered, so dropping this changes nothing.
    pub(super) fn answered(&self) {
        self.is_answered.store(true, Ordering::Relaxed);
    }

    /// Returns whether this error means that the release has changed nothing.
    pub(super) fn changed_nothing(&self, error: &Error) -> bool {
        error.leaves_untouched() || !self.progress.was_sent()
    }
}

impl Drop for PendingRelease<'_> {
    fn drop(&mut self) {
        if self.progress.was_sent() && !self.is_answered.load(Ordering::Relaxed) {
            self.hold.state().ledger.release_unanswered(self.keep);
        }
    }
}

/// Logs a warning if background work is dropped before it starts, because its runtime has ended.
pub(super) struct WarnIfDropped(pub(super) Option<HoldRef>);

impl Drop for WarnIfDropped {
    fn drop(&mut self) {
        if let Some(hold_ref) = &self.0 {
            tracing::warn!(lock = hold_ref.hold.object.full_name(), owner = %hold_ref.hold.field,
                "no runtime to release the lock in; it is free when its lease ends");
            hold_ref.hold.state().ledger.settling_abandoned();
        }
    }
}
