//! Requests and guards for threads.

use std::future::{Future, IntoFuture};
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use super::forward::forward;
use super::{Blocking, FencedLock, Worker, current_thread};
use crate::error::{Error, Result};
use crate::kind::{FairPermits, FairShared, OwnedKind, Permits, WriteSide};
use crate::locks::Held;
use crate::{
    HasLease, HasMinimum, HasOwner, IntoTicketError, Owner, OwnerId, PermitId, TryLockError,
};

/// Acquires a lock, several locks as one, or permits: [`crate::Acquire`]. The owner is the thread
/// that calls [`Acquire::block`].
pub type Acquire<R = crate::Lock> = Blocking<crate::Acquire<R>>;

/// Acquires or gives up: [`crate::TryAcquire`]. The owner is the thread that calls
/// [`TryAcquire::block`].
pub type TryAcquire<R = crate::Lock> = Blocking<crate::TryAcquire<R>>;

/// Acquires or says who holds it: [`crate::OrBusy`]. The owner is the thread that calls
/// [`OrBusy::block`].
pub type OrBusy<R = crate::Lock> = Blocking<crate::OrBusy<R>>;

/// Sets the permits of a semaphore: [`crate::TrySetPermits`].
pub type TrySetPermits = Blocking<crate::TrySetPermits>;

/// Waits until a latch is open: [`crate::Wait`].
pub type Wait = Blocking<crate::Wait>;

/// Waits until a latch is open or gives up: [`crate::TryWait`].
pub type TryWait = Blocking<crate::TryWait>;

/// What a request acquires: every [`crate::Acquirable`].
pub trait Acquirable: crate::Acquirable {
    /// `()`, or a type that is not `Send` if the thread is the owner, so that the guard stays
    /// there.
    type Thread;
}

impl<K: OwnedKind> Acquirable for crate::Lock<K> {
    type Thread = *const ();
}

impl Acquirable for crate::Lock<Permits> {
    type Thread = ();
}

impl Acquirable for crate::Lock<FairShared<FairPermits>> {
    type Thread = ();
}

impl Acquirable for crate::MultiLock {
    type Thread = *const ();
}

impl Acquirable for crate::RedLock {
    type Thread = *const ();
}

impl Acquirable for crate::Semaphore {
    type Thread = ();
}

/// What a thread holds: [`crate::Guard`].
///
/// Dropping does not block: it releases in the background. The guard of a lock stays on its thread,
/// because the thread is the owner. Permits belong to no thread, so their guards may be moved to
/// another.
#[must_use = "it is released as soon as the guard is dropped"]
pub struct Guard<R: Acquirable = crate::Lock> {
    pub(super) inner: crate::Guard<R>,
    pub(super) worker: Arc<Worker>,
    thread: PhantomData<R::Thread>,
}

/// Held permits of an expirable semaphore: [`crate::PermitGuard`].
pub type PermitGuard = Guard<crate::Lock<Permits>>;

/// Held permits of a fair semaphore: [`crate::FairPermitGuard`].
pub type FairPermitGuard = Guard<crate::Lock<FairShared<FairPermits>>>;

/// Held locks: [`crate::MultiGuard`].
pub type MultiGuard = Guard<crate::MultiLock>;

/// A held RedLock: [`crate::RedGuard`].
pub type RedGuard = Guard<crate::RedLock>;

/// Acquired permits: [`crate::SemaphorePermits`].
///
/// While the store cannot be reached, the release is retried for ten minutes. But a client's own
/// thread ends ten seconds after the last of its handles and guards: permits that are not released
/// by then stay taken, and the log reports it. Where that matters, keep a clone of the
/// [`Client`](super::Client) and call [`Client::flush`](super::Client::flush).
pub type SemaphorePermits = Guard<crate::Semaphore>;

impl<R: Acquirable> Acquire<R> {
    /// Blocks until it is acquired.
    pub fn block(self) -> Result<Guard<R>> {
        let request = self.inner.owner_or(current_thread());
        let inner = self.worker.run(request.into_future())??;
        Ok(Guard::new(inner, self.worker))
    }

    /// Acquires, calls `work` while it is held, and releases: [`crate::Acquire::run`].
    ///
    /// A function cannot be stopped from outside, so `work` gets the guard, and should check
    /// [`Guard::is_valid`] before each write. If it was lost meanwhile, the output is dropped and
    /// this returns [`Error::Lost`]. If `work` panics, it is released.
    ///
    /// ```
    /// # fn main() -> redlatch::Result<()> {
    /// let lock = redlatch::blocking::Client::embedded()?.lock("a");
    /// assert_eq!(lock.lock().run(|guard| guard.hold_count() + 41)?, 42);
    /// # Ok(()) }
    /// ```
    pub fn run<T>(self, work: impl FnOnce(&Guard<R>) -> T) -> Result<T> {
        self.block()?.run_and_release(work)
    }
}

impl<R: Acquirable> TryAcquire<R> {
    /// Blocks until it is acquired or the wait limit has passed (`None`). Without a wait limit it
    /// blocks for one answer of the store.
    pub fn block(self) -> Result<Option<Guard<R>>> {
        let request = self.inner.owner_or(current_thread());
        let guard = self.worker.run(request.into_future())??;
        Ok(guard.map(|inner| Guard::new(inner, self.worker)))
    }

    /// Acquires within the wait limit, calls `work` while it is held, and releases:
    /// [`Acquire::run`]. `None` if it was not acquired.
    pub fn run<T>(self, work: impl FnOnce(&Guard<R>) -> T) -> Result<Option<T>> {
        let guard = self.block()?;
        guard.map(|guard| guard.run_and_release(work)).transpose()
    }

    /// Returns an error that names the holder, in place of `None`: [`crate::TryAcquire::or_busy`].
    pub fn or_busy(self) -> OrBusy<R> {
        Blocking {
            inner: self.inner.or_busy(),
            worker: self.worker,
        }
    }
}

impl<R: Acquirable> OrBusy<R> {
    /// Blocks until it is acquired or the wait limit has passed: [`TryAcquire::block`].
    pub fn block(self) -> Result<Guard<R>, TryLockError> {
        let request = self.inner.owner_or(current_thread());
        let inner = self.worker.run(request.into_future())??;
        Ok(Guard::new(inner, self.worker))
    }

    /// Acquires within the wait limit, calls `work` while it is held, and releases:
    /// [`Acquire::run`].
    pub fn run<T>(self, work: impl FnOnce(&Guard<R>) -> T) -> Result<T, TryLockError> {
        Ok(self.block()?.run_and_release(work)?)
    }
}

impl TrySetPermits {
    /// Blocks until the permits are set. Returns whether this call set them.
    pub fn block(self) -> Result<bool> {
        self.worker.run(self.inner.into_future())?
    }
}

impl Wait {
    /// Blocks until the latch is open.
    pub fn block(self) -> Result<()> {
        self.worker.run(self.inner.into_future())?
    }
}

impl TryWait {
    /// Blocks until the latch is open or the wait limit has passed. Returns whether it is open.
    pub fn block(self) -> Result<bool> {
        self.worker.run(self.inner.into_future())?
    }
}

forward! { [<R: Acquirable> Acquire<R>] "crate::Acquire", [Wait] "crate::Wait" {
    set outage_limit(limit: impl Into<Option<Duration>>);
} }

forward! { [<R: Acquirable> TryAcquire<R>] "crate::TryAcquire", [TryWait] "crate::TryWait" {
    set wait(wait: Duration);
    set outage_limit(limit: impl Into<Option<Duration>>);
} }

forward! { [<R: HasLease> Acquire<R>] "crate::Acquire", [<R: HasLease> TryAcquire<R>] "crate::TryAcquire" {
    set lease(lease: Duration);
    set at_most(limit: Duration);
    set fed_every(interval: Duration);
    set note(note: impl Into<String>);
} }

forward! { [<R: HasOwner> Acquire<R>] "crate::Acquire", [<R: HasOwner> TryAcquire<R>] "crate::TryAcquire" {
    set owner(owner: Owner);
} }

forward! { [<R: HasMinimum> Acquire<R>] "crate::Acquire", [<R: HasMinimum> TryAcquire<R>] "crate::TryAcquire" {
    set at_least(at_least: Duration);
} }

forward! { [TrySetPermits] "crate::TrySetPermits" {
    set time_to_live(time_to_live: Duration);
} }

impl<R: Acquirable> Guard<R> {
    pub(super) fn new(inner: crate::Guard<R>, worker: Arc<Worker>) -> Guard<R> {
        Guard {
            inner,
            worker,
            thread: PhantomData,
        }
    }

    fn run_and_release<T>(self, work: impl FnOnce(&Guard<R>) -> T) -> Result<T> {
        let output = work(&self);
        // Without its runtime nothing can be released, so that no release would report it.
        let known = self.inner.held.loss();
        let loss = match self.finish(|guard| guard.held.release()) {
            Err(Error::NoRuntime) => known,
            released => released.err().and_then(Error::into_loss),
        };
        loss.map_or(Ok(output), Err)
    }

    /// Runs an async method that consumes the guard, or returns it with its error.
    pub(super) fn finish_or_keep<T, F>(
        self,
        method: impl FnOnce(crate::Guard<R>) -> F,
    ) -> Result<T, IntoTicketError<Self>>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, IntoTicketError<crate::Guard<R>>>> + Send + 'static,
    {
        let worker = self.worker;
        match worker.run(method(self.inner)) {
            Ok(done) => done.map_err(|refused| refused.map(|inner| Guard::new(inner, worker))),
            Err(error) => Err(IntoTicketError::new(None, error)),
        }
    }

    /// Runs an async method that consumes the guard.
    fn finish<T, F>(self, method: impl FnOnce(crate::Guard<R>) -> F) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        self.worker.run(method(self.inner))?
    }
}

impl<R: Acquirable + HasLease> Guard<R> {
    /// Releases it and waits until the store has confirmed it: [`crate::Guard::unlock`].
    pub fn unlock(self) -> Result<()> {
        self.finish(crate::Guard::unlock)
    }

    /// Blocks until it is lost, at most this long: [`crate::Guard::lost`]. Returns whether it is
    /// lost. A program that works in intervals while it holds a lock can pause with this.
    ///
    /// ```
    /// # fn main() -> redlatch::Result<()> {
    /// use std::time::Duration;
    ///
    /// let lock = redlatch::blocking::Client::embedded()?.lock("leader");
    /// let guard = lock.lock().block()?;
    /// assert!(!guard.lost(Duration::from_millis(1))?);
    /// lock.force_unlock()?;
    /// # guard.unlock().unwrap_err();
    /// # Ok(()) }
    /// ```
    pub fn lost(&self, wait: Duration) -> Result<bool> {
        let is_lost = self.worker.completes_within(wait, self.inner.lost())?;
        Ok(is_lost || !self.is_valid())
    }
}

forward! { [<R: Acquirable + HasLease> Guard<R>] "crate::Guard" {
    get is_valid() -> bool;
    get valid_for() -> Duration;
    get feed() -> Result<()>;
} }

forward! { [<R: Acquirable + HasOwner> Guard<R>] "crate::Guard" {
    get owner() -> Owner;
} }

forward! { [<K: OwnedKind> Guard<crate::Lock<K>>] "crate::Guard" {
    get name() -> &str;
    get owner_id() -> OwnerId;
    get hold_count() -> u32;
    new reenter() -> Acquire<crate::Lock<K>>;
} }

forward! { [Guard<crate::FencedLock>] "crate::Guard" {
    get token() -> u64;
} }

forward! { [<K: WriteSide> Guard<crate::Lock<K>>] "crate::Guard" {
    new reenter_read() -> Acquire<crate::Lock<K::Read>>;
} }

impl<K: WriteSide> Guard<crate::Lock<K>> {
    /// Releases the write side and keeps reading: [`crate::Guard::downgrade`].
    pub fn downgrade(self) -> Result<Guard<crate::Lock<K::Read>>> {
        let worker = self.worker.clone();
        let inner = self.finish(crate::Guard::downgrade)?;
        Ok(Guard::new(inner, worker))
    }
}

forward! { [PermitGuard] "crate::Guard" {
    get ids() -> Vec<PermitId>;
} }

impl PermitGuard {
    /// Releases the permits and waits until the store has confirmed it: [`crate::Guard::release`].
    pub fn release(self) -> Result<()> {
        self.unlock()
    }

    /// Takes the permits out of the guard: [`crate::Guard::into_ids`].
    pub fn into_ids(self) -> Result<Vec<PermitId>> {
        self.inner.into_ids()
    }
}

impl FairPermitGuard {
    /// Releases the permits and waits until the store has confirmed it: [`crate::Guard::unlock`].
    pub fn release(self) -> Result<()> {
        self.unlock()
    }
}

forward! { [MultiGuard] "crate::Guard" {
    get names() -> impl Iterator<Item = &str>;
} }

impl MultiGuard {
    /// Returns the fencing token of this fenced lock: [`crate::Guard::token`].
    pub fn token(&self, lock: &FencedLock) -> Option<u64> {
        self.inner.token(&lock.inner)
    }
}

forward! { [RedGuard] "crate::Guard" {
    get held_members() -> usize;
} }

forward! { [SemaphorePermits] "crate::Guard" {
    get permits() -> u32;
    get name() -> &str;
} }

impl SemaphorePermits {
    /// Releases the permits and waits until the store has confirmed it: [`crate::Guard::release`].
    pub fn release(self) -> Result<()> {
        self.finish(crate::Guard::<crate::Semaphore>::release)
    }

    /// Keeps the permits: [`crate::Guard::forget`].
    pub fn forget(self) {
        self.inner.forget();
    }
}

impl<R: Acquirable> std::fmt::Debug for Guard<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.inner.fmt(f)
    }
}
