//! The held locks of a multi-lock.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use super::MultiGuard;
use crate::error::{Error, Result};
use crate::hold::{Hold, HoldKind as _, Validity};
use crate::join::join_all;
use crate::locks::fenced::FencedLock;
use crate::locks::{Held, HeldForLease, HoldGuard};
use crate::owner::Owner;
use crate::several::any_lost;

/// One held lock.
#[derive(Debug)]
pub(crate) struct HeldMember {
    pub(super) held: HoldGuard,
    pub(super) token: u64,
}

/// Releases all locks concurrently. Returns the first error, a loss before others.
pub(super) async fn release_all(held_members: Vec<HeldMember>) -> Result<()> {
    let releases = held_members.into_iter().map(|member| member.held.release());
    let errors = join_all(releases).await.into_iter().filter_map(Result::err);
    let error = errors.min_by_key(|error| !error.is_loss());
    error.map_or(Ok(()), Err)
}

/// The holds of all members, in the order in which they were acquired.
#[derive(Debug)]
pub(crate) struct HeldLocks {
    pub(super) owner: Owner,
    pub(super) members: Vec<HeldMember>,
}

impl HeldLocks {
    fn holds(&self) -> impl Iterator<Item = &Arc<Hold>> {
        self.members.iter().map(|member| member.held.hold())
    }
}

impl Held for HeldLocks {
    async fn release(self) -> Result<()> {
        release_all(self.members).await
    }

    fn loss(&self) -> Option<Error> {
        self.members.iter().find_map(|member| member.held.loss())
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

    fn validity(&self) -> Validity {
        let each: Vec<_> = self.holds().map(|hold| hold.validity()).collect();
        Arc::new(move || each.iter().all(|is_held| is_held()))
    }

    fn feed(&self) {
        self.holds().for_each(|hold| hold.feed());
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

    /// Returns the fencing token of this fenced lock; `None` if it is not one of the locks, or if `lock` is from another
    /// client.
    pub fn token(&self, lock: &FencedLock) -> Option<u64> {
        let object = lock.kind.object();
        let mine = |member: &&HeldMember| {
            let hold_ref = &member.held.hold_ref;
            Arc::ptr_eq(&hold_ref.session, &lock.session)
                && hold_ref.hold.object.layout() == object.layout()
                && hold_ref.hold.object == *object
        };
        let member = self.held.members.iter().find(mine)?;
        Some(member.token)
    }
}
