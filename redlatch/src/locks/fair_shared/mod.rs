//! Fair objects that several owners may hold (not in Redisson): first come, first served, across all
//! clients. They are one kind with different parts: the sides of a read-write lock, and permits.
//! `holders` describes the data, `rules` the algorithm, `fair/queue.rs` the queue.
//!
//! What must not happen, beside what the queue prevents:
//!
//! - *One step lets in two that exclude each other.* A release serves several waiters, and an
//!   acquisition those behind it, before its own hold is written. Each counts from the moment when it
//!   is chosen (`reserve`). Mutant `fair-grant-not-counted`, `exploration`.
//! - *A waiter is overtaken by one that wants less.* A newcomer joins a queue that is not empty, and the
//!   queue is served from its head on, up to the first that does not fit. Mutant
//!   `fair-reader-overtakes-writer`.
//! - *A hold that has ended comes back.* A step that counts holds removes those that have ended, so that
//!   a late renewal or release does not find them.

#[cfg(test)]
mod differential;
#[cfg(test)]
mod exploration;
pub(crate) mod holders;
mod read_write;
mod rules;
mod semaphore;

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use smallvec::smallvec;

pub use self::read_write::{FairRead, FairReadLock, FairReadWriteLock, FairWrite, FairWriteLock};
pub use self::semaphore::{FairPermitGuard, FairPermits, FairSemaphore};
use crate::error::{Error, Result};
use crate::hold::{AcquireParams, Hold, HoldKind, ReleaseParams, Renewal, Renewed, Spec};
use crate::keyspace::Keyspace;
use crate::lease::Lease;
use crate::locks::fair::{FairTimes, HasTimes, QueuedKind, Turn};
use crate::locks::permits::MAX_PERMITS;
use crate::locks::{Holder, OwnedKind, RequiredWriteHold};
use crate::metrics::Kind;
use crate::name::{FairKeys, KeyLayout, ObjectKeys, permits_field};
use crate::owner::{ClientId, Owner};
use crate::step::{Outcome, Step};

/// What a holder has of a fair object.
pub(crate) trait Part: Debug + Clone + Send + Sync + 'static {
    const LAYOUT: KeyLayout;
    const METRIC: Kind;

    /// Returns the number of permits that a request is for. `None`: its holder is an owner that may hold the object several
    /// times.
    fn permits(&self) -> Option<u32> {
        None
    }

    /// Returns the other part that the same owner may hold.
    fn sibling(&self) -> Option<&Arc<ObjectKeys>> {
        None
    }

    /// Returns the write hold on which requests for the read side rely.
    fn required(&self) -> Option<&RequiredWriteHold> {
        None
    }
}

/// A kind of which several owners may hold parts, fairly: the type parameter of a [`Lock`](crate::Lock).
#[derive(Debug, Clone)]
pub struct FairShared<P> {
    keys: Arc<FairKeys>,
    times: FairTimes,
    part: P,
    /// How many permits there are.
    total: u32,
}

#[expect(private_bounds, reason = "sealed")]
impl<P: Part> FairShared<P> {
    fn writes() -> bool {
        P::LAYOUT.writes()
    }
}

impl OwnedKind for FairShared<FairRead> {}
impl OwnedKind for FairShared<FairWrite> {}

impl<P: Part> QueuedKind for FairShared<P> {}

impl<P: Part> HasTimes for FairShared<P> {
    fn times(&mut self) -> &mut FairTimes {
        &mut self.times
    }
}

impl<P: Part> HoldKind for FairShared<P> {
    fn object(&self) -> &Arc<ObjectKeys> {
        &self.keys.object
    }

    fn spec(&self) -> Spec {
        Spec {
            grants: true,
            has_owner: self.part.permits().is_none(),
            // Others may remain, or be served in the same step.
            release_frees: false,
            ..Spec::of(P::METRIC)
        }
    }

    fn waiter_channel(&self, field: &str) -> Option<String> {
        Some(self.keys.waiter_channel(field))
    }

    fn renewal<'a>(&'a self, hold: &'a Hold) -> Renewal<'a> {
        Renewal {
            script: rules::renew_script(),
            key: self.keys.object.key(),
            args: smallvec![(&*hold.field).into()],
            weight: 1,
        }
    }

    fn renew(&self, keyspace: &mut Keyspace, hold: &Hold, lease: Option<Lease>) -> Result<Renewed> {
        rules::renew(keyspace, &self.keys, hold, lease, self.total)
    }

    fn release<'a>(&'a self, params: ReleaseParams<'a>) -> Step<'a, bool> {
        rules::release(&self.keys, params, self.times.grace(), self.total)
    }

    fn acquire<'a>(&'a self, params: AcquireParams<'a>) -> Step<'a, Outcome> {
        let required = RequiredWriteHold::of(self.part.required(), params);
        let turn = Turn {
            // If the write hold is lost, the request fails: it must leave nothing in the queue.
            params: AcquireParams {
                waits: params.waits && required.is_none(),
                ..params
            },
            wait_time: self.times.wait(),
            grace: self.times.grace(),
        };
        let step = rules::acquire(&self.keys, turn, self.total);
        RequiredWriteHold::checked(required, step)
    }

    fn inspect(&self) -> Step<'_, Vec<Holder>> {
        rules::inspect(&self.keys, Self::writes(), self.total)
    }

    fn force(&self) -> Step<'_, bool> {
        let grace = self.times.grace();
        rules::force(&self.keys, Self::writes(), grace, self.total)
    }

    fn check(&self) -> Result<()> {
        self.times.check()?;
        if let Some(required) = self.part.required() {
            required.check()?;
        }
        let invalid = |count: u32, reason| {
            let count = count.into();
            Err(Error::InvalidCount { count, reason })
        };
        match self.part.permits() {
            None => Ok(()),
            Some(_) if !(1..=MAX_PERMITS).contains(&self.total) => {
                invalid(self.total, "a semaphore has 1 to 2147483647 permits")
            }
            Some(wanted) if !(1..=self.total).contains(&wanted) => {
                invalid(wanted, "request 1 permit to all that the semaphore has")
            }
            Some(_) => Ok(()),
        }
    }

    fn field(&self, client: &ClientId, owner: Owner) -> String {
        let owner = client.owner_id(owner).to_string();
        match self.part.permits() {
            Some(permits) => permits_field(&owner, permits),
            None => self.keys.object.field(owner),
        }
    }

    fn waiting_at_most(&self, wait: Duration) -> Option<FairShared<P>> {
        let times = self.times.waiting_at_most(wait)?;
        Some(FairShared {
            times,
            ..self.clone()
        })
    }

    fn erased_waiting_at_most(&self, wait: Duration) -> Option<Arc<dyn HoldKind>> {
        Some(Arc::new(self.waiting_at_most(wait)?))
    }

    fn waiter_ttl(&self) -> Option<Lease> {
        Some(self.times.wait())
    }

    fn sibling(&self) -> Option<&Arc<ObjectKeys>> {
        self.part.sibling()
    }
}
