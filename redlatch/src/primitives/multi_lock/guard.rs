//! The guard of a held multi-lock.

use std::future::Future;
use std::time::Duration;

use super::held_member::{HeldMember, any_lost, release_all};
use crate::error::{Error, Result};
use crate::hold::HoldKind as _;
use crate::owner::Owner;
use crate::primitives::fenced_lock::FencedLock;
use crate::primitives::lock::run_while;

/// The held locks of a [`MultiLock`](crate::MultiLock). [`MultiGuard::unlock`] releases them;
/// dropping the guard releases them in the background, as with a [`Guard`](crate::Guard).
#[must_use = "the locks are released as soon as the guard is dropped"]
pub struct MultiGuard {
    owner: Owner,
    held_members: Vec<HeldMember>,
}

impl MultiGuard {
    pub(super) fn new(owner: Owner, held_members: Vec<HeldMember>) -> MultiGuard {
        MultiGuard {
            owner,
            held_members,
        }
    }

    /// Releases all locks concurrently and waits until the stores have confirmed it.
    ///
    /// # Errors
    ///
    /// The first error of a member's release, as for [`Guard::unlock`](crate::Guard::unlock). The
    /// other locks are released nevertheless.
    ///
    /// # Cancel safety
    ///
    /// When dropped, the release continues in the background.
    pub async fn unlock(mut self) -> Result<()> {
        let errors = release_all(std::mem::take(&mut self.held_members)).await;
        match errors.into_iter().next() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Returns whether all locks are certainly still held:
    /// [`Guard::is_valid`](crate::Guard::is_valid).
    pub fn is_valid(&self) -> bool {
        !self.valid_for().is_zero()
    }

    /// Returns how long all locks are certainly held without a renewal. Zero if one was lost.
    pub fn valid_for(&self) -> Duration {
        let each = self
            .held_members
            .iter()
            .map(|held_member| held_member.hold().valid_for());
        each.min().unwrap_or(Duration::ZERO)
    }

    /// Completes when the first of the locks is lost. Never completes if they are released first.
    ///
    /// # Cancel safety
    ///
    /// Can be dropped and called again at any time.
    pub fn lost(&self) -> impl Future<Output = ()> + Send + 'static + use<> {
        let holds = self
            .held_members
            .iter()
            .map(|held_member| held_member.hold().clone());
        any_lost(holds.collect::<Vec<_>>())
    }

    /// Runs `work` while all locks are held. The guard keeps them afterwards.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] as soon as one lock is lost; `work` is then dropped and never polled after
    /// the lease has ended.
    ///
    /// # Cancel safety
    ///
    /// When dropped, it drops `work`.
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output> {
        run_while(|| self.loss(), self.lost(), work).await
    }

    fn loss(&self) -> Option<Error> {
        self.held_members.iter().find_map(|held_member| {
            let hold = held_member.hold();
            hold.loss().map(|loss| hold.lost_error(loss))
        })
    }

    /// Returns the owner that holds the locks through this guard.
    pub fn owner(&self) -> Owner {
        self.owner
    }

    /// Returns the names of the locks, in the order in which they were acquired.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.held_members
            .iter()
            .map(|held_member| held_member.hold().object.name())
    }

    /// Returns the fencing token of this fenced lock; `None` if it is not one of the locks.
    pub fn token(&self, lock: &FencedLock) -> Option<u64> {
        let object = lock.kind.object();
        let mine = |held_member: &&HeldMember| {
            let hold_ref = held_member.hold_ref();
            std::sync::Arc::ptr_eq(&hold_ref.session, &lock.session)
                && hold_ref.hold.object.layout() == object.layout()
                && hold_ref.hold.object == *object
        };
        let held_member = self.held_members.iter().find(mine)?;
        held_member.grant().downcast_ref::<u64>().copied()
    }
}

impl std::fmt::Debug for MultiGuard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MultiGuard")
            .field("names", &self.names().collect::<Vec<_>>())
            .field("owner", &self.owner)
            .field("valid_for", &self.valid_for())
            .finish_non_exhaustive()
    }
}
