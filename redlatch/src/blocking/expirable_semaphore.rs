//! Permits with leases, for threads.

use std::sync::Arc;
use std::time::Duration;

use super::Worker;
use crate::error::Result;
use crate::inspect::HeldPermit;
use crate::{Expiry, PermitId};

/// A handle of an expirable semaphore, for threads: [`crate::ExpirableSemaphore`]. The errors are
/// those of the async methods of the same names.
///
/// ```
/// use std::time::Duration;
///
/// # fn main() -> redlatch::Result<()> {
/// let client = redlatch::blocking::Client::embedded()?; // or connect("redis://127.0.0.1")?
/// let jobs = client.expirable_semaphore("heavy-jobs");
/// jobs.try_set_permits(1)?;
/// let permit = jobs.acquire()?;
/// assert!(jobs.try_acquire_for(Duration::from_millis(1))?.is_none());
/// permit.release()?;
/// assert_eq!(jobs.available()?, 1);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct ExpirableSemaphore {
    inner: crate::ExpirableSemaphore,
    lease: Option<Duration>,
    outage_limit: Option<Duration>,
    worker: Arc<Worker>,
}

impl ExpirableSemaphore {
    pub(super) fn new(inner: crate::ExpirableSemaphore, worker: Arc<Worker>) -> ExpirableSemaphore {
        ExpirableSemaphore {
            inner,
            lease: None,
            outage_limit: None,
            worker,
        }
    }

    /// Returns a handle of the same semaphore that holds permits for exactly this long, without
    /// renewal: [`crate::Acquire::lease`].
    #[must_use]
    pub fn with_lease(mut self, lease: Duration) -> ExpirableSemaphore {
        self.lease = Some(lease);
        self
    }

    /// Returns a handle of the same semaphore whose waiters wait through an outage of the store
    /// that lasts at most this long: [`crate::Acquire::outage_limit`].
    #[must_use]
    pub fn with_outage_limit(mut self, limit: Duration) -> ExpirableSemaphore {
        self.outage_limit = Some(limit);
        self
    }

    /// Returns the name as it was passed in.
    pub fn name(&self) -> &str {
        self.inner.name()
    }

    /// Blocks until a permit is acquired.
    pub fn acquire(&self) -> Result<PermitGuard> {
        self.acquire_many(1)
    }

    /// Blocks until this many permits are acquired, all or none:
    /// [`crate::ExpirableSemaphore::acquire_many`].
    pub fn acquire_many(&self, permits: u32) -> Result<PermitGuard> {
        let mut request = self.inner.acquire_many(permits);
        if let Some(lease) = self.lease {
            request = request.lease(lease);
        }
        if let Some(limit) = self.outage_limit {
            request = request.outage_limit(limit);
        }
        let guard = self.worker.run(request.into_future())??;
        Ok(self.guard(guard))
    }

    /// Acquires a permit if it is free; blocks for one answer of the store.
    pub fn try_acquire(&self) -> Result<Option<PermitGuard>> {
        self.try_acquire_many_for(1, Duration::ZERO)
    }

    /// Acquires this many permits if they are free, all or none; blocks for one answer of the store.
    pub fn try_acquire_many(&self, permits: u32) -> Result<Option<PermitGuard>> {
        self.try_acquire_many_for(permits, Duration::ZERO)
    }

    /// Blocks until a permit is acquired, at most this long: [`crate::TryAcquire::wait`].
    pub fn try_acquire_for(&self, wait: Duration) -> Result<Option<PermitGuard>> {
        self.try_acquire_many_for(1, wait)
    }

    /// Blocks until this many permits are acquired, at most this long: [`crate::TryAcquire::wait`].
    pub fn try_acquire_many_for(
        &self,
        permits: u32,
        wait: Duration,
    ) -> Result<Option<PermitGuard>> {
        let mut request = self.inner.try_acquire_many(permits).wait(wait);
        if let Some(lease) = self.lease {
            request = request.lease(lease);
        }
        if let Some(limit) = self.outage_limit {
            request = request.outage_limit(limit);
        }
        let guard = self.worker.run(request.into_future())??;
        Ok(guard.map(|guard| self.guard(guard)))
    }

    /// Releases a permit by its id: [`crate::ExpirableSemaphore::release`].
    pub fn release(&self, id: PermitId) -> Result<()> {
        self.worker.call(&self.inner, async move |semaphore| {
            semaphore.release(id).await
        })
    }

    /// Releases several permits, all or none: [`crate::ExpirableSemaphore::release_many`].
    pub fn release_many(&self, ids: &[PermitId]) -> Result<()> {
        let ids = ids.to_vec();
        self.worker.call(&self.inner, async move |semaphore| {
            semaphore.release_many(&ids).await
        })
    }

    /// Releases a permit if it is held: [`crate::ExpirableSemaphore::try_release`].
    pub fn try_release(&self, id: PermitId) -> Result<bool> {
        self.worker.call(&self.inner, async move |semaphore| {
            semaphore.try_release(id).await
        })
    }

    /// Releases those of several permits that are held:
    /// [`crate::ExpirableSemaphore::try_release_many`].
    pub fn try_release_many(&self, ids: &[PermitId]) -> Result<usize> {
        let ids = ids.to_vec();
        self.worker.call(&self.inner, async move |semaphore| {
            semaphore.try_release_many(&ids).await
        })
    }

    /// Sets a permit's remaining lease: [`crate::ExpirableSemaphore::update_lease`].
    pub fn update_lease(&self, id: PermitId, lease: Duration) -> Result<bool> {
        self.worker.call(&self.inner, async move |semaphore| {
            semaphore.update_lease(id, lease).await
        })
    }

    /// Returns the time until a permit expires: [`crate::ExpirableSemaphore::lease_of`].
    pub fn lease_of(&self, id: PermitId) -> Result<Option<Expiry>> {
        self.worker.call(&self.inner, async move |semaphore| {
            semaphore.lease_of(id).await
        })
    }

    /// Returns the number of free permits: [`crate::ExpirableSemaphore::available`].
    pub fn available(&self) -> Result<i64> {
        self.worker
            .call(&self.inner, async |semaphore| semaphore.available().await)
    }

    /// Returns the number of held permits.
    pub fn acquired(&self) -> Result<i64> {
        self.worker
            .call(&self.inner, async |semaphore| semaphore.acquired().await)
    }

    /// Returns the total number of permits, free and held.
    pub fn total(&self) -> Result<i64> {
        self.worker
            .call(&self.inner, async |semaphore| semaphore.total().await)
    }

    /// Returns the held permits: [`crate::ExpirableSemaphore::held_permits`].
    pub fn held_permits(&self) -> Result<Vec<HeldPermit>> {
        self.worker.call(&self.inner, async |semaphore| {
            semaphore.held_permits().await
        })
    }

    /// Sets the total number of permits if it is not set yet:
    /// [`crate::ExpirableSemaphore::try_set_permits`].
    pub fn try_set_permits(&self, permits: u32) -> Result<bool> {
        self.worker.call(&self.inner, async move |semaphore| {
            semaphore.try_set_permits(permits).await
        })
    }

    /// Sets the total number of permits: [`crate::ExpirableSemaphore::set_permits`].
    pub fn set_permits(&self, permits: u32) -> Result<()> {
        self.worker.call(&self.inner, async move |semaphore| {
            semaphore.set_permits(permits).await
        })
    }

    /// Adds permits, or removes some: [`crate::ExpirableSemaphore::add_permits`].
    pub fn add_permits(&self, permits: i32) -> Result<()> {
        self.worker.call(&self.inner, async move |semaphore| {
            semaphore.add_permits(permits).await
        })
    }

    /// Releases all held permits: [`crate::ExpirableSemaphore::force_release`].
    pub fn force_release(&self) -> Result<bool> {
        self.worker.call(&self.inner, async |semaphore| {
            semaphore.force_release().await
        })
    }

    /// Deletes the semaphore: [`crate::ExpirableSemaphore::delete`].
    pub fn delete(&self) -> Result<bool> {
        self.worker
            .call(&self.inner, async |semaphore| semaphore.delete().await)
    }

    fn guard(&self, guard: crate::PermitGuard) -> PermitGuard {
        PermitGuard {
            inner: Some(guard),
            worker: self.worker.clone(),
        }
    }
}

/// Permits held by a threaded program: [`crate::PermitGuard`].
///
/// Dropping does not block: it releases the permits in the background. Permits belong to no thread,
/// so the guard may be moved to another.
#[must_use = "the permits are released as soon as the guard is dropped"]
#[derive(Debug)]
pub struct PermitGuard {
    /// `None` only inside methods that consume the guard.
    inner: Option<crate::PermitGuard>,
    worker: Arc<Worker>,
}

impl PermitGuard {
    /// Releases the permits and waits until the store has confirmed it: [`crate::Guard::release`].
    pub fn release(mut self) -> Result<()> {
        match self.inner.take() {
            Some(guard) => self.worker.run(guard.release())?,
            None => Ok(()),
        }
    }

    /// Returns the ids of the permits.
    pub fn ids(&self) -> Vec<PermitId> {
        self.inner.as_ref().map_or_else(Vec::new, crate::Guard::ids)
    }

    /// Takes the permits out of the guard: [`crate::Guard::into_ids`].
    pub fn into_ids(mut self) -> Result<Vec<PermitId>> {
        match self.inner.take() {
            Some(guard) => guard.into_ids(),
            None => Ok(Vec::new()),
        }
    }

    /// Returns whether the permits are certainly still held: [`crate::Guard::is_valid`].
    pub fn is_valid(&self) -> bool {
        self.inner.as_ref().is_some_and(crate::Guard::is_valid)
    }

    /// Returns how long the permits are certainly held without a renewal.
    pub fn valid_for(&self) -> Duration {
        self.inner
            .as_ref()
            .map_or(Duration::ZERO, crate::Guard::valid_for)
    }
}
