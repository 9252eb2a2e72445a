//! The libraries, each with its default settings except the lease (30 s) and the interval at which it polls.

use std::sync::Arc;
use std::time::Duration;

use distkit::DistkitRedisKey;
use distkit::lock::{LockOptions, Mutex, MutexGuard};
use distributed_lock_core::error::LockError;
use distributed_lock_core::traits::{DistributedLock as _, LockHandle as _, LockProvider as _};
use distributed_lock_redis::{RedisDistributedLock, RedisLockHandle, RedisLockProvider};
use redis::aio::ConnectionManager;
use rslock::{LockGuard, LockManager};

use crate::Result;

const LEASE: Duration = Duration::from_secs(30);

/// A client of a lock library.
pub(crate) trait Library: Send + Sync + 'static {
    /// The lock of one task.
    type Lock: Send + Sync + 'static;
    type Guard: Send;

    fn handle(&self, name: &str) -> Self::Lock;
    /// Waits until the lock is acquired.
    fn acquire(lock: &Self::Lock) -> impl Future<Output = Result<Self::Guard>> + Send;
    fn release(guard: Self::Guard) -> impl Future<Output = Result<()>> + Send;
}

pub(crate) struct Redlatch(redlatch::Client);

impl Redlatch {
    pub(crate) async fn connect(url: &str) -> Result<Redlatch> {
        Ok(Redlatch(redlatch::Client::connect(url).await?))
    }
}

impl Library for Redlatch {
    type Lock = redlatch::Lock;
    type Guard = redlatch::Guard;

    fn handle(&self, name: &str) -> Self::Lock {
        self.0.lock(name)
    }

    async fn acquire(lock: &Self::Lock) -> Result<Self::Guard> {
        Ok(lock.lock().await?)
    }

    async fn release(guard: Self::Guard) -> Result<()> {
        Ok(guard.unlock().await?)
    }
}

pub(crate) struct Rslock(LockManager);

impl Rslock {
    /// It pauses for a random time below the interval, but not after each third attempt.
    pub(crate) fn new(url: &str, interval: Duration) -> Rslock {
        let mut manager = LockManager::new(vec![url]);
        manager.set_retry(3, interval);
        Rslock(manager)
    }
}

impl Library for Rslock {
    type Lock = (LockManager, String);
    type Guard = LockGuard;

    fn handle(&self, name: &str) -> Self::Lock {
        (self.0.clone(), name.to_owned())
    }

    async fn acquire((manager, name): &Self::Lock) -> Result<Self::Guard> {
        Ok(manager.acquire(name.as_str(), LEASE).await?)
    }

    async fn release(guard: Self::Guard) -> Result<()> {
        guard.release().await;
        Ok(())
    }
}

pub(crate) struct Distkit(ConnectionManager, Duration);

impl Distkit {
    pub(crate) async fn connect(url: &str, interval: Duration) -> Result<Distkit> {
        let manager = redis::Client::open(url)?.get_connection_manager().await?;
        Ok(Distkit(manager, interval))
    }
}

impl Library for Distkit {
    type Lock = Arc<Mutex>;
    type Guard = MutexGuard;

    fn handle(&self, name: &str) -> Self::Lock {
        let key = DistkitRedisKey::new_or_panic(name.to_owned());
        let options = LockOptions::builder(key, self.0.clone());
        Mutex::new(options.ttl(LEASE).retry_interval(self.1).build())
    }

    async fn acquire(lock: &Self::Lock) -> Result<Self::Guard> {
        Ok(lock.lock().await?)
    }

    async fn release(guard: Self::Guard) -> Result<()> {
        guard.release().await?;
        Ok(())
    }
}

pub(crate) struct DistributedLock(RedisLockProvider, Duration);

impl DistributedLock {
    pub(crate) async fn connect(url: &str, interval: Duration) -> Result<DistributedLock> {
        Ok(DistributedLock(
            RedisLockProvider::new(url).await?,
            interval,
        ))
    }
}

impl Library for DistributedLock {
    type Lock = (RedisDistributedLock, Duration);
    type Guard = RedisLockHandle;

    fn handle(&self, name: &str) -> Self::Lock {
        (self.0.create_lock(name), self.1)
    }

    async fn acquire((lock, interval): &Self::Lock) -> Result<Self::Guard> {
        // With one server it does not wait: if another owner holds the lock, it times out at once.
        loop {
            match lock.acquire(None).await {
                Err(LockError::Timeout(_)) => tokio::time::sleep(*interval).await,
                acquired => return Ok(acquired?),
            }
        }
    }

    async fn release(guard: Self::Guard) -> Result<()> {
        Ok(guard.release().await?)
    }
}
