//! The read-write lock for threads.

use std::sync::Arc;

use super::{Guard, Lock, Worker};
use crate::error::Result;
use crate::kind::{Read, Write};

/// A lock that either many reading threads or one writing thread holds: [`crate::ReadWriteLock`].
///
/// ```
/// # fn main() -> redlatch::Result<()> {
/// let client = redlatch::blocking::Client::embedded()?; // or connect("redis://127.0.0.1")?
/// let catalogue = client.read_write_lock("catalogue");
/// let writer = catalogue.write().lock()?;
/// let reader = catalogue.read().lock()?; // the same thread: a writer may also read
/// writer.unlock()?;
/// assert!(!catalogue.write().is_locked()?);
/// reader.unlock()
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct ReadWriteLock {
    pub(super) inner: crate::ReadWriteLock,
    pub(super) worker: Arc<Worker>,
}

impl ReadWriteLock {
    /// Returns the same lock with priority for writers: [`crate::ReadWriteLock::prefer_writers`].
    #[must_use]
    pub fn prefer_writers(mut self) -> ReadWriteLock {
        self.inner = self.inner.prefer_writers();
        self
    }

    /// Returns the name as it was passed in.
    pub fn name(&self) -> &str {
        self.inner.name()
    }

    /// Returns the side that many threads may hold at a time: [`crate::ReadWriteLock::read`].
    pub fn read(&self) -> Lock<Read> {
        Lock {
            inner: self.inner.read().clone(),
            lease: None,
            outage_limit: None,
            worker: self.worker.clone(),
        }
    }

    /// Returns the side that one thread may hold at a time: [`crate::ReadWriteLock::write`].
    pub fn write(&self) -> Lock<Write> {
        Lock {
            inner: self.inner.write().clone(),
            lease: None,
            outage_limit: None,
            worker: self.worker.clone(),
        }
    }
}

impl Guard<Write> {
    /// Releases the write side and keeps reading: [`crate::Guard::downgrade`].
    pub fn downgrade(self) -> Result<Guard<Read>> {
        self.convert(crate::Guard::downgrade)
    }
}
