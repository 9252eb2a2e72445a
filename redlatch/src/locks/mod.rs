//! The parts that all locks share: handle, requests and guard.
//!
//! A kind of lock supplies its steps ([`HoldKind`]); everything above them is written once:
//!
//! 1. [`Lock`] is the handle: a name, a session and the kind's settings.
//! 2. [`Acquire`] and [`TryAcquire`] are the requests. Run for a lock (`attempt`), they look up the
//!    owner's hold, wait in the client's queue and run [`HoldKind::acquire`] with the hold count that
//!    the owner should have.
//! 3. [`Guard`] stands for one count of the hold. Releasing or dropping it decrements the local hold
//!    count and settles it with the store.
//!
//! Requests and guards serve all that is acquired: several locks as one and permits as well.
//!
//! A *kind* is a type with the keys and settings of a handle: [`HoldKind`]. Each kind has its own
//! type of keys, so a step can name only keys that its kind has. Fenced and spin locks have the steps
//! of the re-entrant lock (`reentrant::ReentrantKind`). An election is a kind, too: its steps contain
//! the scripts of the fair lock as functions, and a term. A value of a group is a kind although all
//! values are fields of one hash: `ObjectKeys` has an identity besides the key, by which holds,
//! queues and the order of a multi-lock distinguish them.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use crate::error::Result;
use crate::hold::HoldKind;
pub use crate::hold::Holder;
use crate::lease::Expiry;
use crate::name::ObjectKeys;
use crate::owner::Owner;
use crate::session::{HoldRef, Session};
use crate::store::{Delivery, Progress};

pub(crate) mod fair;
pub(crate) mod fair_shared;
pub(crate) mod fenced;
pub(crate) mod group;
pub(crate) mod permits;
pub(crate) mod read_write;
pub(crate) mod reentrant;
pub(crate) mod spin;

mod acquirable;
mod attempt;
mod busy;
mod guard;
mod held_lock;
mod hold_guard;
mod report;
mod request;
pub(crate) mod rules;
mod write_side;

pub use acquirable::{Acquirable, HasLease, HasMinimum, HasOwner};
pub(crate) use acquirable::{AcquireOnce, Held, HeldForLease, Options};
pub use busy::{Busy, OrBusy, TryLockError};
pub use guard::Guard;
pub(crate) use held_lock::HeldLock;
pub(crate) use hold_guard::HoldGuard;
pub use request::{Acquire, TryAcquire};
pub use write_side::WriteSide;
pub(crate) use write_side::{RequiredWriteHold, ToReadSide};

/// Distinguishes the kinds of lock: a type that carries the keys and the settings of a handle.
///
/// Only this crate defines kinds; see [`Reentrant`] and the types listed below it.
#[expect(
    private_bounds,
    reason = "sealed: the rules of a kind are the crate's own"
)]
pub trait LockKind: HoldKind + Sized {}

impl<K: HoldKind> LockKind for K {}

/// The default kind of [`Lock`]: re-entrant, with waiters woken by messages (Redisson: `RLock`).
#[derive(Debug, Clone)]
pub struct Reentrant {
    pub(super) object: Arc<ObjectKeys>,
}

/// A kind whose holder is an [`Owner`] that may hold it several times: all kinds except permits.
pub trait OwnedKind: LockKind {}

impl<K: LockKind> HasLease for Lock<K> {}
impl<K: OwnedKind> HasOwner for Lock<K> {}

/// A lock that one owner at a time holds, across all processes that use the same store.
///
/// A handle is cheap, does nothing by itself, and can be cloned and shared. The *name* identifies
/// the lock: two handles with the same name are the same lock, also in other processes, and in Java
/// through Redisson's `getLock(name)`.
///
/// The client's watchdog renews held locks until they are released; see [`Acquire::lease`] for a
/// lease that is not renewed. A message from the store wakes waiters, so they do not poll. Waiters
/// of one client are served in order of arrival.
///
/// # When not to use it
///
/// Inside one process a [`tokio::sync::Mutex`] does the same at a thousandth of the cost. A lock
/// with a lease is never a guarantee: a holder that is stopped for longer than its lease can resume
/// while the next holder works. Check [`Guard::is_valid`] before each write, or run the work in
/// [`Lock::run`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
/// let client = redlatch::Client::embedded(); // or Client::connect("redis://127.0.0.1").await?
/// let lock = client.lock("orders:42");
/// let guard = lock.lock().await?;
/// assert!(lock.try_lock().await?.is_none());
/// guard.unlock().await?;
/// # Ok(()) }
/// ```
pub struct Lock<K: LockKind = Reentrant> {
    pub(crate) session: Arc<Session>,
    pub(crate) kind: Arc<K>,
    pub(crate) reentrant: bool,
}

/// A lock of a kind that is known at run time: what requests and multi-locks work with.
#[derive(Clone)]
pub(crate) struct AnyLock {
    pub(crate) session: Arc<Session>,
    pub(crate) kind: Arc<dyn HoldKind>,
}

impl AnyLock {
    /// Returns a reference to the owner's hold, which is created if there is none.
    pub(crate) fn hold_ref(&self, owner: Owner) -> Result<HoldRef> {
        let field = || self.kind.field(&self.session.id, owner);
        self.session.hold_ref(owner, field, &self.kind)
    }

    /// See [`Lock::holders`].
    pub(crate) async fn holders(&self) -> Result<Vec<Holder>> {
        self.kind.object().check()?;
        let step = self.kind.inspect();
        self.session.store.run_idempotent(&step).await
    }

    /// See [`Lock::hold_count`].
    pub(crate) async fn hold_count(&self, owner: Owner) -> Result<u32> {
        let owner = self.session.id.owner_id(owner);
        let holders = self.holders().await?;
        let mine = holders.iter().find(|holder| holder.owner == owner);
        Ok(mine.map_or(0, |holder| holder.holds))
    }

    /// See [`Lock::is_held_by`].
    pub(crate) async fn is_held_by(&self, owner: Owner) -> Result<bool> {
        Ok(self.hold_count(owner).await? > 0)
    }
}

impl<K: LockKind> Lock<K> {
    pub(crate) fn erased(&self) -> AnyLock {
        AnyLock {
            session: self.session.clone(),
            kind: self.kind.clone(),
        }
    }

    /// `kind` creates the kind for the client's prefix and a name.
    pub(crate) fn new(session: Arc<Session>, name: &str, kind: fn(&str, &str) -> K) -> Lock<K> {
        let kind = kind(&session.prefix, name);
        Lock::from_kind(session, kind)
    }

    pub(crate) fn from_kind(session: Arc<Session>, kind: K) -> Lock<K> {
        Lock {
            session,
            kind: Arc::new(kind),
            reentrant: true,
        }
    }

    /// Returns the same lock with different settings.
    pub(crate) fn with_kind(mut self, kind: K) -> Lock<K> {
        self.kind = Arc::new(kind);
        self
    }

    /// Acquires the lock and waits for it without a limit. Await the request, or configure it
    /// first: [`Acquire`].
    pub fn lock(&self) -> Acquire<Lock<K>> {
        Acquire::new(self.clone())
    }

    /// Acquires the lock if it is free; `None` if another owner holds it. Await the request, or
    /// configure it first, for example with a wait limit: [`TryAcquire`].
    ///
    /// The compiler does not warn of `lock.try_lock().await?;`, which releases the lock at once, or
    /// has not acquired it: an `Option` may be ignored. Use `let Some(guard) = … else { … };`. It warns with
    /// [`or_busy`](TryAcquire::or_busy), whose outcome is the guard itself:
    ///
    /// ```compile_fail
    /// #![deny(unused_must_use)]
    /// # async fn example(lock: redlatch::Lock) -> Result<(), redlatch::TryLockError> {
    /// lock.try_lock().or_busy().await?; // unused `Guard` that must be used
    /// # Ok(()) }
    /// ```
    ///
    /// ```
    /// #![deny(unused_must_use)]
    /// # async fn example(lock: redlatch::Lock) -> Result<(), redlatch::TryLockError> {
    /// let guard = lock.try_lock().or_busy().await?;
    /// # drop(guard);
    /// # Ok(()) }
    /// ```
    pub fn try_lock(&self) -> TryAcquire<Lock<K>> {
        TryAcquire::new(self.clone())
    }

    /// Acquires the lock, runs `work` while it is held, and releases it: [`Acquire::run`], which
    /// also documents errors and cancel safety. With a wait limit: [`TryAcquire::run`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// let answer = client.lock("a").run(async { 6 * 7 }).await?;
    /// assert_eq!(answer, 42);
    /// # Ok(()) }
    /// ```
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output> {
        self.lock().run(work).await
    }

    /// Returns a handle of the same lock that is not re-entrant (Redisson: the non-reentrant lock).
    /// If the owner already holds the lock, a request fails immediately with [`Error::AlreadyHeld`](crate::Error::AlreadyHeld)
    /// instead of getting a second hold or waiting for itself. Other owners see no difference.
    #[must_use]
    pub fn non_reentrant(mut self) -> Lock<K> {
        self.reentrant = false;
        self
    }

    /// Returns the name as it was passed in.
    pub fn name(&self) -> &str {
        self.kind.object().name()
    }

    /// Returns whether any owner holds the lock.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidName`](crate::Error::InvalidName), [`Error::WrongKind`](crate::Error::WrongKind), [`Error::Unavailable`](crate::Error::Unavailable),
    /// [`Error::ResponseTimeout`](crate::Error::ResponseTimeout); the same for all methods that only read.
    pub async fn is_locked(&self) -> Result<bool> {
        Ok(self.holder().await?.is_some())
    }

    /// Returns whether `owner` holds the lock through this client, according to the store.
    pub async fn is_held_by(&self, owner: Owner) -> Result<bool> {
        self.erased().is_held_by(owner).await
    }

    /// Returns how many times `owner` holds the lock through this client, according to the store. 0
    /// if it does not.
    pub async fn hold_count(&self, owner: Owner) -> Result<u32> {
        self.erased().hold_count(owner).await
    }

    /// Returns when the lease ends, unless it is renewed. `None` if the lock is free.
    pub async fn remaining_lease(&self) -> Result<Option<Expiry>> {
        let holder = self.holder().await?;
        Ok(holder.map(|holder| holder.remaining))
    }

    /// Returns the holder of the lock, with its hold count and remaining lease; `None` if the lock
    /// is free. Of several readers, returns the one with the longest lease.
    pub async fn holder(&self) -> Result<Option<Holder>> {
        let holders = self.holders().await?;
        Ok(holders.into_iter().max_by_key(|holder| holder.remaining))
    }

    /// Returns all holders of the lock: at most one, except for the read side of a read-write lock.
    pub async fn holders(&self) -> Result<Vec<Holder>> {
        self.erased().holders().await
    }

    /// Releases the lock whichever owner holds it, in any process, and wakes a waiter. Returns
    /// whether it was held. The holder detects the loss at its next renewal or release.
    ///
    /// It only changes locks: other data under the same key is an [`Error::WrongKind`](crate::Error::WrongKind).
    ///
    /// # Errors
    ///
    /// Those of [`Lock::is_locked`], and [`Error::OutcomeUnknown`](crate::Error::OutcomeUnknown): the connection broke before the
    /// answer arrived. The step is not repeated, because another owner may have acquired the lock since.
    ///
    /// # Cancel safety
    ///
    /// If dropped after it started, it continues in the background.
    pub async fn force_unlock(&self) -> Result<bool> {
        let kind = self.valid_kind()?.clone();
        let (store, waiting) = (self.session.store.clone(), self.session.waiting.clone());
        let object = kind.object().clone();
        waiting.record_release(kind.object().channel());
        // Not repeated: a second execution would release the next owner's hold.
        let unlocked = self.session.run_to_completion(&object, async move {
            let step = kind.force();
            let (what, progress) = ("unlocking by force", Progress::default());
            let run =
                store.run_at_most_once(&step, what, Delivery::REQUEST, Duration::ZERO, &progress);
            let unlocked = run.await?.reply;
            if !unlocked {
                // There is no message.
                waiting.wake(kind.object().channel());
            }
            Ok(unlocked)
        });
        let unlocked = unlocked.await?;
        if unlocked {
            tracing::info!(lock = self.kind.object().full_name(), "unlocked by force");
        }
        Ok(unlocked)
    }

    /// Returns the kind with its keys, if the name is valid.
    pub(crate) fn valid_kind(&self) -> Result<&Arc<K>> {
        self.kind.object().check()?;
        Ok(&self.kind)
    }
}

impl<K: LockKind> Clone for Lock<K> {
    fn clone(&self) -> Lock<K> {
        Lock {
            session: self.session.clone(),
            kind: self.kind.clone(),
            reentrant: self.reentrant,
        }
    }
}

impl<K: LockKind> std::fmt::Debug for Lock<K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lock")
            .field("name", &self.name())
            .field("reentrant", &self.reentrant)
            .finish_non_exhaustive()
    }
}
