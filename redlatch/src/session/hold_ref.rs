//! Counted references to the holds of a client, each found in the registry while anything refers to
//! it.
//!
//! References are counted over all generations of an owner's hold: as long as a step of an earlier
//! generation may still reach the store, the next generation takes turns with it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::time::Instant;

use super::Session;
use super::registry::RegisteredHold;
use crate::client_registry::RegisteredWait;
use crate::error::{Error, Result};
use crate::hold::{Hold, HoldKind, PeriodId};
use crate::name::ObjectKeys;
use crate::owner::Owner;
use crate::sync::wait_for;
use crate::wait::Claim;

impl Session {
    /// Returns a reference to the hold of `owner` on the object of `kind`, which is created if there is none.
    pub(crate) fn hold_ref(
        self: &Arc<Self>,
        owner: Owner,
        field: impl Fn() -> String,
        kind: &Arc<dyn HoldKind>,
    ) -> Result<HoldRef> {
        let object = kind.object();
        let mut holds = self.holds.lock();
        let new_hold = || {
            let metrics = self.metrics().of(kind.spec().metric, Some(object.name()));
            Hold::new(owner, field(), kind.clone(), metrics)
        };
        let entry = holds
            .entry((owner, object.clone()))
            .or_insert_with(|| RegisteredHold {
                hold: Arc::new(new_hold()),
                refs: 0,
            });
        if entry.hold.object.layout() != object.layout() {
            return Err(Error::WrongKind {
                name: object.name().to_owned(),
                reason: "the same owner uses it as another kind of lock",
            });
        }
        if entry.hold.loss().is_some() {
            // A lost hold stays lost, for its guards. A new request gets a new hold, which takes turns with
            // steps of the old one that may still be in flight.
            entry.hold = Arc::new(new_hold().superseding(&entry.hold));
        }
        entry.refs += 1;
        Ok(HoldRef::new(self.clone(), entry.hold.clone()))
    }

    /// Returns a reference to the hold of a claimed waiter, if it is still the latest one of its owner.
    pub(super) fn claimed(self: &Arc<Self>, claim: &Claim) -> Option<HoldRef> {
        let hold = claim.hold.clone().downcast::<Hold>().ok()?;
        let mut holds = self.holds.lock();
        let entry = holds.get_mut(&(hold.owner, hold.object.clone()))?;
        Arc::ptr_eq(&entry.hold, &hold).then(|| {
            entry.refs += 1;
            HoldRef::new(self.clone(), hold)
        })
    }

    /// Returns a reference to any generation of a hold, if the client still refers to one of them.
    ///
    /// The feared interleaving: all references have been dropped, and the same owner has acquired the object again, with
    /// a hold of its own. A release of the old hold would then remove the new one, and would not take turns with it.
    pub(super) fn any_ref(self: &Arc<Self>, hold: &Arc<Hold>) -> Option<HoldRef> {
        let mut holds = self.holds.lock();
        let entry = holds.get_mut(&(hold.owner, hold.object.clone()))?;
        entry.hold.takes_turns_with(hold).then(|| {
            entry.refs += 1;
            HoldRef::new(self.clone(), hold.clone())
        })
    }

    /// Returns the latest generation of the hold of `owner` on `object`.
    pub(super) fn latest_hold(&self, owner: Owner, object: &Arc<ObjectKeys>) -> Option<Arc<Hold>> {
        let holds = self.holds.lock();
        let entry = holds.get(&(owner, object.clone()))?;
        Some(entry.hold.clone())
    }

    /// Returns the hold period of `owner` on `object`, if it holds the object as far as this client knows.
    pub(super) fn hold_period(&self, owner: Owner, object: &Arc<ObjectKeys>) -> Option<PeriodId> {
        let hold = self.latest_hold(owner, object)?;
        hold.state().held_period()
    }

    /// Waits until `owner` holds `object`, a sibling of another, as far as this client knows, in a hold period that
    /// started after `since`.
    pub(super) async fn wait_until_held(
        &self,
        owner: Owner,
        object: &Arc<ObjectKeys>,
        since: Option<PeriodId>,
    ) {
        let is_held = || self.hold_period(owner, object) > since;
        wait_for(&self.sibling_acquired, || is_held().then_some(())).await;
    }

    /// Settles what `owner` has released or lost of `object`, and has not settled yet. If this fails, it is retried in the
    /// background.
    pub(super) async fn settle_released(
        self: &Arc<Self>,
        owner: Owner,
        object: &Arc<ObjectKeys>,
    ) -> Result<()> {
        let hold_ref = {
            let mut holds = self.holds.lock();
            let Some(entry) = holds.get_mut(&(owner, object.clone())) else {
                return Ok(());
            };
            if entry.hold.loss().is_none() && entry.hold.state().ledger.is_settled() {
                return Ok(());
            }
            entry.refs += 1;
            HoldRef::new(self.clone(), entry.hold.clone())
        };
        match hold_ref.settle().await {
            // What the store still had of the lost hold is released.
            Ok(_) | Err(Error::Lost { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

/// A counted reference to a hold, acquired or not.
pub(crate) struct HoldRef {
    pub(crate) session: Arc<Session>,
    pub(crate) hold: Arc<Hold>,
    /// Number of the change with which this reference's guard was removed; 0 before. [`MOVED`] when the reference has
    /// passed to a [`LocalHandoff`](super::LocalHandoff), and is not counted any more.
    pub(super) removed_at: AtomicU64,
}

pub(super) const MOVED: u64 = u64::MAX;

impl Clone for HoldRef {
    fn clone(&self) -> HoldRef {
        debug_assert_ne!(self.removed_at.load(Ordering::Relaxed), MOVED);
        if let Some(entry) = self.session.holds.lock().get_mut(&self.key()) {
            entry.refs += 1;
        }
        HoldRef {
            session: self.session.clone(),
            hold: self.hold.clone(),
            removed_at: AtomicU64::new(self.removed_at.load(Ordering::Relaxed)),
        }
    }
}

impl std::fmt::Debug for HoldRef {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HoldRef")
            .field("name", &self.hold.object.name())
            .field("owner", &self.hold.field)
            .finish_non_exhaustive()
    }
}

impl Drop for HoldRef {
    fn drop(&mut self) {
        if *self.removed_at.get_mut() == MOVED {
            return;
        }
        let key = self.key();
        let unsettled = {
            let mut holds = self.session.holds.lock();
            let Some(entry) = holds.get_mut(&key) else {
                return;
            };
            if entry.refs == 1 && !entry.hold.state().ledger.must_be_settled() {
                holds.remove(&key);
                return;
            }
            if entry.refs > 1 {
                entry.refs -= 1;
                return;
            }
            // This reference stays counted: it passes to one that settles in the background.
            entry.hold.clone()
        };
        let lease = unsettled.state().period.longest;
        HoldRef::new(self.session.clone(), unsettled).settle_detached(lease, None);
    }
}

impl HoldRef {
    /// Creates a reference that is already counted.
    pub(super) fn new(session: Arc<Session>, hold: Arc<Hold>) -> HoldRef {
        HoldRef {
            session,
            hold,
            removed_at: AtomicU64::new(0),
        }
    }

    /// Returns whether there is no other reference to the owner's hold, and none to what it has of
    /// the sibling object: a writer does not pass on while its owner also reads.
    pub(super) fn is_only_one(&self) -> bool {
        let (hold, holds) = (&self.hold, self.session.holds.lock());
        let of_sibling =
            |sibling: &Arc<ObjectKeys>| holds.contains_key(&(hold.owner, sibling.clone()));
        let is_alone = !hold.kind.sibling().is_some_and(of_sibling);
        is_alone && holds.get(&self.key()).is_some_and(|entry| entry.refs == 1)
    }

    /// Moves this reference, and leaves one that must not be used any more.
    pub(super) fn take(&self) -> HoldRef {
        self.removed_at.store(MOVED, Ordering::Relaxed);
        HoldRef::new(self.session.clone(), self.hold.clone())
    }

    pub(super) fn key(&self) -> (Owner, Arc<ObjectKeys>) {
        (self.hold.owner, self.hold.object.clone())
    }

    /// Returns the owner's latest hold period of this object or of its [sibling](HoldKind::sibling).
    ///
    /// Invariant of all waiting: an owner with a hold period never waits in a wait queue, because the waiters
    /// there may wait for that very hold period to end. It sends its request out of turn, once per hold
    /// period. If the store refuses nevertheless (the hold period has ended meanwhile, or its loss was not
    /// noticed yet), the owner waits in the wait queue until a later hold period starts.
    pub(crate) fn hold_period(&self) -> Option<PeriodId> {
        let (hold, session) = (&self.hold, &self.session);
        let sibling = hold.kind.sibling();
        let sibling = sibling.and_then(|sibling| session.hold_period(hold.owner, sibling));
        hold.state().held_period().max(sibling)
    }

    /// Waits until the owner has a [hold period](HoldRef::hold_period) that started after `since`.
    pub(crate) async fn held_after(&self, since: Option<PeriodId>) {
        let own = self.hold.held_after(since);
        match self.hold.kind.sibling() {
            None => own.await,
            Some(sibling) => tokio::select! {
                biased;
                () = own => {}
                () = self.session.wait_until_held(self.hold.owner, sibling, since) => {}
            },
        }
    }

    /// Returns a function that registers that the owner waits for the object since the given time.
    pub(crate) fn registrar(
        &self,
    ) -> impl FnOnce(Instant) -> Option<RegisteredWait> + Send + 'static {
        let (registration, hold) = (self.session.registration.clone(), self.hold.clone());
        move |since| {
            let request = hold.state().request.clone();
            registration.add_wait(&hold.object, hold.owner, since, &request)
        }
    }

    /// Settles what the owner has released of the sibling object, which could block this one. If this fails, the store may
    /// refuse the next request: see [`HoldRef::owner_reads`].
    pub(crate) async fn settle_sibling(&self) {
        if let Some(sibling) = self.hold.kind.sibling() {
            // Boxed: few kinds have a sibling object.
            let _ = Box::pin(self.session.settle_released(self.hold.owner, sibling)).await;
        }
    }

    /// Returns whether this is a write side whose owner reads now, when all that it has released of the read side is settled.
    ///
    /// The store refuses a writer that reads. It may have granted the read to an attempt that was canceled in flight, and that was
    /// settled or not since.
    pub(crate) async fn owner_reads(&self) -> Result<bool> {
        let (hold, session) = (&self.hold, &self.session);
        let sibling = hold.kind.sibling();
        let Some(read_side) = sibling.filter(|_| hold.object.layout().writes()) else {
            return Ok(false);
        };
        session.settle_released(hold.owner, read_side).await?;
        Ok(session.hold_period(hold.owner, read_side).is_some())
    }
}
