//! A period: one possession of an object, from the grant of the store to its release or loss.
//!
//! A period begins with the first guard of an owner and never returns. When a hold passes on in the client, the next
//! request begins a period of its own, of the same grant: the store sees no change, so what it has granted until when
//! stays, and only what the request has set is new.
//!
//! Invariant: the period ends here before the store gives the object to another owner. `end` counts from before the
//! step that the store has answered, and no answer moves it earlier. No renewal moves it beyond the limit of a revocation,
//! and no re-entry beyond the lease of a renewal before the replicas have confirmed it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::fairness::Chain;
use super::limits::{HoldLimits, RunningLimits};
use crate::error::Loss;
use crate::lease::Lease;

/// Identifies a period. The periods of all objects are numbered together: later ones compare greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PeriodId(u64);

static PERIODS: AtomicU64 = AtomicU64::new(0);

impl PeriodId {
    /// Returns the id of no period. It compares less than all others.
    const NONE: PeriodId = PeriodId(0);

    /// Returns an id that compares less than those of all periods that begin after this call.
    pub(crate) fn latest() -> PeriodId {
        PeriodId(PERIODS.load(Ordering::SeqCst))
    }

    fn next() -> PeriodId {
        PeriodId(PERIODS.fetch_add(1, Ordering::SeqCst) + 1)
    }
}

/// See the [module](self).
pub(crate) struct Period {
    pub(crate) id: PeriodId,
    /// The period in which the store granted the hold.
    pub(crate) granted_in: PeriodId,
    /// When it began; of an owner without guards, when its hold was created.
    pub(super) began: Instant,
    /// Time until which the store keeps the hold, as far as is known: never later than its real end.
    pub(crate) end: Instant,
    /// Time until which the store may keep the hold: later than `end` if replicas have not confirmed a re-entry.
    pub(super) may_end: Instant,
    /// The end of the lease of the latest step that could report a request to release the hold: its acquisition, a renewal, even of a
    /// revoked hold, or the check of a fixed lease. Earlier than `end` if a guard has a longer lease. The next renewal is due before.
    pub(super) checked_end: Instant,
    /// The longest lease that an acquisition of this grant still had when it was answered.
    pub(crate) longest: Duration,
    /// Boxed: few holds have any.
    limits: Option<Box<RunningLimits>>,
    /// Whether the holder has released it, and no other request has it yet.
    pub(super) passes_on: bool,
    /// Whether the owner was asked to release what the store has granted.
    is_asked: bool,
    /// When the hold is lost because it was revoked.
    revoked_at: Option<Instant>,
    /// When a release may free the object, if not immediately.
    retained_until: Option<Instant>,
    pub(super) loss: Option<Loss>,
    /// How long the requests of this client pass the grant on.
    pub(crate) chain: Chain,
}

impl Period {
    /// Returns the period of an owner to which the store has granted nothing.
    pub(super) fn none(now: Instant) -> Period {
        Period {
            id: PeriodId::NONE,
            granted_in: PeriodId::NONE,
            began: now,
            end: now,
            may_end: now,
            checked_end: now,
            longest: Duration::ZERO,
            limits: None,
            passes_on: false,
            is_asked: false,
            revoked_at: None,
            retained_until: None,
            loss: None,
            chain: Chain::new(now),
        }
    }

    /// Returns the period that begins with a grant until `end`. If the attempt was a re-entry, the request to release
    /// what its owner had before still counts, and so does the minimum time.
    pub(super) fn granted(&self, end: Instant, now: Instant) -> Period {
        let id = PeriodId::next();
        Period {
            id,
            granted_in: id,
            end,
            checked_end: end,
            longest: end.saturating_duration_since(now),
            is_asked: self.is_asked,
            revoked_at: self.revoked_at,
            retained_until: self.retained_until,
            ..Period::none(now)
        }
    }

    /// Begins the period of the next request that has the same grant.
    pub(super) fn pass_on(&mut self, now: Instant) {
        (self.id, self.began) = (PeriodId::next(), now);
        self.begin_to_pass_on();
    }

    /// Records that an attempt is about to be sent which is no re-entry: its owner is not asked to release what it had before.
    pub(super) fn begin_acquisition(&mut self) {
        (self.is_asked, self.revoked_at) = (false, None);
    }

    /// Takes over, after a loss, what a later hold of the owner must know of this one.
    pub(super) fn after_loss(&self, now: Instant) -> Period {
        Period {
            longest: self.longest,
            retained_until: self.retained_until,
            ..Period::none(now)
        }
    }

    /// Starts the limits of a request that has just added a guard or taken one over.
    pub(super) fn start_limits(&mut self, limits: &HoldLimits, now: Instant) {
        self.limits.get_or_insert_default().add(limits, now);
    }

    /// Adds the limits of a RedLock of which this is a member. Guards of other locks may have set some.
    pub(crate) fn add_running_limits(&mut self, limits: &RunningLimits) {
        self.limits.get_or_insert_default().merge(limits);
    }

    /// Records that the holder has released the hold, which may pass on. Its limits end, because it was in time, and it is not renewed
    /// any more: it must not be kept if the task that passes it on hangs.
    pub(super) fn begin_to_pass_on(&mut self) {
        (self.limits, self.passes_on) = (None, true);
    }

    /// Records that the holder still works.
    pub(super) fn feed(&mut self, now: Instant) {
        if let Some(limits) = &mut self.limits {
            limits.feed(now);
        }
    }

    /// Returns the limits that the requests have set.
    pub(crate) fn limits(&self) -> Option<HoldLimits> {
        Some(self.limits.as_ref()?.lengths())
    }

    /// Returns when the hold is lost unless it is renewed, fed or released, and how.
    pub(super) fn next_loss(&self) -> (Instant, Loss) {
        let lease = (self.end, Loss::LeaseEnded);
        let limit = self.limits.as_ref().and_then(|limits| limits.first_end());
        let revoked = self.revoked_at.map(|at| (at, Loss::Revoked));
        let first = limit.into_iter().chain(revoked).min_by_key(|(end, _)| *end);
        first.filter(|(end, _)| *end <= self.end).unwrap_or(lease)
    }

    /// Returns why the store does not have the hold, after its last guard may have been removed.
    pub(super) fn reason_if_not_held(&self, now: Instant) -> Loss {
        let (end, loss) = self.next_loss();
        let at_limit = (now >= end && loss.is_at_limit()).then_some(loss);
        self.loss.or(at_limit).unwrap_or(Loss::NotHeld)
    }

    /// Returns how long the hold is valid at least, without a renewal, if its lease may end by `clock_drift` earlier in the
    /// store than here.
    pub(super) fn valid_for(&self, clock_drift: Duration, now: Instant) -> Duration {
        let left = |end: Instant| end.saturating_duration_since(now);
        let lease = left(self.end).saturating_sub(clock_drift);
        lease.min(left(self.next_loss().0))
    }

    /// Returns until when the store keeps the hold at most, as far as answers say.
    pub(crate) fn latest_end(&self) -> Instant {
        self.end.max(self.may_end)
    }

    /// Records that the store keeps the hold until `end` at least.
    pub(crate) fn extend(&mut self, end: Instant) {
        self.end = self.end.max(end);
    }

    /// Records the answer to a renewal until `end`, or until `limit` if that is earlier.
    pub(super) fn renewed(&mut self, end: Instant, limit: Option<Instant>) {
        self.extend(limit.map_or(end, |limit| limit.min(end)));
        self.checked_end = end;
    }

    /// Has the hold renewed as one whose lease ends then, if its next renewal is due later.
    pub(super) fn renew_before(&mut self, end: Instant) {
        self.checked_end = self.checked_end.min(end);
    }

    /// Records the answer to a check.
    pub(super) fn checked(&mut self) {
        self.checked_end = self.end;
    }

    /// Records that the store asks the owner to release, at the latest at `limit`. Of several requests the earliest limit
    /// counts. Returns whether the owner was not asked before.
    pub(super) fn ask(&mut self, limit: Option<Instant>) -> bool {
        self.revoked_at = self.revoked_at.into_iter().chain(limit).min();
        !std::mem::replace(&mut self.is_asked, true)
    }

    /// Returns whether the owner was asked to release what the store has granted.
    pub(crate) fn is_asked(&self) -> bool {
        self.is_asked
    }

    /// Returns how long the store still keeps the hold at least, as far as is known.
    pub(crate) fn left(&self, now: Instant) -> Duration {
        self.end.saturating_duration_since(now)
    }

    /// Returns the lease that a re-entry may have: less if the hold was revoked, also if all other guards are released
    /// before the re-entry is answered.
    ///
    /// Must not happen: the guard is valid for its whole lease, and the store has given it what was left of the revoked
    /// hold. Another owner then acquires the object meanwhile.
    pub(crate) fn limit_lease(&self, lease: Lease, now: Instant) -> Lease {
        match self.revoked_at {
            Some(at) => lease.min(Lease::from_remaining(at.saturating_duration_since(now))),
            None => lease,
        }
    }

    /// Records that a release must not free the object for this long. Of several times the latest end counts.
    pub(crate) fn retain_for(&mut self, at_least: Lease, now: Instant) {
        self.retained_until = self.retained_until.max(Some(now + at_least.duration()));
    }

    /// Records that another owner keeps the object now, or that it was not held.
    pub(crate) fn retention_ended(&mut self) {
        self.retained_until = None;
    }

    /// Returns for how long a release must not free the object. `None`: it may.
    pub(crate) fn retained_for(&self, now: Instant) -> Option<Lease> {
        let until = self.retained_until.filter(|&until| until > now)?;
        Some(Lease::from_remaining(until - now))
    }
}
