//! The held locks of a multi-lock.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use super::MultiGuard;
use crate::error::{Error, Result};
use crate::hold::Hold;
use crate::hold::HoldKind as _;
use crate::owner::Owner;
use crate::primitives::fenced_lock::FencedLock;
use crate::primitives::lock::{Held, HeldForLease};
use crate::primitives::lock_set::{HeldMember, any_lost, release_all};

/// The holds of all members, in the order in which they were acquired.
#[derive(Debug)]
pub(crate) struct HeldLocks {
    pub(super) owner: Owner,
    pub(super) members: Vec<HeldMember>,
}

impl HeldLocks {
    fn holds(&self) -> impl Iterator<Item = &Arc<Hold>> {
        self.members.iter().map(HeldMember::hold)
    }
}

impl Held for HeldLocks {
    async fn release(self) -> Result<()> {
        let errors = release_all(self.members).await;
        errors.into_iter().next().map_or(Ok(()), Err)
    }

    fn loss(&self) -> Option<Error> {
        let mut losses = self.members.iter().map(HeldMember::loss);
        losses.find_map(|loss| loss)
    }

    fn lost(&self) -> impl Future<Output = ()> + Send + 'static + use<> {
        any_lost(self.holds().cloned().collect::<Vec<_>>())
    }
}

impl HeldForLease for HeldLocks {
    fn valid_for(&self) -> Duration {
        let each = self.holds().map(|hold| hold.valid_for());
        each.min().unwrap_or(Duration::ZERO)
    }

    fn owner(&self) -> Owner {
        self.owner
    }
}

impl MultiGuard {
    /// Returns the names of the locks, in the order in which they were acquired.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.held.holds().map(|hold| hold.object.name())
    }

    /// Returns the fencing token of this fenced lock; `None` if it is not one of the locks.
    pub fn token(&self, lock: &FencedLock) -> Option<u64> {
        let object = lock.kind.object();
        let mine = |member: &&HeldMember| {
            let hold_ref = member.hold_ref();
            Arc::ptr_eq(&hold_ref.session, &lock.session)
                && hold_ref.hold.object.layout() == object.layout()
                && hold_ref.hold.object == *object
        };
        let member = self.held.members.iter().find(mine)?;
        member.grant().downcast_ref::<u64>().copied()
    }
}
