//! The requests for permits: builders that are awaited.

use std::future::IntoFuture;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::guard::RELEASE_RETRY_LIMIT;
use super::rules::TakePermits;
use super::{Semaphore, SemaphorePermits};
use crate::error::{Error, Result};
use crate::join::Boxed;
use crate::lease::{Expiry, Lease, MAX_LEASE, WaitLimit};
use crate::name::ObjectKeys;
use crate::primitives::counter::{Read, SetIfAbsent};
use crate::step::Outcome;
use crate::store::{Delivery, Progress};
use crate::wait::{Attempt, Limits, Request};

/// Acquires permits when awaited, waiting without a limit: [`Semaphore::acquire`],
/// [`Semaphore::acquire_many`].
///
/// # Errors
///
/// [`Error::InvalidName`], [`Error::InvalidCount`], [`Error::WrongKind`], [`Error::Unavailable`],
/// [`Error::NoRuntime`]; [`Error::ResponseTimeout`]: there was no answer in time, and permits that
/// a later answer grants are released; [`Error::OutcomeUnknown`]: the connection broke after the
/// step was sent, so permits may have been taken that no caller has. The step is not sent again,
/// because it could take them twice.
///
/// # Cancel safety
///
/// May be dropped at any point: it leaves the queue immediately, and permits that were acquired
/// meanwhile are released in the background. Once polled, it must be polled further or dropped: a
/// request that is kept but not polled keeps its position in the queue.
///
/// The release requires the answer that confirms the acquisition. If there is never an answer,
/// after [`Error::ResponseTimeout`] or a drop, because the connection breaks or the runtime ends,
/// the permits may stay taken. The log reports it (`tracing`, level WARN, with the semaphore's name).
#[must_use = "nothing is acquired until this is awaited"]
#[derive(Debug)]
pub struct AcquirePermits {
    pub(super) semaphore: Semaphore,
    pub(super) permits: u32,
    pub(super) outage_limit: Option<Duration>,
}

/// Acquires permits or gives up when awaited: [`Semaphore::try_acquire`],
/// [`Semaphore::try_acquire_many`].
///
/// Errors and cancel safety are those of [`AcquirePermits`].
#[must_use = "nothing is acquired until this is awaited"]
#[derive(Debug)]
pub struct TryAcquirePermits {
    pub(super) semaphore: Semaphore,
    pub(super) permits: u32,
    pub(super) wait: Duration,
    pub(super) outage_limit: Option<Duration>,
}

impl AcquirePermits {
    /// Waits through an outage of the store that lasts at most this long:
    /// [`ClientBuilder::outage_limit`](crate::ClientBuilder::outage_limit), for this request. A
    /// step whose outcome is unknown ([`Error::OutcomeUnknown`]) is not repeated, regardless of the limit.
    pub fn outage_limit(mut self, limit: Duration) -> AcquirePermits {
        self.outage_limit = Some(limit);
        self
    }
}

impl TryAcquirePermits {
    /// As [`AcquirePermits::outage_limit`]. The wait limit wins if it is shorter.
    pub fn outage_limit(mut self, limit: Duration) -> TryAcquirePermits {
        self.outage_limit = Some(limit);
        self
    }

    /// Waits at most this long for permits, counted from the first poll. The request returns at
    /// this limit, also during an outage: `None` if there were too few permits, or the error if the
    /// store could not be reached. Permits that a step in flight acquires after that are released
    /// in the background. A time that the clock cannot represent means no limit.
    pub fn wait(mut self, wait: Duration) -> TryAcquirePermits {
        self.wait = wait;
        self
    }
}

impl IntoFuture for AcquirePermits {
    type Output = Result<SemaphorePermits>;
    type IntoFuture = Boxed<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            // Without a wait limit it never returns `None`; the loop proves that to the compiler.
            loop {
                let (permits, limit) = (self.permits, self.outage_limit);
                let grant = obtain(&self.semaphore, permits, WaitLimit::Endless, limit);
                if let Some(permits) = grant.await? {
                    return Ok(permits);
                }
            }
        })
    }
}

impl IntoFuture for TryAcquirePermits {
    type Output = Result<Option<SemaphorePermits>>;
    type IntoFuture = Boxed<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            let wait = WaitLimit::at_most(self.wait);
            obtain(&self.semaphore, self.permits, wait, self.outage_limit).await
        })
    }
}

async fn obtain(
    semaphore: &Semaphore,
    permits: u32,
    wait: WaitLimit,
    outage_limit: Option<Duration>,
) -> Result<Option<SemaphorePermits>> {
    let session = &semaphore.session;
    session.background.remember_runtime()?;
    let object = semaphore.object()?;
    super::checked_count(permits)?;
    if permits == 0 {
        // Zero permits are always available.
        let none = SemaphorePermits::new(session.clone(), object.clone(), 0, None);
        return Ok(Some(none));
    }
    let limits = Limits::new(wait, outage_limit.map(Expiry::In).or(session.outage_limit));
    let progress = Progress::default();
    let mut request = PermitsRequest {
        semaphore,
        permits,
        progress: &progress,
    };
    session
        .waiting
        .within(limits, &progress, &mut request)
        .await
}

/// One acquisition in progress, for the client's queue.
struct PermitsRequest<'a> {
    semaphore: &'a Semaphore,
    permits: u32,
    progress: &'a Progress,
}

impl Request for PermitsRequest<'_> {
    type Obtained = SemaphorePermits;

    async fn obtain(&mut self, waits: bool) -> Result<Option<SemaphorePermits>> {
        let session = &self.semaphore.session;
        session.waiting.obtain(self, waits).await
    }
}

impl Attempt for PermitsRequest<'_> {
    /// The guard, which releases the permits from the moment they are acquired.
    type Grant = SemaphorePermits;

    fn channel(&self) -> &str {
        self.semaphore.object.channel()
    }

    fn object(&self) -> &str {
        self.semaphore.object.key()
    }

    async fn ask(&mut self, subscribe: bool) -> Result<Outcome<SemaphorePermits>> {
        let session = &self.semaphore.session;
        let wait = Outcome::Wait(Expiry::In(session.watchdog.lease().duration()));
        if subscribe {
            // Reading may be repeated, acquiring must not. So the connection is made and the channel
            // subscribed before anything is acquired, at no extra cost to requests that must wait anyway.
            let read = Read {
                object: &self.semaphore.object,
            };
            let (channel, delivery) = (self.channel(), Delivery::QUEUED_INSPECTION);
            let store = &session.store;
            let answer = store.run(&read, Some(channel), delivery, self.progress);
            if answer.await?.reply < i64::from(self.permits) {
                return Ok(wait);
            }
        }
        Ok(match self.try_acquire().await? {
            Outcome::Wait(_) => wait,
            done => done,
        })
    }

    fn progress(&self) -> &Progress {
        self.progress
    }

    /// There may be permits left for the next waiter.
    fn excludes_waiters_for(&self) -> Option<Duration> {
        None
    }
}

impl PermitsRequest<'_> {
    /// Makes one attempt. If it is dropped after it was sent, or the answer takes too long, a
    /// background task awaits the answer and drops the permits that it grants, which releases them.
    async fn try_acquire(&self) -> Result<Outcome<SemaphorePermits>> {
        let session = self.semaphore.session.clone();
        let object = self.semaphore.object.clone();
        let (background, store) = (session.background.clone(), session.store.clone());
        let (permits, progress) = (self.permits, Arc::new(Progress::default()));
        let shared_progress = progress.clone();
        let _forward = ForwardState {
            from: shared_progress.clone(),
            to: self.progress,
        };
        let mut attempt = UnclaimedAttempt {
            object: object.clone(),
            permits,
            progress: progress.clone(),
            outcome: None,
        };
        let work = async move {
            let step = TakePermits {
                object: &object,
                permits,
            };
            let what = "acquiring permits";
            let store = &session.store;
            let answer = store.run_at_most_once(
                &step,
                what,
                Delivery::ACQUISITION,
                RELEASE_RETRY_LIMIT,
                &progress,
            );
            attempt.outcome = Some(match answer.await {
                Ok(answer) => match answer.reply {
                    Outcome::Done(ttl) => {
                        tracing::debug!(semaphore = object.name(), permits, "acquired");
                        let ends = ttl
                            .duration()
                            .and_then(|ttl| answer.sent_at.checked_add(ttl));
                        let acquired = SemaphorePermits::new(session, object, permits, ends);
                        match answer.confirmation.confirmed(&progress).await {
                            Ok(()) => Ok(Outcome::Done(acquired)),
                            Err(error) => {
                                // If this fails too, it continues in the background.
                                let _ = acquired.release_unconfirmed(answer.server).await;
                                Err(error)
                            }
                        }
                    }
                    Outcome::Wait(left) => Ok(Outcome::Wait(left)),
                },
                Err(error) => Err(error),
            });
            attempt
        };
        let in_flight = || shared_progress.was_sent();
        let mut work = pin!(background.detach_on_drop(work, in_flight));
        let (begun, after) = (
            Instant::now(),
            store.response_timeout().unwrap_or(MAX_LEASE),
        );
        match shared_progress
            .with_timeout(begun, after, work.as_mut())
            .await
        {
            Some(attempt) => attempt.into_outcome(after),
            None if in_flight() => {
                let error = Error::ResponseTimeout { after };
                shared_progress.record_failure(begun, error.clone());
                Err(error)
            }
            // An attempt that could not be sent by now gives up by itself and returns the reason.
            None => work.await.into_outcome(after),
        }
    }
}

/// Transfers the state of one attempt to the request, also when the attempt is dropped.
struct ForwardState<'a> {
    from: Arc<Progress>,
    to: &'a Progress,
}

impl Drop for ForwardState<'_> {
    fn drop(&mut self) {
        self.to.merge(&self.from);
    }
}

/// The result of one attempt. Logs a warning if permits may have been taken that no caller gets:
/// when it is dropped sent but unanswered, or with an unknown outcome.
struct UnclaimedAttempt {
    object: Arc<ObjectKeys>,
    permits: u32,
    progress: Arc<Progress>,
    outcome: Option<Result<Outcome<SemaphorePermits>>>,
}

impl UnclaimedAttempt {
    /// Returns the outcome to the caller; without one, a response timeout of `after`.
    fn into_outcome(mut self, after: Duration) -> Result<Outcome<SemaphorePermits>> {
        self.progress.mark_unsent();
        let outcome = self.outcome.take();
        outcome.unwrap_or(Err(Error::ResponseTimeout { after }))
    }
}

impl Drop for UnclaimedAttempt {
    fn drop(&mut self) {
        let lost = match &self.outcome {
            None => self.progress.was_sent(),
            Some(outcome) => matches!(outcome, Err(Error::OutcomeUnknown { .. })),
        };
        if lost {
            tracing::warn!(
                semaphore = self.object.name(),
                permits = self.permits,
                "an unanswered request may have acquired permits; if so, they stay acquired"
            );
        }
    }
}

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
    /// [`Error::InvalidLease`] when the request is awaited. The end of this time wakes no waiters:
    /// they wait until permits are set again.
    pub fn time_to_live(mut self, time_to_live: Duration) -> TrySetPermits {
        self.time_to_live = Some(time_to_live);
        self
    }

    async fn set(&self) -> Result<bool> {
        let object = self.semaphore.object()?.clone();
        super::checked_count(self.permits)?;
        let step = SetIfAbsent {
            object,
            number: self.permits,
            time_to_live: self.time_to_live.map(Lease::new).transpose()?,
            payload: self.permits,
            above_zero: false,
        };
        let session = &self.semaphore.session;
        session.run_at_most_once(step, "setting the permits").await
    }
}

impl IntoFuture for TrySetPermits {
    type Output = Result<bool>;
    type IntoFuture = Boxed<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move { self.set().await })
    }
}
