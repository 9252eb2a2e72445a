//! Semaphores for threads.

use std::sync::Arc;
use std::time::Duration;

use super::Worker;
use crate::error::Result;

/// A handle of a semaphore, for threads: [`crate::Semaphore`], which also describes when to use
/// another type. The errors are those of the async methods of the same names.
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
    /// Returns a handle of the same semaphore whose waiters wait through an outage of the store
    /// that lasts at most this long: [`crate::Acquire::outage_limit`].
    #[must_use]
    pub fn with_outage_limit(mut self, limit: Duration) -> Semaphore {
        self.outage_limit = Some(limit);
        self
    }

    /// Returns the name as it was passed in.
    pub fn name(&self) -> &str {
        self.inner.name()
    }

    /// Sets the number of permits if it is not set yet: [`crate::Semaphore::try_set_permits`].
    pub fn try_set_permits(&self, permits: u32) -> Result<bool> {
        let set = self.inner.try_set_permits(permits);
        self.worker.run(set.into_future())?
    }

    /// Sets the number of permits, if it is not set yet, for a limited time:
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

    /// Blocks until a permit is acquired.
    pub fn acquire(&self) -> Result<SemaphorePermits> {
        self.acquire_many(1)
    }

    /// Blocks until this many permits are acquired, all or none.
    pub fn acquire_many(&self, permits: u32) -> Result<SemaphorePermits> {
        let mut acquire = self.inner.acquire_many(permits);
        if let Some(limit) = self.outage_limit {
            acquire = acquire.outage_limit(limit);
        }
        let permits = self.worker.run(acquire.into_future())??;
        Ok(self.guard(permits))
    }

    /// Acquires a permit if it is available; blocks for one answer of the store.
    pub fn try_acquire(&self) -> Result<Option<SemaphorePermits>> {
        self.try_acquire_many_for(1, Duration::ZERO)
    }

    /// Acquires this many permits if they are available, all or none; blocks for one answer of the store.
    pub fn try_acquire_many(&self, permits: u32) -> Result<Option<SemaphorePermits>> {
        self.try_acquire_many_for(permits, Duration::ZERO)
    }

    /// Blocks until a permit is acquired, at most this long.
    pub fn try_acquire_for(&self, wait: Duration) -> Result<Option<SemaphorePermits>> {
        self.try_acquire_many_for(1, wait)
    }

    /// Blocks until this many permits are acquired, at most this long:
    /// [`crate::TryAcquire::wait`].
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

    /// Adds permits that were acquired here or elsewhere: [`crate::Semaphore::release`].
    pub fn release(&self, permits: u32) -> Result<()> {
        self.worker.call(&self.inner, async move |semaphore| {
            semaphore.release(permits).await
        })
    }

    /// Adds permits if the semaphore exists: [`crate::Semaphore::release_if_exists`].
    pub fn release_if_exists(&self, permits: u32) -> Result<bool> {
        self.worker.call(&self.inner, async move |semaphore| {
            semaphore.release_if_exists(permits).await
        })
    }

    /// Adds permits, or removes them permanently: [`crate::Semaphore::add_permits`].
    pub fn add_permits(&self, permits: i32) -> Result<()> {
        self.worker.call(&self.inner, async move |semaphore| {
            semaphore.add_permits(permits).await
        })
    }

    /// Removes all available permits: [`crate::Semaphore::drain`].
    pub fn drain(&self) -> Result<i64> {
        self.worker
            .call(&self.inner, async move |semaphore| semaphore.drain().await)
    }

    /// Returns the number of available permits: [`crate::Semaphore::available`].
    pub fn available(&self) -> Result<i64> {
        self.worker.call(&self.inner, async move |semaphore| {
            semaphore.available().await
        })
    }

    /// Deletes the semaphore: [`crate::Semaphore::delete`].
    pub fn delete(&self) -> Result<bool> {
        self.worker
            .call(&self.inner, async move |semaphore| semaphore.delete().await)
    }

    fn guard(&self, permits: crate::SemaphorePermits) -> SemaphorePermits {
        SemaphorePermits {
            inner: permits,
            worker: self.worker.clone(),
        }
    }
}

/// Acquired permits: [`crate::SemaphorePermits`]. They may move to another thread. Dropping does
/// not block: it releases them in the background.
///
/// While the store cannot be reached, the release is retried for ten minutes. But the client's
/// thread ends ten seconds after the last of its handles and guards: permits that are not released
/// by then stay taken, and the log reports it. Where that matters, keep a clone of the
/// [`Client`](super::Client) and call [`Client::flush`](super::Client::flush).
#[must_use = "the permits are released as soon as this is dropped"]
#[derive(Debug)]
pub struct SemaphorePermits {
    inner: crate::SemaphorePermits,
    worker: Arc<Worker>,
}

impl SemaphorePermits {
    /// Returns the number of permits.
    pub fn permits(&self) -> u32 {
        self.inner.permits()
    }

    /// Returns the semaphore's name.
    pub fn name(&self) -> &str {
        self.inner.name()
    }

    /// Releases the permits and waits until the store has confirmed it:
    /// [`crate::SemaphorePermits::release`].
    pub fn release(self) -> Result<()> {
        self.worker.run(self.inner.release())?
    }

    /// Keeps the permits: [`crate::SemaphorePermits::forget`].
    pub fn forget(self) {
        self.inner.forget();
    }
}
