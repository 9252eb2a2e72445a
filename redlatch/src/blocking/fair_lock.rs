//! The methods that only the fair lock has, for threads.

use std::time::Duration;

use super::Lock;
use crate::Owner;
use crate::error::Result;
use crate::inspect::Waiter;
use crate::kind::Fair;

impl Lock<Fair> {
    /// Sets how long the lock is kept free for a waiter of this handle when its turn has come:
    /// [`crate::FairLock::wait_time`].
    #[must_use]
    pub fn wait_time(mut self, wait_time: Duration) -> Lock<Fair> {
        self.inner = self.inner.wait_time(wait_time);
        self
    }

    /// Sets how long disconnected waiters keep their positions: [`crate::FairLock::grace_period`].
    #[must_use]
    pub fn grace_period(mut self, grace_period: Duration) -> Lock<Fair> {
        self.inner = self.inner.grace_period(grace_period);
        self
    }

    /// Returns the waiters for the lock, the next one first: [`crate::FairLock::queue`].
    pub fn queue(&self) -> Result<Vec<Waiter>> {
        self.worker
            .call(&self.inner, async move |lock| lock.queue().await)
    }

    /// Returns the number of waiters before `owner`, which for a thread is its
    /// [`current_thread`](super::current_thread): [`crate::FairLock::position`].
    pub fn position(&self, owner: Owner) -> Result<Option<usize>> {
        self.worker
            .call(&self.inner, async move |lock| lock.position(owner).await)
    }
}
