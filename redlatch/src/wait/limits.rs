//! The limits of a request, kept once for every primitive.
//!
//! - *Wait limit.* When it has passed the request is dropped and answered with the latest news: `None` if the
//!   store has answered, because then another owner holds the object; otherwise the error with
//!   which the store could not be asked.
//! - *Outage limit.* An outage begins with the first failure after the last answer and ends with the next
//!   answer. While it lasts the request is made again, after a pause. When it has lasted for the limit,
//!   the request fails. A wait limit that is shorter wins.

use std::future::Future;
use std::pin::pin;
use std::sync::PoisonError;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::{Attempt, WaitingRoom};
use crate::Boxed;
use crate::backoff::Backoff;
use crate::error::{Error, Result};
use crate::lease::Patience;
use crate::store::{Sent, Store, Word};

/// How long a request waits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) patience: Patience,
    /// How long an outage may last before waiting fails.
    pub(crate) outage: Duration,
}

/// A whole request, with everything that it waits for. It may be dropped at any point and made again.
pub(crate) trait Request: Attempt {
    /// The result of a success.
    type Obtained: Send;

    /// Waits until it is acquired; if it does not wait, asks once (`None`: another owner has it).
    fn obtain(
        &mut self,
        waits: bool,
    ) -> impl Future<Output = Result<Option<Self::Obtained>>> + Send;
}

/// An answer in flight at the wait limit is waited for this long, if there is no other news: a
/// process that stood still finds it here.
const LAST_MOMENT: Duration = Duration::from_millis(50);

/// The pauses of a request during an outage, besides those of the exchange and of connecting.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

impl Limits {
    /// The limits of a request: its own outage limit, or else the client's, or else none beyond the
    /// response timeout.
    pub(crate) fn new(patience: Patience, outage: Option<Duration>) -> Limits {
        Limits {
            patience,
            outage: outage.unwrap_or_default(),
        }
    }

    pub(crate) fn waits(&self) -> bool {
        !matches!(self.patience, Patience::None)
    }

    /// How long an outage may last that shows as this error. With any limit, tries are repeated
    /// for as long as the response timeout. (An embedded store has none: what fails there is another
    /// member of a multi-lock.)
    fn outage_of(&self, error: &Error, store: &Store) -> Duration {
        match store.response_timeout() {
            Duration::MAX => self.outage,
            timeout if error.is_outage() => self.outage.max(timeout),
            _ => self.outage,
        }
    }
}

impl WaitingRoom {
    /// Makes a request within its limits. `sent` is where the request notes the news of the store.
    pub(crate) async fn within<R: Request>(
        &self,
        limits: Limits,
        sent: &Sent,
        request: &mut R,
    ) -> Result<Option<R::Obtained>> {
        match limits.patience.end() {
            Some(end) => self.until(end, limits, sent, request).await,
            None => self.through_outages(limits, sent, request).await,
        }
    }

    /// Boxed: most requests have no wait limit, and would have to carry this about.
    fn until<'a, R: Request>(
        &'a self,
        end: Instant,
        limits: Limits,
        sent: &'a Sent,
        request: &'a mut R,
    ) -> Boxed<'a, Result<Option<R::Obtained>>> {
        Box::pin(async move {
            let begun = Instant::now();
            {
                let mut obtaining = pin!(self.through_outages(limits, sent, request));
                if let Ok(done) = timeout_at(end, obtaining.as_mut()).await {
                    return done;
                }
                if sent.word().is_none()
                    && let Ok(done) = timeout(LAST_MOMENT, obtaining).await
                {
                    return done;
                }
            }
            match sent.word() {
                Some(Word::Answered) => Ok(None),
                Some(Word::Failed { error, .. }) => Err(error),
                None => Err(self.store.no_answer(request.channel(), end - begun)),
            }
        })
    }

    async fn through_outages<R: Request>(
        &self,
        limits: Limits,
        sent: &Sent,
        request: &mut R,
    ) -> Result<Option<R::Obtained>> {
        let pauses = Backoff::exponential(FIRST_PAUSE, 2.0, LONGEST_PAUSE);
        // Since when there is an outage, and when the latest try in it was begun.
        let mut outage: Option<(Instant, Instant)> = None;
        let mut tries = 0;
        loop {
            let error = match request.obtain(limits.waits()).await {
                Err(error) if limits.waits() && error.is_transient() => error,
                done => return done,
            };
            sent.failed(Instant::now(), error.clone());
            let mut since = match sent.word() {
                Some(Word::Failed { since, .. }) => since,
                Some(Word::Answered) | None => Instant::now(),
            };
            let limit = limits.outage_of(&error, &self.store);
            // Tries that fail one after the other are one outage, also if the store answered in between
            // but its replicas did not.
            let timeout = self.store.response_timeout();
            let in_a_row = match &error {
                Error::NotReplicated { within, .. } => limit.max(within.saturating_add(timeout)),
                _ => timeout,
            };
            if let Some((earlier, asked)) = outage
                && asked.elapsed() < in_a_row
            {
                since = since.min(earlier);
            }
            if since.elapsed() >= limit {
                return Err(error);
            }
            if outage.is_none_or(|(earlier, _)| earlier != since) {
                tries = 0;
            }
            if !limits.outage.is_zero() {
                self.tell_outage(request.channel(), &error);
            }
            sleep(pauses.pause(tries)).await;
            tries = tries.saturating_add(1);
            outage = Some((since, Instant::now()));
        }
    }

    /// Logs once per outage and client that requests wait.
    fn tell_outage(&self, channel: &str, error: &Error) {
        // A waiter that is still in the same outage comes here again within this time.
        let recent = self
            .store
            .response_timeout()
            .saturating_add(10 * LONGEST_PAUSE);
        let now = Instant::now();
        let before = {
            let mut latest = self.outage.lock().unwrap_or_else(PoisonError::into_inner);
            latest.replace(now)
        };
        if before.is_none_or(|before| now.duration_since(before) > recent) {
            tracing::warn!(channel, %error, "the store cannot be asked; waiters wait for it");
        }
    }
}
