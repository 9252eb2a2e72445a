//! The request that sets the permits: a builder that is awaited.

use std::future::IntoFuture;
use std::time::Duration;

use super::Semaphore;
use crate::counters;
use crate::error::Result;
use crate::join::Boxed;
use crate::lease::Lease;

/// Sets the permits when awaited, if they are not set yet: [`Semaphore::try_set_permits`].
#[must_use = "nothing is set until this is awaited"]
#[derive(Debug)]
pub struct TrySetPermits {
    pub(super) semaphore: Semaphore,
    pub(super) permits: u32,
    pub(super) time_to_live: Option<Duration>,
}

impl TrySetPermits {
    /// Sets the time after which the semaphore ceases to exist, regardless of its use: 1 ms to
    /// [`MAX_LEASE`](crate::MAX_LEASE), truncated to whole milliseconds. Other values fail with
    /// [`InvalidLease`](crate::Error::InvalidLease) when the request is awaited. The end of this time wakes no waiters:
    /// they wait until permits are set again.
    pub fn time_to_live(mut self, time_to_live: Duration) -> TrySetPermits {
        self.time_to_live = Some(time_to_live);
        self
    }

    async fn set(&self) -> Result<bool> {
        let object = self.semaphore.object()?;
        let permits = self.permits;
        super::checked_count(permits)?;
        let time_to_live = self.time_to_live.map(Lease::new).transpose()?;
        let session = &self.semaphore.session;
        let set = session
            .run_at_most_once(
                object,
                object,
                move |object| {
                    counters::set_if_absent(object, permits, time_to_live, permits, false)
                },
                "setting the permits",
            )
            .await?;
        // The message may arrive after the next request of the caller, on another connection.
        session.waiting.wake(self.semaphore.object.channel());
        Ok(set)
    }
}

impl IntoFuture for TrySetPermits {
    type Output = Result<bool>;
    type IntoFuture = Boxed<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move { self.set().await })
    }
}
