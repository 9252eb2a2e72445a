//! Locks for threads.

use std::future::Future;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use super::{Worker, current_thread};
use crate::error::{Error, Result};
use crate::inspect::Holder;
use crate::kind::{Fenced, LockKind, OwnedKind, Reentrant, Spin};
use crate::{Backoff, Expiry, Owner};

/// A handle of a lock, for threads: [`crate::Lock`]. The errors are those of the async methods of
/// the same names.
#[derive(Clone, Debug)]
pub struct Lock<K: LockKind = Reentrant> {
    pub(super) inner: crate::Lock<K>,
    pub(super) lease: Option<Duration>,
    pub(super) outage_limit: Option<Duration>,
    pub(super) worker: Arc<Worker>,
}

impl<K: LockKind + OwnedKind> Lock<K> {
    /// Returns a handle of the same lock that holds it for exactly this long, without renewal:
    /// [`crate::Acquire::lease`].
    #[must_use]
    pub fn with_lease(mut self, lease: Duration) -> Lock<K> {
        self.lease = Some(lease);
        self
    }

    /// Returns a handle of the same lock whose waiters wait through an outage of the store that
    /// lasts at most this long: [`crate::Acquire::outage_limit`].
    #[must_use]
    pub fn with_outage_limit(mut self, limit: Duration) -> Lock<K> {
        self.outage_limit = Some(limit);
        self
    }

    /// Returns a handle of the same lock that a thread cannot re-enter:
    /// [`crate::Lock::non_reentrant`].
    #[must_use]
    pub fn non_reentrant(mut self) -> Lock<K> {
        self.inner = self.inner.non_reentrant();
        self
    }

    /// Returns the name as it was passed in.
    pub fn name(&self) -> &str {
        self.inner.name()
    }

    /// Blocks until the lock is acquired.
    pub fn lock(&self) -> Result<Guard<K>> {
        let mut request = self.inner.lock().owner(current_thread());
        if let Some(lease) = self.lease {
            request = request.lease(lease);
        }
        if let Some(limit) = self.outage_limit {
            request = request.outage_limit(limit);
        }
        let guard = self.worker.run(request.into_future())??;
        Ok(self.guard(guard))
    }

    /// Acquires the lock if it is free; blocks for one answer of the store.
    pub fn try_lock(&self) -> Result<Option<Guard<K>>> {
        self.try_lock_for(Duration::ZERO)
    }

    /// Blocks until the lock is acquired, at most this long: [`crate::TryAcquire::wait`].
    pub fn try_lock_for(&self, wait: Duration) -> Result<Option<Guard<K>>> {
        let mut request = self.inner.try_lock().owner(current_thread()).wait(wait);
        if let Some(lease) = self.lease {
            request = request.lease(lease);
        }
        if let Some(limit) = self.outage_limit {
            request = request.outage_limit(limit);
        }
        let guard = self.worker.run(request.into_future())??;
        Ok(guard.map(|guard| self.guard(guard)))
    }

    /// Returns whether any owner holds the lock.
    pub fn is_locked(&self) -> Result<bool> {
        self.worker
            .call(&self.inner, async move |lock| lock.is_locked().await)
    }

    /// Returns whether the calling thread holds the lock, according to the store.
    pub fn is_held_by_current_thread(&self) -> Result<bool> {
        Ok(self.hold_count()? > 0)
    }

    /// Returns how many times the calling thread holds the lock, according to the store.
    pub fn hold_count(&self) -> Result<u32> {
        let me = current_thread();
        self.worker
            .call(&self.inner, async move |lock| lock.hold_count(me).await)
    }

    /// Returns the time until the lease ends, unless it is renewed; `None` if the lock is free.
    pub fn remaining_lease(&self) -> Result<Option<Expiry>> {
        self.worker
            .call(&self.inner, async move |lock| lock.remaining_lease().await)
    }

    /// Returns the holder of the lock.
    pub fn holder(&self) -> Result<Option<Holder>> {
        self.worker
            .call(&self.inner, async move |lock| lock.holder().await)
    }

    /// Releases the lock whichever owner holds it: [`crate::Lock::force_unlock`].
    pub fn force_unlock(&self) -> Result<bool> {
        self.worker
            .call(&self.inner, async move |lock| lock.force_unlock().await)
    }

    /// Returns all holders of the lock: [`crate::Lock::holders`].
    pub fn holders(&self) -> Result<Vec<Holder>> {
        self.worker
            .call(&self.inner, async move |lock| lock.holders().await)
    }

    fn guard(&self, guard: crate::Guard<K>) -> Guard<K> {
        Guard {
            inner: Some(guard),
            worker: self.worker.clone(),
            thread: PhantomData,
        }
    }
}

/// A lock held by a thread: [`crate::Guard`].
///
/// Dropping does not block: it releases in the background. The guard stays on its thread, because
/// the thread is the owner.
#[must_use = "the lock is released as soon as the guard is dropped"]
#[derive(Debug)]
pub struct Guard<K: LockKind = Reentrant> {
    /// `None` only inside methods that consume the guard.
    inner: Option<crate::Guard<K>>,
    worker: Arc<Worker>,
    thread: PhantomData<*const ()>,
}

impl<K: LockKind> Guard<K> {
    /// Releases the lock and waits until the store has confirmed it: [`crate::Guard::unlock`].
    pub fn unlock(mut self) -> Result<()> {
        match self.inner.take() {
            Some(guard) => self.worker.run(guard.unlock())?,
            None => Ok(()),
        }
    }

    /// Converts the guard to another kind, on the client's thread.
    pub(super) fn convert<L, F>(
        mut self,
        conversion: impl FnOnce(crate::Guard<K>) -> F,
    ) -> Result<Guard<L>>
    where
        L: LockKind,
        F: Future<Output = Result<crate::Guard<L>>> + Send + 'static,
    {
        let guard = self.inner.take().ok_or(Error::NoRuntime)?;
        Ok(Guard {
            inner: Some(self.worker.run(conversion(guard))??),
            worker: self.worker.clone(),
            thread: PhantomData,
        })
    }

    /// Returns the name of the lock as it was passed in.
    pub fn name(&self) -> &str {
        self.inner.as_ref().map_or("", crate::Guard::name)
    }

    /// Returns whether the lock is certainly still held: [`crate::Guard::is_valid`].
    pub fn is_valid(&self) -> bool {
        self.inner.as_ref().is_some_and(crate::Guard::is_valid)
    }

    /// Returns how long the lock is certainly held without a renewal.
    pub fn valid_for(&self) -> Duration {
        self.inner
            .as_ref()
            .map_or(Duration::ZERO, crate::Guard::valid_for)
    }
}

impl Lock<Spin> {
    /// Sets the pause between attempts: [`crate::SpinLock::backoff`].
    #[must_use]
    pub fn backoff(mut self, backoff: Backoff) -> Lock<Spin> {
        self.inner = self.inner.backoff(backoff);
        self
    }
}

impl Lock<Fenced> {
    /// Returns the token of the latest acquisition: [`crate::FencedLock::current_token`].
    pub fn current_token(&self) -> Result<u64> {
        self.worker
            .call(&self.inner, async move |lock| lock.current_token().await)
    }

    /// Raises the token to at least `at_least`: [`crate::FencedLock::advance_token`].
    pub fn advance_token(&self, at_least: u64) -> Result<u64> {
        self.worker.call(&self.inner, async move |lock| {
            lock.advance_token(at_least).await
        })
    }

    /// Deletes the token's key of a free lock: [`crate::FencedLock::delete_token`].
    pub fn delete_token(&self) -> Result<bool> {
        self.worker
            .call(&self.inner, async move |lock| lock.delete_token().await)
    }
}

impl Guard<Fenced> {
    /// Returns the fencing token of this acquisition: [`crate::Guard::token`].
    pub fn token(&self) -> u64 {
        self.inner.as_ref().map_or(0, crate::Guard::token)
    }
}

impl<K: LockKind + OwnedKind> Guard<K> {
    /// Returns the number of guards that this thread has of the lock.
    pub fn hold_count(&self) -> u32 {
        self.inner.as_ref().map_or(0, crate::Guard::hold_count)
    }

    /// Returns the thread's owner: [`current_thread`].
    pub fn owner(&self) -> Owner {
        self.inner
            .as_ref()
            .map_or_else(current_thread, crate::Guard::owner)
    }
}
