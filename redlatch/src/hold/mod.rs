//! A hold: one owner's possession of one object, from its first acquisition until it is released or
//! lost. `state` decides, without a clock; this file adds the clock, notifications and turns.
//!
//! 1. A *hold period* lasts from the first guard of a hold to its last release. A handoff begins
//!    another one.
//! 2. The end of a hold counts from the instant before its last answered step was sent. Each access
//!    compares it with the clock, so a hold whose end has passed is lost before any timer has run.
//!    A lost hold stays lost.
//! 3. The steps of one owner on one object take turns ([`Hold::turn`]). A release waits for a
//!    renewal in flight, and no renewal starts behind it.
//! 4. An owner that acquires again after a loss has a new hold, the next *generation*, which takes
//!    turns with the lost one. The store may still have the lost one, so the first step is a full
//!    release.
//!
//! What must not happen, and what prevents it:
//!
//! - *A released hold is renewed.* The turns. Mutant `renewal-ignores-step-lock`.
//! - *A late step of a lost hold affects the next one.* The common turns, and the release that
//!   comes first. Mutants `new-generation-not-serialized`, `new-generation-without-release`.
//! - *A guard is valid longer than its lease in the store.* Point 2. Mutants
//!   `lease-counted-from-answer`, `renewal-counted-from-answer`, `failed-renewal-extends-hold`.
//! - *A loss is reported to the guard of another period, or not at all.* `lost()` completes only in
//!   the period in which it was called. Mutant `loss-not-reported`.

use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::error::{Error, Loss, Result};
use crate::lease::Lease;
use crate::metrics::KindMetrics;
use crate::name::ObjectKeys;
use crate::owner::Owner;
use crate::runtime::sleep_until;
use crate::sync::{Mutex, wait_for};

pub(crate) mod fair_waiters;
mod fairness;
mod kind;
mod ledger;
mod limits;
mod period;
pub(crate) mod requests;
mod state;

pub(crate) use fairness::{CHECK_LIMIT, Chain, NoHandoff, OtherClients, Yielding, Yields};
pub use kind::Holder;
pub(crate) use kind::{
    AcquireParams, Handoff, HandoffParams, HoldKind, QueueKind, ReleaseParams, Renewal, Renewed,
    Share, Spec, To,
};
pub(crate) use limits::{HoldLimits, RunningLimits};
pub(crate) use period::PeriodId;
pub(crate) use state::{
    HoldSnapshot, HoldState, RenewalTimes, ScheduleSlot, TicketHold, Watch, WatchAction,
    WatchdogState,
};

/// Serializes the steps of one owner on one object. Contains the time and error of the latest step, if it
/// failed because the store could not be reached.
type StepLock = tokio::sync::Mutex<Option<Outage>>;

/// Boxed: few holds have one.
type Outage = Box<(Instant, Error)>;

/// The right to send a step. The next step starts when it is dropped.
pub(crate) struct StepTurn<'a>(tokio::sync::MutexGuard<'a, Option<Outage>>);

impl StepTurn<'_> {
    /// Records the result of the step.
    pub(crate) fn record_result<T>(&mut self, done: &Result<T>) {
        let outage = done.as_ref().err().filter(|error| error.is_outage());
        *self.0 = outage.map(|error| Box::new((Instant::now(), error.clone())));
    }
}

/// Says whether something is still held.
pub(crate) type Validity = Arc<dyn Fn() -> bool + Send + Sync>;

/// One owner's hold on one object, shared by all its guards.
pub(crate) struct Hold {
    pub(crate) object: Arc<ObjectKeys>,
    pub(crate) owner: Owner,
    /// The owner as the store knows it.
    pub(crate) field: Box<str>,
    /// See [`HoldKind::waiter_channel`].
    pub(crate) waiter_channel: Option<Box<str>>,
    pub(crate) kind: Arc<dyn HoldKind>,
    /// Allows one step at a time: nothing is renewed after its release, and no count is based on one that
    /// is still in flight.
    step_lock: StepLock,
    /// The first generation of a hold that replaces a lost one: all generations use its `step_lock`.
    first_generation: Option<Arc<Hold>>,
    state: Mutex<HoldState>,
    /// Notified when the hold was acquired or lost.
    changed: Notify,
    /// Whether it is one of several that are a RedLock, which is not lost with it.
    is_red_lock_member: AtomicBool,
    pub(crate) metrics: KindMetrics,
}

impl Hold {
    pub(crate) fn new(
        owner: Owner,
        field: String,
        kind: Arc<dyn HoldKind>,
        metrics: KindMetrics,
    ) -> Hold {
        Hold {
            waiter_channel: kind.waiter_channel(&field).map(Into::into),
            object: kind.object().clone(),
            owner,
            field: field.into(),
            kind,
            step_lock: StepLock::default(),
            first_generation: None,
            state: Mutex::new(HoldState::new(Instant::now())),
            changed: Notify::new(),
            is_red_lock_member: AtomicBool::new(false),
            metrics,
        }
    }

    /// Adds a guard after the store has granted the hold until `end`. Fails if that has passed already; the
    /// count is then unchanged.
    pub(crate) fn add_guard(
        &self,
        end: Instant,
        renewed: bool,
        limits: Option<&HoldLimits>,
    ) -> Result<()> {
        let now = Instant::now();
        {
            let mut state = self.state_at(|| now);
            let added = state.add_guard(end, renewed, now);
            added.map_err(|loss| self.lost_error(loss))?;
            limits.inspect(|limits| state.period.start_limits(limits, now));
        }
        self.changed.notify_waiters();
        Ok(())
    }

    /// Returns whether an acquisition blocks the other waiters in the client's queue until a message
    /// reports its end. Otherwise the next waiter retries immediately, because others can acquire the
    /// object as well, or its end is not announced. A channel of its owner does not announce that
    /// another client has ended the hold.
    pub(crate) fn excludes_waiters(&self) -> bool {
        let spec = self.kind.spec();
        let is_exclusive = spec.queue == QueueKind::Exclusive && spec.has_owner && !spec.polls;
        is_exclusive && self.waiter_channel.is_none()
    }

    /// Starts the limits of a request that takes over the guard.
    pub(crate) fn start_limits(&self, limits: &HoldLimits) {
        let now = Instant::now();
        self.state_at(|| now).period.start_limits(limits, now);
    }

    /// Records that the holder still works. Without effect if the hold is lost.
    pub(crate) fn feed(&self) {
        let now = Instant::now();
        self.state_at(|| now).period.feed(now);
    }

    /// Handles the answer to a renewal or check, which was sent then in the hold's turn. The store has the hold. `lease`: that of the
    /// renewal.
    pub(crate) fn renewed(&self, sent_at: Instant, lease: Option<Lease>, reply: Renewed) {
        let limit = match reply {
            Renewed::Asked { limit } => limit.map(|left| sent_at + left),
            Renewed::Held | Renewed::NotHeld => None,
        };
        {
            let mut state = self.state();
            match lease {
                Some(lease) => state.period.renewed(sent_at + lease.duration(), limit),
                None => state.period.checked(),
            }
        }
        if let Renewed::Asked { .. } = reply {
            let granted_in = self.state().period.granted_in;
            self.mark_asked(granted_in, limit);
        }
    }

    /// Records that the store asks the owner to release what it granted in this hold period, at the latest at `limit`. Without effect
    /// if it has been released since: a later hold was not asked.
    pub(crate) fn mark_asked(&self, granted_in: PeriodId, limit: Option<Instant>) {
        let newly_asked = self.state().mark_asked(granted_in, limit);
        if newly_asked {
            tracing::info!(lock = self.object.full_name(), owner = %self.field, "asked to release");
        }
        // The limit may be earlier than before.
        self.changed.notify_waiters();
    }

    /// Waits until the owner is asked to release the hold in its latest hold period, that of this call. Never returns if it is
    /// lost, released or handed off first.
    pub(crate) fn asked(self: &Arc<Hold>) -> impl Future<Output = ()> + Send + 'static + use<> {
        let hold = self.clone();
        let period = self.state().period.id;
        async move {
            let is_asked = || {
                let state = hold.state();
                (state.held_period() == Some(period) && state.period.is_asked()).then_some(())
            };
            wait_for(&hold.changed, is_asked).await;
        }
    }

    /// Returns the key of the requests from which a release has to remove the owner. `None`: the owner acquires the object no more,
    /// so a request that remains until it expires affects no hold. Behind an attempt, another one may follow.
    pub(crate) fn requests_key(&self) -> Option<String> {
        let acquires_again = {
            let state = self.state();
            state.acquires_again || state.ledger.has_attempt_in_flight()
        };
        acquires_again.then(|| self.object.requests_key())
    }

    /// Makes this the next generation after `lost`, a lost hold of the same owner. They take turns with their steps.
    ///
    /// The store may still keep the lost hold: a renewal may have been applied although its answer was
    /// lost. An acquisition that found the owner there would count as a repetition, with the fencing token
    /// of the lost hold. So this hold starts with a change that the store has not acknowledged: its first
    /// step is a full release.
    pub(crate) fn superseding(mut self, lost: &Arc<Hold>) -> Hold {
        let first = lost.first_generation.as_ref().unwrap_or(lost);
        self.first_generation = Some(first.clone());
        self.state().supersede(&mut lost.state());
        self
    }

    /// Records that the hold is one of several that are a RedLock.
    pub(crate) fn mark_red_lock_member(&self) {
        self.is_red_lock_member.store(true, Ordering::Relaxed);
    }

    /// Returns how this hold was lost, if it was.
    pub(crate) fn loss(&self) -> Option<Loss> {
        self.state().period.loss
    }

    /// Fails if the hold was lost.
    pub(crate) fn check_not_lost(&self) -> Result<()> {
        let loss = self.loss();
        loss.map_or(Ok(()), |loss| Err(self.lost_error(loss)))
    }

    /// Returns how long the hold is valid at least, without a renewal.
    pub(crate) fn valid_for(&self) -> Duration {
        self.valid_despite(Duration::ZERO)
    }

    /// The same, if the lease may end by `clock_drift` earlier in the store than here.
    pub(crate) fn valid_despite(&self, clock_drift: Duration) -> Duration {
        let now = Instant::now();
        self.state_at(|| now).valid_for(clock_drift, now)
    }

    /// Returns a function that says whether it is held in its latest hold period, that of this call.
    pub(crate) fn validity(self: &Arc<Hold>) -> Validity {
        let (hold, period) = (self.clone(), self.state().period.id);
        Arc::new(move || hold.state_at(Instant::now).held_period() == Some(period))
    }

    /// Returns whether both are generations of one owner's hold, and take turns with their steps.
    pub(crate) fn takes_turns_with(&self, other: &Hold) -> bool {
        std::ptr::eq(self.step_lock(), other.step_lock())
    }

    /// Marks the hold as lost and notifies once; the first reason is kept. Returns whether it was held
    /// before.
    ///
    /// Because of an answer of the store only in the [turn](Hold::turn) in which the step was sent. Out of turn, another step
    /// of the owner may be in flight, which has put a ticket in its place, and this would report a loss of the ticket's hold.
    /// [`Watchdog::suspect`](crate::watchdog::Watchdog::suspect) has the hold checked in its turn.
    pub(crate) fn mark_lost(&self, loss: Loss) -> bool {
        let newly_lost = self.state().mark_lost(loss);
        if newly_lost {
            self.notify_loss(loss);
        }
        newly_lost
    }

    /// Waits until the hold is lost in its latest hold period, that of this call. Never returns if it is released
    /// or handed off first.
    pub(crate) fn lost(self: &Arc<Hold>) -> impl Future<Output = ()> + Send + 'static + use<> {
        let hold = self.clone();
        let period = self.state().period.id;
        async move { hold.lost_in(period).await }
    }

    async fn lost_in(&self, period: PeriodId) {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            let end = {
                let state = self.state();
                match (state.period.loss, state.count) {
                    _ if state.period.id != period => None,
                    (Some(_), _) => return,
                    (None, 0) => None,
                    (None, _) => Some(state.period.next_loss().0),
                }
            };
            match end {
                // Without timers in this runtime, the watchdog, which has them, notifies.
                Some(end) => tokio::select! {
                    biased;
                    () = changed => {}
                    () = sleep_until(end) => {}
                },
                None => std::future::pending().await,
            }
        }
    }

    /// Waits until the owner holds the object in a hold period that started after `since`, whichever request
    /// acquired it.
    pub(crate) async fn held_after(&self, since: Option<PeriodId>) {
        let is_held = || self.state().held_period() > since;
        wait_for(&self.changed, || is_held().then_some(())).await;
    }

    /// Returns the lock that this hold shares with its earlier generations.
    fn step_lock(&self) -> &StepLock {
        let first = self.first_generation.as_ref();
        first.map_or(&self.step_lock, |first| &first.step_lock)
    }

    /// Takes the turn to send a step, if it is free.
    pub(crate) fn try_turn(&self) -> Option<StepTurn<'_>> {
        self.step_lock().try_lock().ok().map(StepTurn)
    }

    /// Waits for the turn to send a step. If a step cannot reach the store, the steps that wait behind it fail
    /// with its error. Otherwise each would take another response timeout to fail.
    pub(crate) async fn turn(&self) -> Result<StepTurn<'_>> {
        if let Some(turn) = self.try_turn() {
            return Ok(turn);
        }
        let begun = Instant::now();
        let turn = self.step_lock().lock().await;
        match turn.as_deref() {
            Some((failed, error)) if *failed >= begun => Err(error.clone()),
            _ => Ok(StepTurn(turn)),
        }
    }

    pub(crate) fn lost_error(&self, reason: Loss) -> Error {
        Error::Lost {
            name: self.object.name().to_owned(),
            reason,
        }
    }

    /// Returns the error that the store does not have the hold, with the reason if it is known: a
    /// loss that was reported before, or a limit that has passed.
    pub(crate) fn not_held_error(&self) -> Error {
        let reason = self.state().period.reason_if_not_held(Instant::now());
        self.lost_error(reason)
    }

    /// Returns when the current hold period began, if it has lasted for this long and is not registered yet. Then it counts as
    /// registered.
    pub(crate) fn begin_registration(&self, after: Duration) -> Option<Instant> {
        let now = Instant::now();
        self.state_at(|| now).begin_registration(after, now)
    }

    /// Accesses the watchdog's state of this hold.
    pub(crate) fn watchdog_state<R>(&self, access: impl FnOnce(&mut WatchdogState) -> R) -> R {
        access(&mut self.state.lock().watchdog)
    }

    pub(crate) fn snapshot(&self) -> HoldSnapshot {
        self.state().snapshot()
    }

    /// Locks the current state. A lease or limit that has ended is noticed at each access. Other methods of the hold must not
    /// be called while it is locked.
    pub(crate) fn state(&self) -> MutexGuard<'_, HoldState> {
        self.state_at(Instant::now)
    }

    /// The same, with a clock that is read only if there is something to lose.
    pub(crate) fn state_at(&self, now: impl FnOnce() -> Instant) -> MutexGuard<'_, HoldState> {
        let mut state = self.state.lock();
        if state.held_period().is_some()
            && state.expire(now())
            && let Some(loss) = state.period.loss
        {
            self.notify_loss(loss);
        }
        state
    }

    fn notify_loss(&self, loss: Loss) {
        let lock = self.object.full_name();
        match self.is_red_lock_member.load(Ordering::Relaxed) {
            true => tracing::warn!(lock, owner = %self.field, %loss,
                "a member of a RedLock was lost"),
            false => tracing::warn!(lock, owner = %self.field, %loss, "lost"),
        }
        self.metrics.lost(loss);
        self.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::locks::Reentrant;
    use crate::step::differential;
    use crate::test_prelude::SECOND;
    use crate::watchdog::renew_holds;

    fn hold() -> Hold {
        differential::hold(1, Reentrant::new("", "name"))
    }

    fn held(renewed: bool) -> Hold {
        let hold = hold();
        hold.add_guard(Instant::now() + 10 * SECOND, renewed, None)
            .unwrap();
        hold
    }

    #[tokio::test(start_paused = true)]
    async fn ended_lease_is_noticed_on_access() {
        let hold = held(true);
        let end = Instant::now() + 10 * SECOND;
        assert_eq!(hold.state().period.end, end);
        assert_eq!(hold.valid_for(), 10 * SECOND);
        assert!(hold.state().is_renewed());
        tokio::time::advance(4 * SECOND).await;
        hold.state().period.extend(Instant::now() + 8 * SECOND);
        hold.state().period.extend(Instant::now());
        assert_eq!(hold.state().period.end, end + 2 * SECOND);
        assert_eq!(hold.valid_for(), 8 * SECOND);
        assert_eq!(hold.state().period.longest, 10 * SECOND);
        tokio::time::advance(8 * SECOND).await;
        assert_eq!(hold.loss(), Some(Loss::LeaseEnded));
        let late = hold
            .add_guard(Instant::now() + SECOND, false, None)
            .unwrap_err();
        let reason = Loss::LeaseEnded;
        assert!(matches!(late, Error::Lost { name, reason: r } if name == "name" && r == reason));
        assert_eq!(hold.state().count, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn loss_is_reported_at_once_and_lease_end_on_time() {
        for (reported, takes) in [(true, SECOND), (false, 10 * SECOND)] {
            let hold = Arc::new(held(false));
            let begun = Instant::now();
            let lose = async {
                tokio::time::sleep(SECOND).await;
                assert!(
                    !reported || hold.mark_lost(Loss::NotHeld) && !hold.mark_lost(Loss::NotHeld)
                );
            };
            tokio::join!(hold.lost(), lose);
            assert_eq!(begun.elapsed(), takes);
            hold.lost().await;
            assert_eq!(begun.elapsed(), takes, "already lost");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn end_of_limit_is_reported_on_time_unless_fed() {
        let (hold, begun) = (Arc::new(held(true)), Instant::now());
        hold.start_limits(&HoldLimits {
            at_most: None,
            fed_every: Some(2 * SECOND),
        });
        let feed = async {
            tokio::time::sleep(SECOND).await;
            hold.feed();
        };
        tokio::join!(hold.lost(), feed);
        assert_eq!(begun.elapsed(), 3 * SECOND);
        let reason = Loss::NotFed { limit: 2 * SECOND };
        assert_eq!(hold.loss(), Some(reason));
        hold.feed();
        assert!(hold.valid_for().is_zero());
    }

    #[tokio::test(start_paused = true)]
    async fn released_hold_is_never_lost() {
        let hold = Arc::new(held(false));
        hold.state().remove_guard(false);
        let lost = tokio::time::timeout(20 * SECOND, hold.lost()).await;
        assert!(lost.is_err() && !hold.mark_lost(Loss::NotHeld));
    }

    #[tokio::test(start_paused = true)]
    async fn held_after_waits_for_later_hold_period() {
        let hold = held(false);
        let first = hold.state().held_period();
        hold.held_after(None).await;
        let early = tokio::time::timeout(SECOND, hold.held_after(first)).await;
        assert!(early.is_err(), "it is the same hold period");
        hold.state().remove_guard(false);
        let acquire = async {
            tokio::task::yield_now().await;
            hold.add_guard(Instant::now() + SECOND, false, None)
                .unwrap();
        };
        let both = async { tokio::join!(hold.held_after(first), acquire) };
        tokio::time::timeout(SECOND, both).await.unwrap();
    }

    #[test]
    fn supersede_marks_both_holds() {
        let lost = Arc::new(held(false));
        lost.mark_lost(Loss::NotHeld);
        let later = hold().superseding(&lost);
        assert!(lost.state().superseded);
        assert!(!later.state().ledger.is_settled());
    }

    /// Two steps wait behind a step that fails; a third starts later.
    #[tokio::test(start_paused = true)]
    async fn steps_waiting_behind_outage_fail_with_it() {
        let hold = hold();
        let mut first = hold.turn().await.unwrap();
        let fail = async {
            tokio::time::sleep(SECOND).await;
            let after = SECOND;
            first.record_result(&Err::<(), _>(Error::ResponseTimeout { after }));
            drop(first);
        };
        let behind = || async { hold.turn().await.map(drop) };
        let (one, two, ()) = tokio::join!(behind(), behind(), fail);
        for error in [one.unwrap_err(), two.unwrap_err()] {
            assert!(matches!(error, Error::ResponseTimeout { after } if after == SECOND));
        }
        tokio::time::advance(SECOND).await;
        // It sends its own step, and so does the one behind it: the outage was before.
        let third = hold.turn().await.unwrap();
        let (fourth, ()) = tokio::join!(behind(), async { drop(third) });
        fourth.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn refused_step_fails_alone() {
        let hold = hold();
        let mut first = hold.turn().await.unwrap();
        let fail = async {
            let name = "name".to_owned();
            first.record_result(&Err::<(), _>(Error::AlreadyHeld { name }));
            drop(first);
        };
        let (second, ()) = tokio::join!(hold.turn(), fail);
        second.unwrap();
    }

    #[test]
    fn lock_has_weight_one() {
        let hold = hold();
        assert_eq!(hold.kind.renewal(&hold).weight, 1);
    }

    #[test]
    fn renewal_names_key_owner_and_channel() {
        let hold = hold();
        let step = renew_holds(
            hold.kind.renewal(&hold).script,
            Some(Lease::WATCHDOG),
            &[&hold],
        );
        let args = crate::step::differential::arg_texts(&step);
        assert_eq!(args, ["30000", &hold.field, hold.object.channel()]);
        assert_eq!(step.keys()[..], [hold.object.key()]);
    }
}
