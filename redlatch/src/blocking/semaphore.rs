//! Semaphores for threads.

use std::sync::Arc;
use std::time::Duration;

use super::Worker;
use crate::error::Result;

/// A handle of a semaphore, for threads: [`crate::Semaphore`], where it also says when to use
/// another. The errors are those of the async methods of the same names.
///
/// ```
/// # fn main() -> redlatch::Result<()> {
/// let client = redlatch::blocking::Client::embedded()?; // or connect("redis://127.0.0.1")?
/// let downloads = client.semaphore("downloads");
/// downloads.try_set_permits(1)?;
/// let permit = downloads.acquire()?;
/// assert!(downloads.try_acquire()?.is_none());
/// # permit.release() }
/// ```
#[derive(Clone, Debug)]
pub struct Semaphore {
    pub(super) inner: crate::Semaphore,
    pub(super) outage_limit: Option<Duration>,
    pub(super) worker: Arc<Worker>,
}

impl Semaphore {
    /// The same semaphore, whose waiters wait through an outage of the store that lasts at most this long:
    /// [`crate::AcquirePermits::outage_limit`].
    #[must_use]
    pub fn with_outage_limit(mut self, limit: Duration) -> Semaphore {
        self.outage_limit = Some(limit);
        self
    }

    /// The name, as it was given.
    pub fn name(&self) -> &str {
        self.inner.name()
    }

    /// Sets the number of permits, if none is set: [`crate::Semaphore::try_set_permits`].
    pub fn try_set_permits(&self, permits: u32) -> Result<bool> {
        let set = self.inner.try_set_permits(permits);
        self.worker.run(set.into_future())?
    }

    /// The same for a semaphore that ceases to be after a time:
    /// [`crate::TrySetPermits::time_to_live`].
    pub fn try_set_permits_with_time_to_live(
        &self,
        permits: u32,
        time_to_live: Duration,
    ) -> Result<bool> {
        let set = self.inner.try_set_permits(permits);
        let set = set.time_to_live(time_to_live);
        self.worker.run(set.into_future())?
    }

    /// Blocks until a permit is had.
    pub fn acquire(&self) -> Result<SemaphorePermits> {
        self.acquire_many(1)
    }

    /// Blocks until so many permits are had, all at once.
    pub fn acquire_many(&self, permits: u32) -> Result<SemaphorePermits> {
        let mut acquire = self.inner.acquire_many(permits);
        if let Some(limit) = self.outage_limit {
            acquire = acquire.outage_limit(limit);
        }
        let permits = self.worker.run(acquire.into_future())??;
        Ok(self.guard(permits))
    }

    /// Takes a permit if there is one; blocks for one answer of the store.
    pub fn try_acquire(&self) -> Result<Option<SemaphorePermits>> {
        self.try_acquire_many_for(1, Duration::ZERO)
    }

    /// Takes so many permits if there are so many; blocks for one answer of the store.
    pub fn try_acquire_many(&self, permits: u32) -> Result<Option<SemaphorePermits>> {
        self.try_acquire_many_for(permits, Duration::ZERO)
    }

    /// Blocks until a permit is had, at most this long.
    pub fn try_acquire_for(&self, wait: Duration) -> Result<Option<SemaphorePermits>> {
        self.try_acquire_many_for(1, wait)
    }

    /// Blocks until so many permits are had, at most this long: [`crate::TryAcquirePermits::wait`].
    pub fn try_acquire_many_for(
        &self,
        permits: u32,
        wait: Duration,
    ) -> Result<Option<SemaphorePermits>> {
        let mut acquire = self.inner.try_acquire_many(permits).wait(wait);
        if let Some(limit) = self.outage_limit {
            acquire = acquire.outage_limit(limit);
        }
        let permits = self.worker.run(acquire.into_future())??;
        Ok(permits.map(|permits| self.guard(permits)))
    }

    /// Adds permits that somebody took: [`crate::Semaphore::release`].
    pub fn release(&self, permits: u32) -> Result<()> {
        self.worker.ask(&self.inner, async move |semaphore| {
            semaphore.release(permits).await
        })
    }

    /// The same, if the semaphore is there: [`crate::Semaphore::release_if_exists`].
    pub fn release_if_exists(&self, permits: u32) -> Result<bool> {
        self.worker.ask(&self.inner, async move |semaphore| {
            semaphore.release_if_exists(permits).await
        })
    }

    /// Adds permits, or takes some away for good: [`crate::Semaphore::add_permits`].
    pub fn add_permits(&self, permits: i32) -> Result<()> {
        self.worker.ask(&self.inner, async move |semaphore| {
            semaphore.add_permits(permits).await
        })
    }

    /// Takes all permits that are there: [`crate::Semaphore::drain`].
    pub fn drain(&self) -> Result<i64> {
        self.worker
            .ask(&self.inner, async move |semaphore| semaphore.drain().await)
    }

    /// How many permits are there to be taken: [`crate::Semaphore::available`].
    pub fn available(&self) -> Result<i64> {
        self.worker.ask(&self.inner, async move |semaphore| {
            semaphore.available().await
        })
    }

    /// Removes the semaphore: [`crate::Semaphore::delete`].
    pub fn delete(&self) -> Result<bool> {
        self.worker
            .ask(&self.inner, async move |semaphore| semaphore.delete().await)
    }

    fn guard(&self, permits: crate::SemaphorePermits) -> SemaphorePermits {
        SemaphorePermits {
            inner: permits,
            worker: self.worker.clone(),
        }
    }
}

/// Permits that are had: [`crate::SemaphorePermits`]. They may go to another thread. Dropping does
/// not block: it gives back in the background.
///
/// While the store cannot be reached that is tried again for ten minutes, but the client's thread
/// ends ten seconds after the last of its handles and guards: what has not been given back by then
/// stays taken, and the log says so. Keep a clone of the [`Client`](super::Client) and call
/// [`Client::settled`](super::Client::settled) where that matters.
#[must_use = "the permits are given back as soon as this is dropped"]
#[derive(Debug)]
pub struct SemaphorePermits {
    inner: crate::SemaphorePermits,
    worker: Arc<Worker>,
}

impl SemaphorePermits {
    /// How many permits these are.
    pub fn permits(&self) -> u32 {
        self.inner.permits()
    }

    /// The semaphore's name.
    pub fn name(&self) -> &str {
        self.inner.name()
    }

    /// Gives the permits back and returns when the store has them:
    /// [`crate::SemaphorePermits::release`].
    pub fn release(self) -> Result<()> {
        self.worker.run(self.inner.release())?
    }

    /// Keeps the permits for good: [`crate::SemaphorePermits::forget`].
    pub fn forget(self) {
        self.inner.forget();
    }
}
