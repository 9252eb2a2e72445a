//! A held lock, and the methods that only the guards of single locks have.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::{Acquire, Guard, Held, HeldForLease, HoldGuard, Lock, LockKind, OwnedKind};
use crate::error::{Error, Result};
use crate::hold::Validity;
use crate::lease::Lease;
use crate::name::owner_of;
use crate::owner::{Owner, OwnerId};
use crate::session::{HoldRef, Terms};

/// One count of a lock's hold.
pub(crate) struct HeldLock<K: LockKind> {
    guard: HoldGuard,
    kind: Arc<K>,
    /// The fencing token of the acquisition; 0 if it has none.
    pub(crate) token: u64,
}

impl<K: LockKind> HeldLock<K> {
    pub(crate) fn new(hold_ref: HoldRef, terms: Terms, kind: Arc<K>, token: u64) -> Self {
        let guard = HoldGuard::new(hold_ref, terms);
        HeldLock { guard, kind, token }
    }
}

impl<K: LockKind> std::fmt::Debug for HeldLock<K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.guard.fmt(f)
    }
}

impl<K: LockKind> Held for HeldLock<K> {
    fn release(self) -> impl Future<Output = Result<()>> + Send {
        self.guard.release()
    }

    fn retain_for(&self, at_least: Lease) {
        let hold = self.guard.hold();
        hold.state().period.retain_for(at_least, Instant::now());
    }

    fn loss(&self) -> Option<Error> {
        self.guard.loss()
    }

    fn lost(&self) -> impl Future<Output = ()> + Send + 'static + use<K> {
        self.guard.hold().lost()
    }
}

impl<K: LockKind> HeldForLease for HeldLock<K> {
    fn valid_for(&self) -> Duration {
        self.guard.hold().valid_for()
    }

    fn validity(&self) -> Validity {
        self.guard.hold().validity()
    }

    fn feed(&self) {
        self.guard.hold().feed();
    }

    fn owner(&self) -> Owner {
        self.guard.hold().owner
    }
}

impl<K: LockKind> Guard<Lock<K>> {
    /// Returns this guard's reference to the hold.
    pub(crate) fn hold_ref(&self) -> &HoldRef {
        &self.held.guard.hold_ref
    }

    /// Returns the lock's name.
    pub fn name(&self) -> &str {
        self.hold_ref().hold.object.name()
    }

    /// Returns the handle through which the lock was acquired.
    pub(crate) fn handle(&self) -> Lock<K> {
        Lock {
            session: self.hold_ref().session.clone(),
            kind: self.held.kind.clone(),
            reentrant: self.terms().reentrant,
        }
    }

    /// Returns the terms of the hold.
    pub(crate) fn terms(&self) -> Terms {
        self.held.guard.terms
    }

    /// Moves the hold to `ticket`: see [`HoldGuard::move_to_ticket`].
    pub(crate) async fn move_to_ticket(
        self,
        ticket: HoldRef,
        lease: Lease,
    ) -> Result<(), (Option<Self>, Error)> {
        let HeldLock { guard, kind, token } = self.held;
        let moved = guard.move_to_ticket(ticket, lease).await;
        moved.map_err(|(guard, error)| {
            let held = guard.map(|guard| HeldLock { guard, kind, token });
            (held.map(|held| Guard { held }), error)
        })
    }

    /// Leaves the hold to its lease: it is no longer renewed and never released. Returns an error
    /// if it was lost.
    pub(crate) fn detach(self) -> Result<()> {
        self.held.guard.detach()
    }
}

/// Kinds that have an owner can be re-entered.
impl<K: OwnedKind> Guard<Lock<K>> {
    /// Acquires the lock again for the same owner. It stays held until both guards are released.
    /// [`Error::Lost`] if it was lost.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// let outer = client.lock("a").lock().await?;
    /// let inner = outer.reenter().await?;
    /// assert_eq!(outer.hold_count(), 2);
    /// inner.unlock().await?;
    /// assert!(client.lock("a").is_locked().await?);
    /// # Ok(()) }
    /// ```
    pub fn reenter(&self) -> Acquire<Lock<K>> {
        Acquire::new(self.handle()).continuing(self.hold_ref().clone())
    }

    /// Returns the id of the [owner](Guard::owner) in the store.
    pub fn owner_id(&self) -> OwnerId {
        owner_of(&self.hold_ref().hold.field).into()
    }

    /// Returns the number of guards that this owner has of the lock.
    pub fn hold_count(&self) -> u32 {
        self.hold_ref().hold.state().count
    }
}
