//! The fair semaphore.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use super::{FairShared, Part};
use crate::error::Result;
use crate::locks::fair::FairTimes;
use crate::locks::{Acquire, Guard, Holder, Lock, TryAcquire};
use crate::metrics::Kind;
use crate::name::{FairKeys, KeyLayout, ObjectKeys};
use crate::observe::inspect::Waiter;
use crate::session::Session;

/// A semaphore whose permits are acquired in the order of the requests, across all clients, and have leases.
///
/// It is not in Redisson. Its data in the store is this library's own, so the other semaphores of this name, also
/// Redisson's, are refused by the store while permits of this one are held
/// ([`Error::WrongKind`](crate::Error::WrongKind)).
///
/// - The number of permits is that of the handle, not of the store: nothing has to be set, and nothing is lost with the
///   data. Use the same number everywhere. While some handles have another one, each counts with its own.
/// - A guard holds permits. The client's watchdog renews them until they are released or dropped, or they are held for a
///   fixed time ([`Acquire::lease`]). The permits of a process that died come back after one lease, by default at most
///   30 s.
/// - Waiters queue in the store, as for a [`FairLock`](crate::FairLock): first come, first served. A request for many permits is not
///   overtaken by a smaller one: those behind it wait, even if there are enough permits for them. A plain
///   [`try_acquire`](FairSemaphore::try_acquire) neither joins the queue nor overtakes it.
/// - A release, or a waiter that gives up, serves as many waiters as the permits are enough for, in the same step, with
///   the [grants](crate::ClientBuilder::fair_grants) of the fair lock. Waiters that died delay the others by one
///   [grace period](FairSemaphore::grace_period) in total, a waiter whose process hangs by one lease or its
///   [wait time](FairSemaphore::wait_time).
///
/// If the store loses its data, holders learn of it at their next renewal, and waiters retry within 5 s, those further
/// back in the queue a little later.
///
/// # When not to use it
///
/// Each step reads all holders, which takes the server about a microsecond for each. Where no request starves,
/// [`Client::expirable_semaphore`](crate::Client::expirable_semaphore) costs less.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
/// let client = redlatch::Client::embedded(); // or Client::connect("redis://127.0.0.1").await?
/// let jobs = client.fair_semaphore("heavy-jobs", 3);
///
/// let two = jobs.acquire_many(2).await?;
/// assert_eq!(jobs.available().await?, 1);
/// assert!(jobs.try_acquire_many(2).await?.is_none());
/// two.release().await
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct FairSemaphore {
    lock: Lock<FairShared<FairPermits>>,
}

/// Held permits of a [`FairSemaphore`].
///
/// [`Guard::release`] or [`Guard::unlock`] releases them; dropping the guard releases them in the background.
pub type FairPermitGuard = Guard<Lock<FairShared<FairPermits>>>;

/// A number of permits; in the type parameter of [`FairPermitGuard`].
#[derive(Debug, Clone)]
pub struct FairPermits {
    n: u32,
}

impl Part for FairPermits {
    const LAYOUT: KeyLayout = KeyLayout::FairSemaphore;
    const METRIC: Kind = Kind::FairSemaphore;

    fn permits(&self) -> Option<u32> {
        Some(self.n)
    }
}

/// Returns the kind for a request of `n` of `total` permits.
pub(super) fn permits(prefix: &str, name: &str, n: u32, total: u32) -> FairShared<FairPermits> {
    let object = ObjectKeys::new(FairPermits::LAYOUT, prefix, name);
    FairShared {
        keys: FairKeys::shared(object.into()).into(),
        times: FairTimes::default(),
        part: FairPermits { n },
        total,
    }
}

impl FairSemaphore {
    pub(crate) fn new(session: Arc<Session>, name: &str, total: u32) -> FairSemaphore {
        let kind = permits(&session.prefix, name, 1, total);
        FairSemaphore {
            lock: Lock::from_kind(session, kind),
        }
    }

    /// Returns the name as it was passed in.
    pub fn name(&self) -> &str {
        self.lock.name()
    }

    /// Sets how long permits are kept for a waiter of this handle when its turn has come: [`Lock::wait_time`].
    #[must_use]
    pub fn wait_time(self, wait_time: Duration) -> FairSemaphore {
        let lock = self.lock.wait_time(wait_time);
        FairSemaphore { lock }
    }

    /// Sets how long disconnected waiters keep their positions once their turn has come: [`Lock::grace_period`].
    #[must_use]
    pub fn grace_period(self, grace_period: Duration) -> FairSemaphore {
        let lock = self.lock.grace_period(grace_period);
        FairSemaphore { lock }
    }

    /// Acquires one permit and waits for it without a limit. Await the request, or set a lease first: [`Acquire`].
    pub fn acquire(&self) -> Acquire<Lock<FairShared<FairPermits>>> {
        self.acquire_many(1)
    }

    /// Acquires this many permits, all or none, and waits for them without a limit. Await the request, or set a lease first:
    /// [`Acquire`].
    ///
    /// # Errors
    ///
    /// Those of [`Acquire`], and [`Error::InvalidCount`](crate::Error::InvalidCount) unless 1 to all permits of the
    /// semaphore are requested, or if it has none, or more than 2147483647.
    pub fn acquire_many(&self, permits: u32) -> Acquire<Lock<FairShared<FairPermits>>> {
        self.with_permits(permits).lock()
    }

    /// Acquires one permit if it is free and no other owner waits; `None` if not. Await the request, or configure it first, for
    /// example with a wait limit: [`TryAcquire`].
    pub fn try_acquire(&self) -> TryAcquire<Lock<FairShared<FairPermits>>> {
        self.try_acquire_many(1)
    }

    /// Acquires this many permits if they are free and no other owner waits, all or none; `None` if not. Await the request, or
    /// configure it first: [`TryAcquire`]. Errors as for [`FairSemaphore::acquire_many`].
    pub fn try_acquire_many(&self, permits: u32) -> TryAcquire<Lock<FairShared<FairPermits>>> {
        self.with_permits(permits).try_lock()
    }

    /// Acquires one permit, runs `work` while it is held, and releases it, as [`Lock::run`].
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output> {
        self.lock.run(work).await
    }

    /// Returns the number of free permits, with the total number of this handle; negative if more are held. Waiters may be
    /// waiting for them.
    ///
    /// # Errors
    ///
    /// As [`Lock::is_locked`].
    pub async fn available(&self) -> Result<i64> {
        let holders = self.holders().await?;
        let held: i64 = holders.iter().map(|holder| i64::from(holder.holds)).sum();
        Ok(i64::from(self.lock.kind.total) - held)
    }

    /// Returns the holders, in any process. Their hold count is the number of their permits. Errors as for
    /// [`FairSemaphore::available`].
    pub async fn holders(&self) -> Result<Vec<Holder>> {
        self.lock.holders().await
    }

    /// Returns the waiters in any process, the next one first: [`Lock::queue`], with its errors.
    pub async fn queue(&self) -> Result<Vec<Waiter>> {
        self.lock.queue().await
    }

    /// Releases all held permits, whichever process holds them, and serves the queue: [`Lock::force_unlock`], with its errors.
    /// Returns whether any were held.
    pub async fn force_release(&self) -> Result<bool> {
        self.lock.force_unlock().await
    }

    fn with_permits(&self, n: u32) -> Lock<FairShared<FairPermits>> {
        let kind = FairShared {
            part: FairPermits { n },
            ..(*self.lock.kind).clone()
        };
        self.lock.clone().with_kind(kind)
    }
}

impl FairPermitGuard {
    /// Releases the permits and waits until the store has confirmed it: [`Guard::unlock`], with its errors and its cancel
    /// safety.
    pub async fn release(self) -> Result<()> {
        self.unlock().await
    }
}
