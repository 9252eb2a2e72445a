//! The limits of a request, implemented once for all primitives.
//!
//! - *Wait limit.* When it has passed, the request is dropped, and the last contact with the store decides
//!   the result. If that was an answer, the result is `None`: the store refused the request. Otherwise it is
//!   the error with which the store could not be reached, or, while its replicas are awaited, that of an earlier attempt
//!   which too few of them acknowledged.
//! - *Outage limit.* An outage starts with the first failure after the last answer and ends with the next
//!   answer. While it lasts, the request is repeated after pauses. When it has lasted for the limit, the
//!   request fails. A shorter wait limit has precedence.

use std::future::Future;
use std::pin::pin;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::{Request, WaitQueues};
use crate::backoff::Backoff;
use crate::error::{Error, Result};
use crate::join::Boxed;
use crate::lease::{Expiry, WaitLimit};
use crate::store::{LastContact, Progress, Store};

/// How long a request waits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RequestLimits {
    pub(crate) wait: WaitLimit,
    /// When waiting fails in an outage, counted from its start.
    pub(crate) outage: Expiry,
}

/// Extra wait at the wait limit if there has been no contact with the store: a process that was suspended
/// then still receives an answer that has arrived.
const FINAL_GRACE: Duration = Duration::from_millis(50);

/// Pauses of a request during an outage, in addition to those of the exchange and of connecting.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

impl RequestLimits {
    /// Returns the limits of a request. `outage` is its own outage limit or the client's; without one, only
    /// the response timeout applies.
    pub(crate) fn new(wait: WaitLimit, outage: Option<Expiry>) -> RequestLimits {
        RequestLimits {
            wait,
            outage: outage.unwrap_or(Expiry::In(Duration::ZERO)),
        }
    }

    pub(crate) fn waits(&self) -> bool {
        !matches!(self.wait, WaitLimit::None)
    }

    /// Returns how long an outage with this error may last. Attempts are always repeated for the response
    /// timeout. (An embedded store has none: an outage there is one of another member of a multi-lock.)
    fn outage_limit_for(&self, error: &Error, store: &Store) -> Expiry {
        match store.response_timeout() {
            Some(timeout) if error.is_outage() => self.outage.max(Expiry::In(timeout)),
            _ => self.outage,
        }
    }
}

impl WaitQueues {
    /// Runs a request within its limits. The request records its contacts with the store in `progress`.
    #[expect(
        clippy::manual_async_fn,
        reason = "an `async fn` stores its arguments twice"
    )]
    pub(crate) fn within<'a, R: Request>(
        &'a self,
        limits: &'a RequestLimits,
        progress: &'a Progress,
        request: &'a mut R,
    ) -> impl Future<Output = Result<Option<R::Acquired>>> + Send + 'a {
        async move {
            if let Some(end) = limits.wait.deadline() {
                return self.run_until(end, limits, progress, request).await;
            }
            match request.acquire(self, limits.waits()).await {
                // Boxed: most requests see no outage.
                Err(error) if limits.waits() && error.is_transient() => {
                    Box::pin(self.retry_after_outage(error, limits, progress, request)).await
                }
                done => done,
            }
        }
    }

    /// Boxed: most requests have no wait limit and should not carry this future.
    fn run_until<'a, R: Request>(
        &'a self,
        end: Instant,
        limits: &'a RequestLimits,
        progress: &'a Progress,
        request: &'a mut R,
    ) -> Boxed<'a, Result<Option<R::Acquired>>> {
        Box::pin(async move {
            let begun = Instant::now();
            {
                let wait = WaitLimit::Endless;
                let endless = RequestLimits { wait, ..*limits };
                let mut acquiring = pin!(self.within(&endless, progress, request));
                if let Ok(done) = timeout_at(end, acquiring.as_mut()).await {
                    return done;
                }
                if progress.last_contact().is_none()
                    && let Ok(done) = timeout(FINAL_GRACE, acquiring).await
                {
                    return done;
                }
            }
            match progress.last_contact() {
                Some(LastContact::Answered) => Ok(None),
                Some(LastContact::Failed { error, .. }) => Err(error),
                None => Err(progress.not_replicated().unwrap_or_else(|| {
                    let channel = request.place().channel;
                    self.store.timeout_error(channel, end - begun)
                })),
            }
        })
    }

    /// Repeats a request that has failed with `error`, until the outage limit.
    async fn retry_after_outage<R: Request>(
        &self,
        mut error: Error,
        limits: &RequestLimits,
        progress: &Progress,
        request: &mut R,
    ) -> Result<Option<R::Acquired>> {
        let pauses = Backoff::exponential(FIRST_PAUSE, 2.0, LONGEST_PAUSE);
        // Start of the outage, and start of the latest try in it.
        let mut outage: Option<(Instant, Instant)> = None;
        let mut tries = 0;
        loop {
            progress.record_failure(Instant::now(), error.clone());
            let mut since = match progress.last_contact() {
                Some(LastContact::Failed { since, .. }) => since,
                Some(LastContact::Answered) | None => Instant::now(),
            };
            let limit = limits.outage_limit_for(&error, &self.store);
            // A failure this soon after the previous one continues its outage, even if the store answered in
            // between but its replicas did not.
            let same_outage_within = match (&error, self.store.response_timeout()) {
                // An embedded store has no outages but those of a test.
                (_, None) => Expiry::In(2 * LONGEST_PAUSE),
                (Error::NotReplicated { within, .. }, Some(timeout)) => {
                    limit.max(Expiry::In(within.saturating_add(timeout)))
                }
                (_, Some(timeout)) => Expiry::In(timeout),
            };
            if let Some((earlier, retried_at)) = outage
                && Expiry::In(retried_at.elapsed()) < same_outage_within
            {
                since = since.min(earlier);
            }
            if Expiry::In(since.elapsed()) >= limit {
                return Err(error);
            }
            if outage.is_none_or(|(earlier, _)| earlier != since) {
                tries = 0;
            }
            if limits.outage != Expiry::In(Duration::ZERO) {
                self.log_outage(request.place().channel, &error);
            }
            sleep(pauses.pause(tries)).await;
            tries = tries.saturating_add(1);
            outage = Some((since, Instant::now()));
            error = match request.acquire(self, true).await {
                Err(error) if error.is_transient() => error,
                done => return done,
            };
        }
    }

    /// Logs that waiters keep waiting, once per outage and client.
    fn log_outage(&self, channel: &str, error: &Error) {
        // A waiter in the same outage gets here again within this time.
        let timeout = self.store.response_timeout();
        let recent = timeout.map(|timeout| timeout.saturating_add(10 * LONGEST_PAUSE));
        let now = Instant::now();
        let before = self.last_outage.lock().replace(now);
        if before.is_none_or(|before| recent.is_some_and(|recent| now - before > recent)) {
            tracing::warn!(channel, %error, "the store is unavailable; waiters keep waiting");
        }
    }
}
