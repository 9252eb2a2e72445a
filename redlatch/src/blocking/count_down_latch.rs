//! Latches for threads.

use std::sync::Arc;
use std::time::Duration;

use super::Worker;
use crate::error::Result;

/// A handle of a count-down latch, for threads: [`crate::CountDownLatch`]. The errors are those of
/// the async methods of the same names.
///
/// ```
/// # fn main() -> redlatch::Result<()> {
/// let client = redlatch::blocking::Client::embedded()?; // or connect("redis://127.0.0.1")?
/// let ready = client.count_down_latch("workers-ready");
/// ready.try_set_count(1)?;
/// let other = ready.clone();
/// let worker = std::thread::spawn(move || other.count_down());
/// ready.wait()?;
/// # worker.join().unwrap()?; Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct CountDownLatch {
    pub(super) inner: crate::CountDownLatch,
    pub(super) worker: Arc<Worker>,
}

impl CountDownLatch {
    /// Returns a handle of the same latch whose waiters wait through an outage of the store that
    /// lasts at most this long: [`crate::CountDownLatch::with_outage_limit`].
    #[must_use]
    pub fn with_outage_limit(mut self, limit: Duration) -> CountDownLatch {
        self.inner = self.inner.with_outage_limit(limit);
        self
    }

    /// Returns the name as it was passed in.
    pub fn name(&self) -> &str {
        self.inner.name()
    }

    /// Sets the count of an open latch: [`crate::CountDownLatch::try_set_count`].
    pub fn try_set_count(&self, count: u32) -> Result<bool> {
        self.worker.call(&self.inner, async move |latch| {
            latch.try_set_count(count).await
        })
    }

    /// Decrements the count by one and returns the new count:
    /// [`crate::CountDownLatch::count_down`].
    pub fn count_down(&self) -> Result<u64> {
        self.count_down_by(1)
    }

    /// Decrements the count by `by`: [`crate::CountDownLatch::count_down_by`].
    pub fn count_down_by(&self, by: u32) -> Result<u64> {
        self.worker.call(&self.inner, async move |latch| {
            latch.count_down_by(by).await
        })
    }

    /// Returns the count; 0 if the latch is open.
    pub fn count(&self) -> Result<u64> {
        self.worker
            .call(&self.inner, async move |latch| latch.count().await)
    }

    /// Blocks until the latch is open: [`crate::CountDownLatch::wait`].
    pub fn wait(&self) -> Result<()> {
        self.worker
            .call(&self.inner, async move |latch| latch.wait().await)
    }

    /// Blocks until the latch is open, at most this long. Returns whether it is open:
    /// [`crate::CountDownLatch::wait_for`].
    pub fn wait_for(&self, wait: Duration) -> Result<bool> {
        self.worker
            .call(&self.inner, async move |latch| latch.wait_for(wait).await)
    }

    /// Deletes the latch, which opens it: [`crate::CountDownLatch::delete`].
    pub fn delete(&self) -> Result<bool> {
        self.worker
            .call(&self.inner, async move |latch| latch.delete().await)
    }
}
