//! What somebody has whom a majority has given the lock.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::quorum;
use crate::error::{Error, Loss, Result};
use crate::hold::Hold;
use crate::owner::Owner;
use crate::primitives::handle::run_while;
use crate::primitives::multi_lock::{Share, any_lost};
use crate::runtime::sleep_until;
use crate::several::most;

/// A [`RedLock`](crate::RedLock) that is held: by a majority of its members, for as long as a
/// majority is held. Released by [`RedGuard::unlock`], or in the background when dropped.
#[must_use = "the lock is released as soon as the guard is dropped"]
pub struct RedGuard {
    owner: Owner,
    shares: Vec<Share>,
    majority: Arc<Majority>,
}

/// Whether a majority is held.
pub(super) struct Majority {
    /// The holds that were won, and the leases that were asked for.
    holds: Vec<(Arc<Hold>, Duration)>,
    /// Number of members of the lock, whether they granted it or not.
    members: usize,
    /// How long one member may take to answer.
    limit: Duration,
    state: AtomicU8,
}

const HELD: u8 = 0;
const LOST: u8 = 1;
const RELEASED: u8 = 2;

/// How much shorter a lease may be on a server than here: 1 % for clocks that run at different
/// speeds, and 2 ms for what Redis cuts off, as the algorithm's description has it.
pub(super) fn drift(lease: Duration) -> Duration {
    lease / 100 + Duration::from_millis(2)
}

impl Majority {
    pub(super) fn new(shares: &[Share], members: usize, limit: Duration) -> Majority {
        let hold = |share: &Share| (share.hold().clone(), share.lease().duration());
        Majority {
            holds: shares.iter().map(hold).collect(),
            members,
            limit,
            state: AtomicU8::new(HELD),
        }
    }

    /// For how long a quorum of the holds is valid: as long as the one that ends as the last but
    /// `quorum - 1`. What was found lost stays lost.
    pub(super) fn valid_for(&self) -> Duration {
        if self.state.load(Ordering::SeqCst) != HELD {
            return Duration::ZERO;
        }
        // It may have been entered for longer, before or since: then clocks have had that long to
        // differ.
        let valid = |(hold, lease): &(Arc<Hold>, Duration)| {
            let drift = drift(hold.longest_lease().max(*lease));
            hold.valid_for().saturating_sub(drift)
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

    /// It ends in one way only.
    fn end(&self, how: u8) {
        let _ = self
            .state
            .compare_exchange(HELD, how, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// Returns when no majority is held any more; never, when it is released first.
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

    /// The error, if it is lost.
    fn loss(&self) -> Option<Error> {
        let _ = self.valid_for();
        if self.state.load(Ordering::SeqCst) != LOST {
            return None;
        }
        let taken = |hold: &Hold| hold.loss() == Some(Loss::NotHeld);
        let reason = if self.holds.iter().any(|(hold, _)| taken(hold)) {
            Loss::NotHeld
        } else {
            Loss::LeaseEnded
        };
        let (hold, _) = self.holds.first()?;
        Some(hold.lost_error(reason))
    }
}

impl RedGuard {
    pub(super) fn new(owner: Owner, shares: Vec<Share>, majority: Arc<Majority>) -> RedGuard {
        RedGuard {
            owner,
            shares,
            majority,
        }
    }

    /// Releases the lock on all members that granted it, at the same time, and returns when they have
    /// released it. After [`RedLock::timeout`](crate::RedLock::timeout) it returns as soon as the members
    /// that have not confirmed the release are too few to keep a majority from others. The release is
    /// repeated there in the background. Members that did not grant the lock are not counted.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`]: a majority was no longer held, so others may have held the lock meanwhile. A member
    /// that does not answer cannot tell that it lost the lock. Otherwise the first error of a member, when too
    /// many may still keep the lock.
    ///
    /// # Cancel safety
    ///
    /// When dropped, the release goes on in the background.
    pub async fn unlock(mut self) -> Result<()> {
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
        let shares = std::mem::take(&mut self.shares);
        let giving = shares.into_iter().map(Share::give_back);
        let done = most(giving, released, self.majority.limit).await;
        // Others may have had those that were lost, and those that did not grant it.
        let lost = done.iter().filter(is_lost).count();
        let is_held = done.len() - lost >= quorum(members);
        if is_held && released(&done) {
            return Ok(());
        }
        let mut errors = done.into_iter().flatten().filter_map(Result::err);
        let error = errors.find(|error| matches!(error, Error::Lost { .. }) != is_held);
        error.map_or(Ok(()), Err)
    }

    /// Whether the lock is certainly still held: by a majority, also if their clocks run a little
    /// faster than ours. Once `false` it stays `false`. Costs no round trip.
    pub fn is_valid(&self) -> bool {
        !self.valid_for().is_zero()
    }

    /// For how long the lock is certainly held if nothing renews it: until the first of the last
    /// quorum of leases ends, less the allowance for clocks that differ (1 % of the lease and
    /// 2 ms). Zero when it was lost.
    pub fn valid_for(&self) -> Duration {
        self.majority.valid_for()
    }

    /// Completes when no majority is held any more. Never completes when the lock is released
    /// first.
    ///
    /// # Cancel safety
    ///
    /// Can be dropped and called again at will.
    pub fn lost(&self) -> impl Future<Output = ()> + Send + 'static + use<> {
        let majority = self.majority.clone();
        async move { majority.lost().await }
    }

    /// Runs `work` while the lock is held. The guard keeps it afterwards.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] as soon as no majority is held; `work` is dropped then.
    ///
    /// # Cancel safety
    ///
    /// When dropped, `work` is dropped.
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output> {
        run_while(|| self.majority.loss(), self.majority.lost(), work).await
    }

    /// Who holds the lock through this guard.
    pub fn owner(&self) -> Owner {
        self.owner
    }

    /// How many members have given the lock and are known to keep it: at least a quorum, or it is
    /// lost.
    pub fn held(&self) -> usize {
        let holds = self.majority.holds.iter();
        holds
            .filter(|(hold, _)| !hold.valid_for().is_zero())
            .count()
    }
}

impl Drop for RedGuard {
    fn drop(&mut self) {
        self.majority.end(RELEASED);
    }
}

impl std::fmt::Debug for RedGuard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedGuard")
            .field("owner", &self.owner)
            .field("held", &self.held())
            .field("valid_for", &self.valid_for())
            .finish_non_exhaustive()
    }
}
