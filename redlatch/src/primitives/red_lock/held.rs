//! The members that hold a RedLock.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::{RedGuard, quorum};
use crate::error::{Error, Loss, Result};
use crate::hold::Hold;
use crate::join::join_until;
use crate::owner::Owner;
use crate::primitives::lock::{Held, HeldForLease, HoldGuard};
use crate::primitives::lock_set::any_lost;
use crate::runtime::sleep_until;

/// The holds of the members that granted the lock.
pub(crate) struct HeldMajority {
    pub(super) owner: Owner,
    pub(super) members: Vec<HoldGuard>,
    pub(super) majority: Arc<Majority>,
}

/// Tracks whether a majority is held.
pub(super) struct Majority {
    /// The acquired holds, and the leases that were requested.
    holds: Vec<(Arc<Hold>, Duration)>,
    /// Number of members of the lock, whether they granted it or not.
    members: usize,
    /// How long one member may take to answer.
    member_timeout: Duration,
    state: AtomicU8,
}

const HELD: u8 = 0;
const LOST: u8 = 1;
const RELEASED: u8 = 2;

/// How much earlier a lease may end on a server than here: 1 % for clocks that run at different
/// speeds, and 2 ms for what Redis truncates, as the algorithm's description specifies.
pub(super) fn clock_drift(lease: Duration) -> Duration {
    lease / 100 + Duration::from_millis(2)
}

impl Majority {
    pub(super) fn new(
        held_members: &[HoldGuard],
        members: usize,
        member_timeout: Duration,
    ) -> Majority {
        let hold = |held: &HoldGuard| (held.hold().clone(), held.terms.lease.duration());
        Majority {
            holds: held_members.iter().map(hold).collect(),
            members,
            member_timeout,
            state: AtomicU8::new(HELD),
        }
    }

    /// Returns how long a quorum of the holds is valid: the quorum-th longest of their remaining
    /// leases. A loss is permanent.
    pub(super) fn valid_for(&self) -> Duration {
        if self.state.load(Ordering::SeqCst) != HELD {
            return Duration::ZERO;
        }
        // The hold may have been acquired for longer, before or since: clocks have had that long to drift.
        let valid = |(hold, lease): &(Arc<Hold>, Duration)| {
            let longest = hold.state().longest.max(*lease);
            hold.valid_despite(clock_drift(longest))
        };
        let mut each: Vec<_> = self.holds.iter().map(valid).collect();
        each.sort_unstable_by(|one, other| other.cmp(one));
        let valid = each.get(quorum(self.members) - 1);
        let valid = valid.copied().unwrap_or_default();
        if valid.is_zero() {
            self.end(LOST);
        }
        valid
    }

    /// Sets the final state, once.
    fn end(&self, how: u8) {
        let _ = self
            .state
            .compare_exchange(HELD, how, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// Returns when no majority is held any more; never if it is released first.
    async fn lost(&self) {
        loop {
            let left = self.valid_for();
            match self.state.load(Ordering::SeqCst) {
                LOST => return,
                RELEASED => std::future::pending().await,
                _ => {}
            }
            let held = self.holds.iter().map(|(hold, _)| hold.clone());
            let held: Vec<_> = held.filter(|hold| hold.loss().is_none()).collect();
            tokio::select! {
                biased;
                () = any_lost(held) => {}
                () = sleep_until(Instant::now() + left) => {}
            }
        }
    }

    /// Returns how many members granted the lock and are known to keep it.
    fn held_members(&self) -> usize {
        let holds = self.holds.iter();
        holds
            .filter(|(hold, _)| !hold.valid_for().is_zero())
            .count()
    }

    /// Returns the error, if the majority is lost.
    fn loss(&self) -> Option<Error> {
        let _ = self.valid_for();
        if self.state.load(Ordering::SeqCst) != LOST {
            return None;
        }
        let losses = || self.holds.iter().filter_map(|(hold, _)| hold.loss());
        let is_missing = losses().find(|loss| *loss == Loss::NotHeld);
        let reason = is_missing.or_else(|| losses().find(|loss| loss.is_at_limit()));
        let reason = reason.unwrap_or(Loss::LeaseEnded);
        let (hold, _) = self.holds.first()?;
        Some(hold.lost_error(reason))
    }
}

impl Held for HeldMajority {
    /// Releases the members that granted the lock, concurrently. After their time limit it returns as
    /// soon as the unconfirmed members are too few to withhold a majority from other owners.
    async fn release(mut self) -> Result<()> {
        if let Some(lost) = self.majority.loss() {
            return Err(lost);
        }
        self.majority.end(RELEASED);
        let members = self.majority.members;
        let is_lost = |one: &&Option<Result<()>>| matches!(one, Some(Err(Error::Lost { .. })));
        let is_kept = |one: &&Option<Result<()>>| !is_lost(one) && !matches!(one, Some(Ok(())));
        let released = |done: &[Option<Result<()>>]| {
            let kept = done.iter().filter(is_kept).count();
            members - kept >= quorum(members)
        };
        let releases = std::mem::take(&mut self.members)
            .into_iter()
            .map(HoldGuard::release);
        let done = join_until(releases, released, self.majority.member_timeout).await;
        // Other owners may have held the members that were lost or that did not grant it.
        let lost = done.iter().filter(is_lost).count();
        let is_held = done.len() - lost >= quorum(members);
        if is_held && released(&done) {
            return Ok(());
        }
        let mut errors = done.into_iter().flatten().filter_map(Result::err);
        let error = errors.find(|error| matches!(error, Error::Lost { .. }) != is_held);
        error.map_or(Ok(()), Err)
    }

    fn loss(&self) -> Option<Error> {
        self.majority.loss()
    }

    fn lost(&self) -> impl Future<Output = ()> + Send + 'static + use<> {
        let majority = self.majority.clone();
        async move { majority.lost().await }
    }
}

impl HeldForLease for HeldMajority {
    fn valid_for(&self) -> Duration {
        self.majority.valid_for()
    }

    fn feed(&self) {
        let holds = self.majority.holds.iter();
        holds.for_each(|(hold, _)| hold.feed());
    }

    fn owner(&self) -> Owner {
        self.owner
    }
}

impl RedGuard {
    /// Returns how many members granted the lock and are known to keep it: at least a quorum, or
    /// the lock is lost.
    pub fn held_members(&self) -> usize {
        self.held.majority.held_members()
    }
}

impl Drop for HeldMajority {
    fn drop(&mut self) {
        self.majority.end(RELEASED);
    }
}

impl std::fmt::Debug for HeldMajority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HeldMajority")
            .field("owner", &self.owner)
            .field("held_members", &self.majority.held_members())
            .field("valid_for", &self.valid_for())
            .finish_non_exhaustive()
    }
}
