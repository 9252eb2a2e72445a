//! One attempt to acquire one object, or all or none of several.

use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::SmallVec;

use super::{HoldRef, Session, Terms};
use crate::error::{Error, Loss, Result};
use crate::hold::Hold;
use crate::join::join_all;
use crate::lease::Expiry;
use crate::step::{Outcome, Step};
use crate::store::{Delivery, Progress};

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
    pub(crate) async fn try_acquire<S: Step>(
        &self,
        hold_refs: &[(&HoldRef, Terms)],
        subscribe: Option<&str>,
        progress: &Progress,
        step: impl FnOnce(&[u32]) -> S,
        blocked: impl FnOnce(&S::Reply) -> Option<usize>,
    ) -> Result<S::Reply> {
        progress.leave_queue();
        progress.mark_unsent();
        let mut turns = Each::with_capacity(hold_refs.len());
        for (hold_ref, _) in hold_refs {
            turns.push(hold_ref.hold.turn().await?);
        }
        let acquiring = self.try_acquire_in_turn(hold_refs, subscribe, progress, step, blocked);
        let acquired = acquiring.await;
        for turn in &mut turns {
            turn.record_result(&acquired);
        }
        acquired
    }

    async fn try_acquire_in_turn<S: Step>(
        &self,
        hold_refs: &[(&HoldRef, Terms)],
        subscribe: Option<&str>,
        progress: &Progress,
        step: impl FnOnce(&[u32]) -> S,
        blocked: impl FnOnce(&S::Reply) -> Option<usize>,
    ) -> Result<S::Reply> {
        let mut held: Each<u32> = Each::with_capacity(hold_refs.len());
        for (hold_ref, terms) in hold_refs {
            held.push(hold_ref.prior_hold_count(*terms).await?);
        }
        let unsettled: Each<_> = hold_refs
            .iter()
            .map(|(hold_ref, terms)| SettleOnDrop::new(hold_ref, *terms, progress))
            .collect();
        let step = step(&held);
        // A re-entry blocks no other attempt, and must not delay its own renewal by queueing.
        let delivery = Delivery::acquisition(held.iter().any(|&held| held > 0));
        let answer = self.store.run(&step, subscribe, delivery, progress).await;
        let mark_settled = || unsettled.iter().for_each(SettleOnDrop::mark_settled);
        let answer = match answer {
            Ok(answer) => answer,
            Err(error) => {
                if error.leaves_untouched() || !progress.was_sent() {
                    mark_settled();
                }
                return Err(error);
            }
        };
        if let Some(i) = blocked(&answer.reply) {
            mark_settled();
            return match (hold_refs.get(i), held.get(i)) {
                (Some((hold_ref, _)), Some(1..)) => Err(hold_ref.mark_not_held()),
                _ => Ok(answer.reply),
            };
        }
        let end = |terms: &Terms| answer.sent_at + terms.lease.duration();
        for ((hold_ref, terms), &held) in hold_refs.iter().zip(&held) {
            // Before the replicas confirm it, because waiting for them delays the renewal of a re-entered hold.
            if held > 0 {
                hold_ref.hold.state().extend(end(terms));
            }
        }
        if let Err(error) = answer.confirmation.confirmed(progress).await {
            // At once if possible, in the turns of this attempt: the caller may try elsewhere after this
            // error. If it fails, dropping `unsettled` settles.
            Box::pin(join_all(unsettled.iter().map(SettleOnDrop::settle_in_turn))).await;
            return Err(error);
        }
        for (i, (hold_ref, terms)) in hold_refs.iter().enumerate() {
            if let Err(error) = hold_ref.hold.add_guard(end(terms), terms.renewed) {
                // Too late for this one, so for all. Dropping `unsettled` releases them.
                for (hold_ref, terms) in hold_refs.iter().take(i) {
                    hold_ref.remove_guard(*terms);
                }
                return Err(error);
            }
        }
        mark_settled();
        for (hold_ref, _) in hold_refs {
            self.watchdog.watch(&hold_ref.hold);
        }
        self.acquired.notify_waiters();
        Ok(answer.reply)
    }
}

impl HoldRef {
    /// Makes one attempt to acquire or re-enter the object: [`Session::try_acquire`]. `step` creates the
    /// primitive's step for a hold count.
    pub(crate) async fn try_acquire<'a, T: Send, S: Step<Reply = Outcome<T>>>(
        &'a self,
        terms: Terms,
        subscribe: Option<&str>,
        progress: &Progress,
        step: impl FnOnce(&'a Hold, u32) -> S,
    ) -> Result<Outcome<T>> {
        let step = |held: &[u32]| step(&self.hold, held.iter().sum::<u32>() + 1);
        let blocked = |reply: &Outcome<T>| matches!(reply, Outcome::Wait(_)).then_some(0);
        let hold_refs = [(self, terms)];
        self.session
            .try_acquire(&hold_refs, subscribe, progress, step, blocked)
            .await
    }

    /// Returns how often the owner holds the object already, if it may acquire it now.
    ///
    /// First settles, in this turn, what the owner has released before: the next acquisition is a new one, with
    /// a lease and a fencing token of its own.
    async fn prior_hold_count(&self, terms: Terms) -> Result<u32> {
        let held = loop {
            let snapshot = self.hold.snapshot();
            if let Some(loss) = snapshot.loss {
                return Err(self.hold.lost_error(loss));
            }
            // Check again after each settling: a guard may have been removed meanwhile. Then the store has a higher
            // count than this client, and the next acquisition would look like a repetition, with the
            // fencing token of another one.
            if !snapshot.has_unacknowledged_changes {
                break snapshot.count;
            }
            // Boxed: seldom needed.
            Box::pin(self.settle_in_turn(snapshot.changes)).await?;
        };
        if held > 0 && !terms.reentrant {
            return Err(Error::AlreadyHeld {
                name: self.hold.object.name().to_owned(),
            });
        }
        Ok(held)
    }

    /// Handles a reply that the owner does not hold the object: marks the hold as lost. Returns the error.
    fn mark_not_held(&self) -> Error {
        self.hold.mark_lost(Loss::NotHeld);
        self.session.watchdog.watch(&self.hold);
        self.session.watchdog.report_missing(&self.hold);
        self.hold.lost_error(Loss::NotHeld)
    }
}

/// An attempt with unknown outcome. If it was sent, dropping this settles it in the background: the
/// connection keeps order, so the release arrives after the attempt.
struct SettleOnDrop<'a> {
    hold_ref: &'a HoldRef,
    terms: Terms,
    progress: &'a Progress,
    /// Number of the attempt, among the changes of the hold.
    change: u64,
    settled: AtomicBool,
}

impl<'a> SettleOnDrop<'a> {
    fn new(hold_ref: &'a HoldRef, terms: Terms, progress: &'a Progress) -> SettleOnDrop<'a> {
        SettleOnDrop {
            hold_ref,
            terms,
            progress,
            change: hold_ref.hold.state().begin_attempt(),
            settled: AtomicBool::new(false),
        }
    }

    /// Records that the attempt has been answered.
    fn mark_settled(&self) {
        self.settled.store(true, Ordering::Relaxed);
        self.hold_ref.hold.state().attempt_acknowledged(self.change);
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
        let attempt_permit = self.progress.take_permit();
        if self.settled.load(Ordering::Relaxed) {
            return;
        }
        match self.progress.was_sent() {
            true => {
                let hold_ref = self.hold_ref.clone();
                hold_ref.settle_detached(self.terms.trace_lifetime.duration(), attempt_permit);
            }
            // It never reached the store.
            false => self.hold_ref.hold.state().attempt_acknowledged(self.change),
        }
    }
}
