//! The state of one hold as the client knows it, without I/O or clock: its guards, its lease, and the
//! [ledger](Ledger) of its changes.
//!
//! A hold is lost once, for the first reason. [`HoldState::expire`] notices two reasons, the end of its lease and of a limit.
//! The second is a change, too: the store has to release the hold.

use std::time::Duration;

use tokio::time::Instant;

use super::fairness::NoHandoff;
use super::ledger::Ledger;
use super::period::{Period, PeriodId};
use crate::client_registry::RequestInfo;
use crate::environment::random_fraction;
use crate::error::Loss;
use crate::lease::Lease;
use crate::store::{Delivery, Route};

/// Where the watchdog's schedule has a hold.
pub(crate) type ScheduleSlot = usize;

/// What the watchdog knows about a hold, and each step of it may have to know.
#[derive(Default)]
pub(crate) struct WatchdogState {
    /// Its place in the schedule. Accessed only by the schedule, whose lock protects it, too.
    pub(crate) place: Option<ScheduleSlot>,
    /// Whether a renewal was sent, and none has been answered since: it may have extended the lease.
    pub(crate) unanswered: bool,
    /// Earliest time of the next renewal, after one has failed.
    pub(crate) not_before: Option<Instant>,
    /// Whether the store may have lost the hold. It is then renewed as soon as possible, or only checked if
    /// its lease is fixed. Cleared when a step that was sent later has found it.
    pub(crate) suspect: bool,
    /// How often there was a reason to check the hold.
    suspicions: u32,
    /// Whether its latest renewal in this hold period asked the server to report changes.
    pub(crate) tracked: bool,
    /// Whether the registry of clients has this hold period and its note.
    pub(crate) registered: bool,
    /// Whether it was lost at a limit, and no release has begun since.
    pub(crate) overdue: bool,
}

impl WatchdogState {
    /// Records a reason to check the hold.
    pub(crate) fn suspect(&mut self) {
        self.suspect = true;
        self.suspicions = self.suspicions.wrapping_add(1);
    }

    /// Returns the number of the latest reason to check the hold.
    pub(crate) fn latest_suspicion(&self) -> u32 {
        self.suspicions
    }

    /// Records that a step has found the hold that was sent when this was the latest reason.
    pub(crate) fn refuted(&mut self, suspicion: u32) {
        self.suspect &= self.suspicions != suspicion;
    }
}

/// When the watchdog renews holds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RenewalTimes {
    /// How long before the end of its lease a hold is renewed.
    pub(crate) margin: Duration,
    /// How long after its acquisition a hold is renewed for the first time, so that the server reports later changes.
    /// `None`: it does not.
    pub(crate) first_after: Option<Duration>,
    /// How long after the start of its hold period a hold is registered. `None`: it is not.
    pub(crate) registered_after: Option<Duration>,
}

/// When the watchdog has to look at a hold, and what it does then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Watch {
    pub(crate) due: Instant,
    pub(crate) action: WatchAction,
    /// When the hold is lost unless it is renewed, fed or released.
    pub(crate) end: Instant,
    /// When it is registered. `None`: it is, or is never.
    pub(crate) registers_at: Option<Instant>,
}

/// What the watchdog does with a hold when it is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WatchAction {
    /// Renews it, or somewhat earlier.
    Renew,
    /// Renews it, but not earlier: for the first time, or after a failed renewal.
    RenewOnTime,
    /// Only reports the end of its lease or of a limit.
    Expire,
    /// Releases it, because it was lost at a limit.
    Release,
}

/// The hold of a ticket in the store, which no client has.
#[derive(Debug, Clone)]
pub(crate) struct TicketHold {
    /// Its owner as the store knows it.
    pub(crate) field: Box<str>,
    /// The lease with which the ticket was made.
    pub(crate) lease: Lease,
}

/// The state of a hold.
pub(crate) struct HoldState {
    /// Number of guards.
    pub(crate) count: u32,
    /// Number of guards that require renewal of the lease.
    renewed: u32,
    /// What the registry of clients says about the request.
    pub(crate) request: RequestInfo,
    /// The ticket that the latest attempt adopts. It gets the hold back if the attempt does not add a guard.
    pub(crate) adopts: Option<Box<TicketHold>>,
    pub(crate) ledger: Ledger,
    /// The latest period; it may have ended.
    pub(crate) period: Period,
    /// Whether it was lost and replaced by a later hold of the same owner.
    pub(crate) superseded: bool,
    /// Whether a caller has the ids of these permits, with which others may release them.
    pub(crate) ids_are_shared: bool,
    /// Whether a request may acquire the object for this owner after a release: the caller has named
    /// the owner, a guard's request continues the hold, it settles an earlier attempt first, or the hold follows a lost one.
    pub(crate) acquires_again: bool,
    /// Whether a request has left what the store remembers of it, such as its place in a fair queue,
    /// to the owner's next request that waits.
    pub(crate) left_place: bool,
    pub(crate) watchdog: WatchdogState,
}

/// What a step of a hold depends on, at one moment. Smaller than the state, because futures contain it.
pub(crate) struct HoldSnapshot {
    /// The latest change: see [`Ledger`].
    pub(crate) latest: u64,
    /// Number of guards after that change.
    pub(crate) count: u32,
    pub(crate) is_lost: bool,
    pub(crate) superseded: bool,
    pub(crate) is_renewed: bool,
    pub(crate) is_asked: bool,
    pub(crate) is_settled: bool,
    pub(crate) has_attempt_in_flight: bool,
    pub(crate) maybe_released: bool,
    pub(crate) released_at: u64,
}

impl HoldSnapshot {
    /// Returns whether a full release may acquire the object for a waiter: the store has this hold, if any, no earlier step
    /// of it is in flight, and no other client asks for the object.
    pub(crate) fn may_pass_on(&self) -> bool {
        !self.is_lost && !self.is_asked && !self.maybe_released && !self.has_attempt_in_flight
    }

    /// Returns how a release is sent: behind an attempt that may be in flight.
    pub(crate) fn delivery(&self) -> Delivery {
        Delivery::on(match self.has_attempt_in_flight {
            true => Route::Acquisitions,
            false => Route::Commands,
        })
    }
}

impl HoldState {
    pub(super) fn new(now: Instant) -> HoldState {
        HoldState {
            count: 0,
            renewed: 0,
            request: RequestInfo::of_task(),
            adopts: None,
            ledger: Ledger::new(),
            period: Period::none(now),
            superseded: false,
            ids_are_shared: false,
            acquires_again: false,
            left_place: false,
            watchdog: WatchdogState::default(),
        }
    }

    /// Adds a guard after the store has granted the hold until `end`. Fails if the hold is lost, or if
    /// this would be its first guard and that has passed. The count is then unchanged.
    pub(super) fn add_guard(
        &mut self,
        end: Instant,
        renewed: bool,
        now: Instant,
    ) -> Result<(), Loss> {
        let lease = end.saturating_duration_since(now);
        match self.period.loss {
            Some(loss) => return Err(loss),
            None if self.count > 0 => {
                self.period.extend(end);
                self.period.longest = self.period.longest.max(lease);
                if renewed && self.renewed == 0 {
                    self.period.renew_before(end);
                }
            }
            None if lease.is_zero() => return Err(Loss::LeaseEnded),
            None => {
                self.period = self.period.granted(end, now);
                (self.watchdog.tracked, self.watchdog.suspect) = (false, false);
                self.adopts = None;
            }
        }
        self.count += 1;
        self.renewed += u32::from(renewed);
        self.period.passes_on = false;
        self.left_place = false;
        Ok(())
    }

    /// Records that a request takes over what passed on, with this lease. It is renewed again, however long a lease a check has
    /// found meanwhile.
    pub(crate) fn taken_over(&mut self, lease: Duration, now: Instant) {
        self.period.passes_on = false;
        if self.renewed > 0 {
            self.period.renew_before(now + lease);
        }
    }

    /// Records that the store has granted a re-entry until `end`, but no replica has confirmed it. After a failover the
    /// next master may have what the owner had before. It is asked at once to renew a hold that is renewed, so that
    /// this counts as long as a renewal, until `renewed`. A hold with a fixed lease is only checked there.
    pub(crate) fn reentry_unconfirmed(&mut self, end: Instant, renewed: Instant) {
        self.period.may_end = self.period.may_end.max(end);
        if self.is_renewed() {
            self.period.extend(end.min(renewed));
        }
    }

    /// Records that the store asks the owner to release what it granted in this hold period, at the latest at `limit`. Of several
    /// requests the earliest limit counts. Returns whether the owner was not asked before; false also if the hold has ended.
    pub(super) fn mark_asked(&mut self, granted_in: PeriodId, limit: Option<Instant>) -> bool {
        self.has(granted_in) && self.period.ask(limit)
    }

    /// Returns whether the owner still holds what the store has granted in this period.
    fn has(&self, granted_in: PeriodId) -> bool {
        self.held_period().is_some() && self.period.granted_in == granted_in
    }

    /// Removes a guard. Returns the number of this change.
    pub(crate) fn remove_guard(&mut self, renewed: bool) -> u64 {
        self.count = self.count.saturating_sub(1);
        self.renewed = self.renewed.saturating_sub(u32::from(renewed));
        self.period.passes_on = false;
        self.ledger.guard_removed()
    }

    /// Removes a guard whose hold the store keeps on purpose. Returns the number of this change. Fails if the hold is lost.
    pub(crate) fn leave_guard(&mut self, renewed: bool) -> Result<u64, Loss> {
        if let Some(loss) = self.period.loss {
            return Err(loss);
        }
        let change = self.remove_guard(renewed);
        self.ledger.kept_in_store(change);
        Ok(change)
    }

    /// Returns why the hold cannot become a ticket, if it cannot.
    pub(crate) fn why_not_movable(&self, now: Instant) -> Option<&'static str> {
        if self.count != 1 {
            Some("its owner has several guards of it; release the others first")
        } else if self.period.retained_for(now).is_some() {
            Some("it is held for a minimum time (`at_least`)")
        } else {
            None
        }
    }

    /// Begins the hold period of another request, which takes over the only guard. The hold must be
    /// released instead if a caller has its ids, it is not renewed, it is retained, its owner was
    /// asked to release it, less than half of the lease is left, the store may have lost it or have
    /// another count, or other clients wait.
    pub(crate) fn local_handoff(
        &mut self,
        lease: Duration,
        may_check_first: bool,
        released_at: Instant,
        now: Instant,
    ) -> Result<bool, NoHandoff> {
        let has_one_guard = self.count == 1 && self.renewed == 1 && self.period.loss.is_none();
        let remaining = self.period.left(now);
        let is_needed_elsewhere = self.period.is_asked() || self.period.retained_for(now).is_some();
        let is_refused = self.ids_are_shared
            || is_needed_elsewhere
            || self.needs_check()
            || !self.ledger.is_settled()
            || !has_one_guard;
        if is_refused || remaining < lease / 2 {
            return Err(NoHandoff::Release);
        }
        let chain = &mut self.period.chain;
        let handoff = chain.local_handoff(may_check_first, released_at, random_fraction);
        match handoff {
            Ok(_) => self.period.pass_on(now),
            Err(NoHandoff::CheckFirst) => self.period.begin_to_pass_on(),
            Err(NoHandoff::Release) => {}
        }
        handoff
    }

    pub(super) fn snapshot(&self) -> HoldSnapshot {
        HoldSnapshot {
            latest: self.ledger.latest(),
            count: self.count,
            is_lost: self.period.loss.is_some(),
            superseded: self.superseded,
            is_renewed: self.is_renewed(),
            is_asked: self.period.is_asked(),
            is_settled: self.ledger.is_settled(),
            has_attempt_in_flight: self.ledger.has_attempt_in_flight(),
            maybe_released: self.ledger.maybe_released(),
            released_at: self.ledger.released_at(),
        }
    }

    /// Returns whether the watchdog renews it.
    pub(crate) fn is_renewed(&self) -> bool {
        self.renewed > 0 && self.period.loss.is_none() && !self.period.passes_on
    }

    /// Records the answer to a release: see [`Ledger::release_answered`].
    pub(crate) fn release_answered(&mut self, latest: u64, fully: bool) {
        self.ledger.release_answered(latest, fully);
        self.forget_settled_adoption();
    }

    /// Records that an acquisition is about to be sent for an owner with that many guards. The first one of a
    /// hold period is not asked to release what its owner had before. A re-entry is, also if the other guards
    /// are released before it is answered: the store still has the request.
    pub(crate) fn begin_acquisition(&mut self, guards: u32) -> u64 {
        if guards == 0 {
            self.period.begin_acquisition();
        }
        self.ledger.begin_attempt()
    }

    /// Records that a release of another owner is about to be sent that may acquire the object for this one, with this
    /// lease. Returns the number of this change. `None`: the owner has a hold, or must settle one first.
    pub(crate) fn begin_handoff(&mut self, lease: Duration) -> Option<u64> {
        let is_idle = self.count == 0 && self.period.loss.is_none() && self.ledger.is_settled();
        is_idle.then(|| {
            self.period.longest = self.period.longest.max(lease);
            self.begin_acquisition(0)
        })
    }

    /// Records that the store has acquired the object for this owner with that change. Returns false if a later change
    /// may have released it.
    pub(crate) fn accept_handoff(&mut self, change: u64) -> bool {
        let is_latest = self.ledger.is_latest_attempt(change);
        if is_latest {
            self.attempt_answered(change);
        }
        is_latest
    }

    /// Records that this acquisition has been answered, or was never sent.
    pub(crate) fn attempt_answered(&mut self, change: u64) {
        self.ledger.attempt_answered(change);
        self.forget_settled_adoption();
    }

    /// After an answer about all changes, the ticket has its hold back, or never lost it.
    fn forget_settled_adoption(&mut self) {
        if self.ledger.is_settled() {
            self.adopts = None;
        }
    }

    /// Records that a release is about to be sent: see [`Ledger::begin_release`].
    pub(crate) fn begin_release(&mut self, keep: u32) {
        self.ledger.begin_release();
        if keep == 0 {
            self.watchdog.overdue = false;
        }
    }

    /// Replaces `earlier`: see [`Hold::superseding`](super::Hold::superseding).
    pub(super) fn supersede(&mut self, earlier: &mut HoldState) {
        earlier.superseded = true;
        self.acquires_again = true;
        self.ledger = Ledger::after_loss(&earlier.ledger);
        self.period = earlier.period.after_loss(self.period.began);
    }

    /// Returns how long the hold is valid at least: see [`Period::valid_for`].
    pub(super) fn valid_for(&self, clock_drift: Duration, now: Instant) -> Duration {
        self.held_period()
            .map_or(Duration::ZERO, |_| self.period.valid_for(clock_drift, now))
    }

    /// Returns how long the store has the hold at most, after a guard with this lease was removed.
    /// `renewal`: the lease that a renewal asks for.
    pub(crate) fn longest_time_in_store(
        &self,
        renewed: bool,
        lease: Duration,
        renewal: Duration,
        now: Instant,
    ) -> Duration {
        let end = self.period.latest_end();
        // A step that was not answered may have extended it.
        let attempt = (renewed || self.ledger.has_attempt_in_flight()).then_some(lease);
        let renewal = self.watchdog.unanswered.then_some(renewal);
        let extended = attempt.max(renewal).unwrap_or_default();
        end.saturating_duration_since(now).max(extended)
    }

    /// Returns the owner's period, if it holds the object now.
    pub(crate) fn held_period(&self) -> Option<PeriodId> {
        (self.count > 0 && self.period.loss.is_none()).then_some(self.period.id)
    }

    /// Marks the hold as lost. Returns whether it was held and not lost before.
    pub(super) fn mark_lost(&mut self, loss: Loss) -> bool {
        let newly_lost = self.held_period().is_some();
        if newly_lost {
            self.period.loss = Some(loss);
            self.watchdog.overdue = loss.is_at_limit();
            if loss.is_at_limit() {
                self.ledger.lost_at_limit();
            }
        }
        newly_lost
    }

    /// Handles an answer out of turn that the store does not have what it granted in this hold period: the hold does not pass
    /// on before it was checked. Returns false if it has ended since, so that the answer says nothing about a later hold period.
    pub(crate) fn doubt(&mut self, granted_in: PeriodId) -> bool {
        let is_same = self.has(granted_in);
        if is_same {
            self.watchdog.suspect();
        }
        is_same
    }

    /// Returns whether the store may have lost the hold, as far as is known.
    pub(crate) fn needs_check(&self) -> bool {
        self.watchdog.suspect || self.watchdog.not_before.is_some()
    }

    /// Marks the hold as lost if its lease or a limit has ended. Returns whether it did so.
    pub(super) fn expire(&mut self, now: Instant) -> bool {
        let (end, loss) = self.period.next_loss();
        now >= end && self.mark_lost(loss)
    }

    /// Sets the note of the request, which the registry gets again. Without one, an owner that re-enters keeps its note.
    pub(crate) fn set_note(&mut self, note: Option<Box<str>>) {
        if note.is_some() || self.count == 0 {
            self.request.note = note;
            self.watchdog.registered = false;
        }
    }

    /// Returns when the current hold period began, if it is to be registered now; then it counts as registered.
    pub(super) fn begin_registration(&mut self, after: Duration, now: Instant) -> Option<Instant> {
        self.held_period()?;
        let is_due = !self.watchdog.registered && now >= self.period.began + after;
        self.watchdog.registered |= is_due;
        is_due.then_some(self.period.began)
    }

    /// Returns whether a renewal of the hold may be sent now, or a check (`renews` is false). Then
    /// it counts as sent.
    pub(crate) fn begin_renewal(&mut self, renews: bool) -> bool {
        let is_due = self.held_period().is_some() && self.is_renewed() == renews;
        self.watchdog.unanswered |= is_due && renews;
        is_due
    }

    /// Returns when the watchdog has to look at this hold, and what it does then. `None` if there is
    /// nothing to watch.
    pub(crate) fn next_watch(&self, times: RenewalTimes, now: Instant) -> Option<Watch> {
        let (end, _) = self.period.next_loss();
        if self.watchdog.overdue {
            return Some(Watch {
                due: now,
                action: WatchAction::Release,
                end,
                registers_at: None,
            });
        }
        self.held_period()?;
        let is_renewed = self.is_renewed();
        let WatchdogState {
            suspect,
            not_before,
            tracked,
            registered,
            ..
        } = self.watchdog;
        let (due, action) = match not_before {
            // After a failure: when the pause is over, or at the end of the lease or of a limit if that is earlier.
            Some(again) if is_renewed || suspect => (again.min(end), WatchAction::RenewOnTime),
            None if suspect => (now, WatchAction::Renew),
            _ => {
                // A re-entry postpones neither: it could extend a hold that was revoked again and again.
                let regular = match is_renewed {
                    true => {
                        let due = self.period.checked_end.checked_sub(times.margin);
                        Some((due.unwrap_or(now), WatchAction::Renew))
                    }
                    false => (self.period.checked_end < self.period.end)
                        .then_some((self.period.checked_end, WatchAction::RenewOnTime)),
                };
                let first_after = times.first_after.filter(|_| !tracked);
                let first = first_after.map(|after| self.period.chain.granted_at() + after);
                let first = first.map(|due| (due, WatchAction::RenewOnTime));
                let all = [Some((end, WatchAction::Expire)), regular, first];
                let all = all.into_iter().flatten();
                all.min_by_key(|(due, _)| *due)?
            }
        };
        let registered_after = times.registered_after.filter(|_| !registered);
        Some(Watch {
            due,
            action,
            end,
            registers_at: registered_after.map(|after| self.period.began + after),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hold::{Chain, HoldLimits, OtherClients, Yields};
    use crate::test_prelude::SECOND;

    /// Of servers that do not report changes.
    const TIMES: RenewalTimes = RenewalTimes {
        margin: Duration::from_secs(6),
        first_after: None,
        registered_after: None,
    };

    /// A hold with one guard, acquired for ten seconds, and the time of its acquisition.
    fn held(renewed: bool) -> (HoldState, Instant) {
        let now = Instant::now();
        let mut state = HoldState::new(now);
        state.add_guard(now + 10 * SECOND, renewed, now).unwrap();
        (state, now)
    }

    fn next_watch(
        state: &HoldState,
        times: RenewalTimes,
        now: Instant,
    ) -> Option<(Instant, WatchAction)> {
        let watch = state.next_watch(times, now)?;
        Some((watch.due, watch.action))
    }

    /// A hold whose first attempt the store has acknowledged.
    fn acquired() -> HoldState {
        let (mut state, _) = held(false);
        let attempt = state.ledger.begin_attempt();
        state.attempt_answered(attempt);
        state
    }

    #[test]
    fn expired_grant_adds_no_guard() {
        let now = Instant::now();
        let mut state = HoldState::new(now);
        assert_eq!(state.add_guard(now, true, now), Err(Loss::LeaseEnded));
        assert_eq!((state.count, state.period.loss), (0, None));
        assert!(!state.is_renewed());
        state.add_guard(now + SECOND, true, now).unwrap();
        assert_eq!((state.count, state.period.end), (1, now + SECOND));
    }

    #[test]
    fn later_grant_never_shortens_hold() {
        let (mut state, now) = held(false);
        state.add_guard(now, false, now).unwrap();
        state.add_guard(now + SECOND, false, now).unwrap();
        assert_eq!(
            (state.period.end, state.period.longest),
            (now + 10 * SECOND, 10 * SECOND)
        );
        let end = now + 12 * SECOND;
        state.add_guard(end, false, now + 9 * SECOND).unwrap();
        assert_eq!((state.period.end, state.period.longest), (end, 10 * SECOND));
        assert_eq!(state.count, 4);
    }

    #[test]
    fn new_hold_period_ends_with_its_own_grant() {
        let (mut state, now) = held(false);
        let first = state.held_period();
        state.remove_guard(false);
        assert_eq!((state.held_period(), state.count), (None, 0));
        let latest = Some(PeriodId::latest());
        state.add_guard(now + SECOND, false, now).unwrap();
        assert_eq!(
            (state.period.end, state.period.longest),
            (now + SECOND, SECOND)
        );
        assert!(state.held_period() > first && state.held_period() > latest);
    }

    fn limited(at_most: Duration) -> HoldLimits {
        HoldLimits {
            at_most: Some(at_most),
            fed_every: None,
        }
    }

    /// The step may take effect while another request of the client would hold the object.
    #[test]
    fn hold_is_not_handed_over_while_it_may_become_a_ticket() {
        let (mut state, now) = held(true);
        let attempt = state.ledger.begin_attempt();
        state.attempt_answered(attempt);
        let change = state.ledger.begin_attempt();
        assert!(state.local_handoff(10 * SECOND, false, now, now).is_err());
        assert!(state.ledger.must_be_settled());
        state.release_answered(change, false);
        assert!(state.local_handoff(10 * SECOND, false, now, now).is_ok());
    }

    #[test]
    fn earlier_end_of_lease_and_limit_counts() {
        for (limit, loss) in [
            (11 * SECOND, Loss::LeaseEnded),
            (10 * SECOND, Loss::HeldTooLong { limit: 10 * SECOND }),
            (9 * SECOND, Loss::HeldTooLong { limit: 9 * SECOND }),
        ] {
            let (mut state, now) = held(true);
            state.period.start_limits(&limited(limit), now);
            let end = now + limit.min(10 * SECOND);
            assert_eq!(state.period.next_loss(), (end, loss));
            assert_eq!(state.valid_for(Duration::ZERO, now), end - now);
            // The clock of the store does not decide when a limit ends.
            let drift = limit.min(9 * SECOND);
            assert_eq!(state.valid_for(SECOND, now), drift);
            assert!(!state.expire(end - MILLI) && state.expire(end));
            assert_eq!(state.period.loss, Some(loss));
        }
    }

    /// An answer that arrives late is about an earlier hold.
    #[test]
    fn only_hold_that_was_asked_is_revoked() {
        let (mut state, now) = held(true);
        let first = state.period.granted_in;
        assert!(state.mark_asked(first, None) && state.period.is_asked());
        assert!(!state.mark_asked(first, Some(now + SECOND)));
        assert_eq!(state.period.next_loss(), (now + SECOND, Loss::Revoked));
        state.remove_guard(true);
        assert!(!state.mark_asked(first, Some(now)));
        state.begin_acquisition(0);
        state.add_guard(now + 10 * SECOND, true, now).unwrap();
        assert!(!state.period.is_asked() && !state.mark_asked(first, Some(now)));
        assert_eq!(
            state.period.next_loss(),
            (now + 10 * SECOND, Loss::LeaseEnded)
        );
        assert!(!state.period.is_asked());
    }

    #[test]
    fn revoked_hold_is_not_extended_beyond_limit_but_checked_as_before() {
        let (mut state, now) = held(true);
        let limit = now + 15 * SECOND;
        state.mark_asked(state.period.granted_in, Some(limit));
        let later = now + 9 * SECOND;
        state.period.renewed(later + 10 * SECOND, Some(limit));
        assert_eq!(state.period.end, limit);
        let due = (later + 4 * SECOND, WatchAction::Renew);
        assert_eq!(next_watch(&state, TIMES, later), Some(due));
        let lease = Lease::new(10 * SECOND).unwrap();
        assert_eq!(
            state.period.limit_lease(lease, later).duration(),
            6 * SECOND
        );
        assert_eq!(state.period.limit_lease(lease, now), lease);
        // Also if the other guard is released before the re-entry is answered.
        state.begin_acquisition(1);
        state.remove_guard(true);
        assert_eq!(
            state.period.limit_lease(lease, later).duration(),
            6 * SECOND
        );
        state.add_guard(limit, true, later).unwrap();
        assert!(state.period.is_asked());
        assert_eq!(state.period.next_loss(), (limit, Loss::Revoked));
    }

    /// The extension does not report requests to release the hold.
    #[test]
    fn re_entry_does_not_postpone_check() {
        for renewed in [false, true] {
            let (mut state, now) = held(renewed);
            state
                .add_guard(now + 14 * SECOND, renewed, now + 4 * SECOND)
                .unwrap();
            let due = match renewed {
                true => (now + 4 * SECOND, WatchAction::Renew),
                false => (now + 10 * SECOND, WatchAction::RenewOnTime),
            };
            assert_eq!(next_watch(&state, TIMES, now), Some(due));
            state.period.checked();
            assert!(next_watch(&state, TIMES, now).unwrap().0 > due.0);
        }
    }

    /// The store still has the hold, unless its lease has ended.
    #[test]
    fn loss_at_limit_must_be_released() {
        let (mut state, now) = held(true);
        state.period.start_limits(&limited(SECOND), now);
        assert_eq!(
            next_watch(&state, TIMES, now),
            Some((now + SECOND, WatchAction::Expire))
        );
        let later = now + 2 * SECOND;
        assert!(!state.ledger.must_be_settled() && state.expire(later));
        assert!(state.ledger.must_be_settled());
        assert_eq!(
            next_watch(&state, TIMES, later),
            Some((later, WatchAction::Release))
        );
        state.begin_release(0);
        assert_eq!(next_watch(&state, TIMES, later), None);
        state.release_answered(state.ledger.latest(), false);
        assert!(!state.ledger.must_be_settled());
        let (mut expired, now) = held(true);
        assert!(expired.expire(now + 10 * SECOND) && !expired.ledger.must_be_settled());
        assert_eq!(next_watch(&expired, TIMES, now), None);
    }

    #[test]
    fn failed_renewal_is_not_retried_after_limit() {
        let (mut state, now) = held(true);
        state.period.start_limits(&limited(SECOND), now);
        state.watchdog.not_before = Some(now + 2 * SECOND);
        let end = Some((now + SECOND, WatchAction::RenewOnTime));
        assert_eq!(next_watch(&state, TIMES, now), end);
        assert_eq!(state.next_watch(TIMES, now).unwrap().end, now + SECOND);
    }

    /// Also by a handoff, which begins one.
    #[test]
    fn limits_end_with_hold_period() {
        let (mut state, now) = acquired_alone();
        state.period.start_limits(&limited(SECOND), now);
        let later = now + 2 * MILLI;
        assert!(state.local_handoff(LEASE, false, later, later).is_ok());
        assert_eq!(state.period.next_loss(), (now + LEASE, Loss::LeaseEnded));
        state.period.start_limits(&limited(SECOND), later);
        assert_eq!(state.period.next_loss().0, later + SECOND);
        state.remove_guard(true);
        assert!(!state.expire(later + SECOND), "it is released");
        state.add_guard(now + LEASE, true, later).unwrap();
        assert_eq!(state.period.next_loss(), (now + LEASE, Loss::LeaseEnded));
    }

    #[test]
    fn lost_hold_accepts_no_guard() {
        let (mut state, now) = held(true);
        assert!(state.is_renewed());
        assert!(state.mark_lost(Loss::NotHeld));
        assert!(!state.mark_lost(Loss::LeaseEnded), "the first reason stays");
        assert_eq!(state.period.loss, Some(Loss::NotHeld));
        assert_eq!(state.held_period(), None);
        assert_eq!(state.valid_for(Duration::ZERO, now), Duration::ZERO);
        assert!(!state.is_renewed());
        let again = state.add_guard(now + 20 * SECOND, true, now);
        assert_eq!((again, state.count), (Err(Loss::NotHeld), 1));
    }

    /// An answer may arrive after the hold was released, and acquired again.
    #[test]
    fn late_answer_puts_no_later_hold_in_doubt() {
        let (mut state, now) = held(true);
        let granted_in = state.period.granted_in;
        state.remove_guard(true);
        assert!(!state.doubt(granted_in) && !state.needs_check());
        state.add_guard(now + SECOND, true, now).unwrap();
        assert!(!state.doubt(granted_in) && !state.needs_check());
        // A hold that was handed off is the same in the store.
        let (mut state, now) = held(true);
        let granted_in = state.period.granted_in;
        state.local_handoff(SECOND, false, now, now).unwrap();
        assert!(state.doubt(granted_in) && state.needs_check());
        assert!(state.local_handoff(SECOND, false, now, now).is_err());
        // A doubt ends with the hold.
        state.remove_guard(true);
        state.add_guard(now + SECOND, true, now).unwrap();
        assert!(!state.needs_check());
        state.mark_lost(Loss::NotHeld);
        assert!(!state.doubt(state.period.granted_in));
    }

    #[test]
    fn released_hold_cannot_be_lost() {
        let (mut state, now) = held(false);
        state.remove_guard(false);
        assert!(!state.mark_lost(Loss::NotHeld) && !state.expire(now + 10 * SECOND));
        assert_eq!(
            (state.period.loss, state.valid_for(Duration::ZERO, now)),
            (None, Duration::ZERO)
        );
    }

    #[test]
    fn lease_ends_exactly_at_its_end() {
        let (mut state, now) = held(false);
        let millis = Duration::from_millis(1);
        assert!(!state.expire(now + 10 * SECOND - millis));
        assert_eq!(
            state.valid_for(Duration::ZERO, now + 10 * SECOND - millis),
            millis
        );
        assert!(state.expire(now + 10 * SECOND));
        assert_eq!(state.period.loss, Some(Loss::LeaseEnded));
        assert!(!state.expire(now + 11 * SECOND), "noticed before");
    }

    #[test]
    fn hold_is_renewed_while_any_guard_requires_it() {
        let (mut state, now) = held(false);
        assert!(!state.is_renewed());
        state.add_guard(now + SECOND, true, now).unwrap();
        state.add_guard(now + SECOND, true, now).unwrap();
        state.remove_guard(true);
        assert!(state.is_renewed());
        state.remove_guard(false);
        assert!(state.is_renewed());
        state.remove_guard(true);
        assert!(!state.is_renewed());
    }

    #[test]
    fn handoff_is_accepted_only_as_latest_change() {
        let begin = || {
            let mut state = acquired();
            assert_eq!(state.begin_handoff(SECOND), None, "it is held");
            state.remove_guard(false);
            assert_eq!(state.begin_handoff(SECOND), None, "it must be settled");
            state.release_answered(state.ledger.latest(), true);
            let change = state.begin_handoff(60 * SECOND).unwrap();
            assert!(state.ledger.must_be_settled() && state.period.longest == 60 * SECOND);
            (state, change)
        };
        let (mut state, change) = begin();
        assert!(state.accept_handoff(change) && !state.ledger.must_be_settled());
        assert!(!state.accept_handoff(change));
        for later_step in [
            |state: &mut HoldState| state.ledger.release_unanswered(0),
            |state: &mut HoldState| state.release_answered(state.ledger.latest(), true),
            |state: &mut HoldState| assert!(state.ledger.begin_attempt() > 0),
        ] {
            let (mut state, change) = begin();
            later_step(&mut state);
            assert!(!state.accept_handoff(change));
        }
    }

    #[test]
    fn successor_of_lost_hold_starts_with_release() {
        let (mut lost, now) = held(true);
        lost.mark_lost(Loss::NotHeld);
        let mut later = HoldState::new(now);
        later.supersede(&mut lost);
        assert!(lost.superseded);
        assert!(!later.ledger.is_settled() && !later.ledger.has_attempt_in_flight());
        assert!(!later.superseded);
        assert_eq!(later.period.longest, 10 * SECOND);
    }

    #[test]
    fn renewed_hold_is_due_early_and_fixed_lease_at_end() {
        let (mut state, now) = held(false);
        let end = now + 10 * SECOND;
        assert_eq!(
            next_watch(&state, TIMES, now),
            Some((end, WatchAction::Expire))
        );
        state.add_guard(now + 8 * SECOND, true, now).unwrap();
        let due = now + 2 * SECOND;
        assert_eq!(
            next_watch(&state, TIMES, now),
            Some((due, WatchAction::Renew))
        );
        assert_eq!(state.next_watch(TIMES, now).unwrap().end, end);
        state.mark_lost(Loss::NotHeld);
        assert_eq!(next_watch(&state, TIMES, now), None);
    }

    /// So that the server reports changes from then on. It must not be renewed earlier: most holds are released before.
    #[test]
    fn first_renewal_is_on_time_if_server_reports_changes() {
        let times = RenewalTimes {
            first_after: Some(SECOND),
            ..TIMES
        };
        for renewed in [false, true] {
            let (mut state, now) = held(renewed);
            let first = Some((now + SECOND, WatchAction::RenewOnTime));
            assert_eq!(next_watch(&state, times, now), first);
            state.watchdog.tracked = true;
            let regular = match renewed {
                true => (now + 4 * SECOND, WatchAction::Renew),
                false => (state.period.end, WatchAction::Expire),
            };
            assert_eq!(next_watch(&state, times, now), Some(regular));
            state.remove_guard(renewed);
            state.add_guard(now + 10 * SECOND, renewed, now).unwrap();
            assert_eq!(
                next_watch(&state, times, now),
                first,
                "the next hold period"
            );
            let (state, now) = (HoldState::new(now), now);
            assert_eq!(next_watch(&state, times, now), None);
        }
        // One that ends before, or whose regular renewal is earlier.
        let mut state = HoldState::new(Instant::now());
        let now = Instant::now();
        state.add_guard(now + SECOND, true, now).unwrap();
        let (due, watch) = next_watch(&state, times, now).unwrap();
        assert!(due < now + SECOND && watch == WatchAction::Renew);
    }

    #[test]
    fn hold_period_is_registered_once() {
        let times = RenewalTimes {
            registered_after: Some(SECOND),
            ..TIMES
        };
        let (mut state, now) = held(false);
        let registers_at = |state: &HoldState| state.next_watch(times, now).unwrap().registers_at;
        assert_eq!(registers_at(&state), Some(now + SECOND));
        let early = now + SECOND - MILLI;
        assert_eq!(state.begin_registration(SECOND, early), None);
        let begun = state.begin_registration(SECOND, now + SECOND);
        assert_eq!(begun, Some(now));
        assert_eq!(state.begin_registration(SECOND, now + 2 * SECOND), None);
        assert_eq!(registers_at(&state), None);
        state.remove_guard(false);
        state.watchdog.registered = false;
        assert_eq!(state.begin_registration(SECOND, now + 2 * SECOND), None);
    }

    /// The time of the next holder counts from then on.
    #[test]
    fn handed_off_hold_is_registered_later() {
        let (mut state, now) = acquired_alone();
        let later = now + 5 * MILLI;
        assert!(state.local_handoff(LEASE, false, later, later).is_ok());
        assert_eq!(state.begin_registration(SECOND, now + SECOND), None);
        let begun = state.begin_registration(SECOND, later + SECOND);
        assert_eq!(begun, Some(later));
    }

    #[test]
    fn renewal_begins_only_as_planned_and_while_held() {
        for renews in [false, true] {
            let (mut state, _) = held(renews);
            assert!(!state.begin_renewal(!renews) && !state.watchdog.unanswered);
            assert!(state.begin_renewal(renews) && state.watchdog.unanswered == renews);
            state.remove_guard(renews);
            assert!(!state.begin_renewal(renews));
        }
    }

    #[test]
    fn only_a_renewal_without_answer_makes_the_end_in_the_store_unknown() {
        for renews in [false, true] {
            let (mut state, now) = held(renews);
            // The last guard has a shorter lease than those that are renewed.
            let rest = |state: &HoldState| state.longest_time_in_store(false, SECOND, LEASE, now);
            assert_eq!(rest(&state), 10 * SECOND);
            assert!(state.begin_renewal(renews));
            assert_eq!(rest(&state), if renews { LEASE } else { 10 * SECOND });
            // A re-entry asked for more, and no release shortens that.
            state.period.extend(now + 2 * LEASE);
            assert_eq!(rest(&state), 2 * LEASE);
        }
    }

    #[test]
    fn released_hold_is_not_watched() {
        let (mut state, now) = held(true);
        state.remove_guard(true);
        state.watchdog.suspect = true;
        assert_eq!(next_watch(&state, TIMES, now), None);
    }

    #[test]
    fn suspect_hold_is_due_now_even_with_fixed_lease() {
        for renewed in [false, true] {
            let (mut state, now) = held(renewed);
            state.watchdog.suspect = true;
            assert_eq!(
                next_watch(&state, TIMES, now),
                Some((now, WatchAction::Renew))
            );
        }
    }

    #[test]
    fn failed_renewal_is_retried_after_pause_or_at_lease_end() {
        let (mut state, now) = held(true);
        let end = now + 10 * SECOND;
        state.watchdog.suspect = true;
        for (pause, due) in [(SECOND, now + SECOND), (11 * SECOND, end)] {
            state.watchdog.not_before = Some(now + pause);
            assert_eq!(
                next_watch(&state, TIMES, now),
                Some((due, WatchAction::RenewOnTime))
            );
        }
    }

    const LEASE: Duration = Duration::from_secs(30);
    const MILLI: Duration = Duration::from_millis(1);

    /// A hold that may pass to another request, and the time of its acquisition.
    fn acquired_alone() -> (HoldState, Instant) {
        let now = Instant::now();
        let mut state = HoldState::new(now);
        let attempt = state.ledger.begin_attempt();
        state.add_guard(now + LEASE, true, now).unwrap();
        state.attempt_answered(attempt);
        (state, now)
    }

    /// Passes a hold on. Returns whether the store is asked; `None` if it has to be released.
    fn asks(state: &mut HoldState, now: Instant) -> Option<bool> {
        state.local_handoff(LEASE, false, now, now).ok()
    }

    #[test]
    fn handoff_begins_hold_period_of_same_guard() {
        let (mut state, now) = acquired_alone();
        let first = state.held_period();
        assert_eq!(asks(&mut state, now), Some(false));
        assert!(state.held_period() > first);
        assert_eq!((state.count, state.period.end), (1, now + LEASE));
        assert!(!state.is_renewed() && state.ledger.is_settled());
        state.taken_over(LEASE, now);
        assert!(state.is_renewed());
    }

    #[test]
    fn hold_is_not_handed_over_if_store_or_caller_may_differ() {
        let refusals: [fn(&mut HoldState); 9] = [
            |state| state.ids_are_shared = true,
            |state| _ = state.period.ask(None),
            |state| state.watchdog.suspect = true,
            |state| state.watchdog.not_before = Some(state.period.end),
            // It has two guards, or none that is renewed.
            |state| {
                state
                    .add_guard(state.period.end, false, state.period.end - LEASE)
                    .unwrap()
            },
            |state| state.renewed = 0,
            |state| assert!(state.mark_lost(Loss::NotHeld)),
            // A step has not been answered.
            |state| state.ledger.release_unanswered(1),
            |state| assert!(state.ledger.begin_attempt() > 0),
        ];
        for (i, refuse) in refusals.into_iter().enumerate() {
            let (mut state, now) = acquired_alone();
            refuse(&mut state);
            let period = state.period.id;
            assert_eq!(asks(&mut state, now), None, "{i}");
            assert_eq!(state.period.id, period);
        }
    }

    #[test]
    fn hold_is_handed_off_while_half_of_lease_is_left() {
        for (passed, is_handed_off) in [(LEASE / 2, true), (LEASE / 2 + MILLI, false)] {
            let (mut state, now) = acquired_alone();
            // It was known until now that no other client waits.
            state.period.chain = Chain::new(now + passed);
            assert_eq!(asks(&mut state, now + passed).is_some(), is_handed_off);
        }
    }

    #[test]
    fn hold_is_released_if_other_clients_wait() {
        let (mut state, now) = acquired_alone();
        let others = OtherClients {
            count: 3,
            in_queue: true,
        };
        state.period.chain.answered(now, Some(others), now);
        let yields = state.period.chain.yields(now);
        assert_eq!((yields.to, asks(&mut state, now)), (others, None));
        // The next grant begins a new chain of handoffs.
        state.remove_guard(true);
        state.release_answered(state.ledger.latest(), true);
        state.add_guard(now + LEASE, true, now).unwrap();
        let answer = asks(&mut state, now);
        let yields = state.period.chain.yields(now);
        assert_eq!((yields, answer), (Yields::default(), Some(false)));
    }
}
