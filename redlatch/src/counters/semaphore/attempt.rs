//! One acquisition of permits. Its step is sent once, and its answer is awaited in any case.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::Semaphore;
use super::held::{HeldPermits, OfferedPermits, RELEASE_RETRY_LIMIT};
use super::rules::take_permits;
use crate::counters;
use crate::error::{Error, Result};
use crate::hold::Share;
use crate::lease::{Expiry, MAX_LEASE};
use crate::locks::{AcquireOnce, Busy, Held as _, Options};
use crate::metrics::{Kind, KindMetrics};
use crate::name::ObjectKeys;
use crate::step::Outcome;
use crate::store::{Delivery, Progress};
use crate::wait::{Offer, Place, Request};

impl AcquireOnce for Semaphore {
    type Held = HeldPermits;

    fn metrics(&self) -> KindMetrics {
        self.session
            .metrics()
            .of(Kind::Semaphore, Some(self.name()))
    }

    /// The store does not know who has permits, and until when.
    async fn busy(&self) -> Busy {
        Busy::default()
    }

    async fn acquire_once(&self, options: &Options) -> Result<Option<HeldPermits>> {
        let session = &self.session;
        session.background.remember_runtime()?;
        let object = self.object()?;
        super::checked_count(self.permits)?;
        if self.permits == 0 {
            // Zero permits are always available.
            let none = HeldPermits::new(session.clone(), object.clone(), 0, None);
            return Ok(Some(none));
        }
        let limits = options.request_limits(session.outage_limit);
        let progress = Progress::default();
        let mut request = PermitsRequest {
            semaphore: self,
            progress: &progress,
        };
        let waiting = &session.waiting;
        let mut acquired = waiting.within(&limits, &progress, &mut request).await;
        if let Ok(Some(held)) = &mut acquired {
            held.measure();
        }
        acquired
    }
}

/// One acquisition in progress, for the client's queue.
struct PermitsRequest<'a> {
    semaphore: &'a Semaphore,
    progress: &'a Progress,
}

impl Request for PermitsRequest<'_> {
    /// Releases the permits from the moment they are acquired.
    type Acquired = HeldPermits;

    fn place(&self) -> Place<'_> {
        let object = &self.semaphore.object;
        Place {
            share: self.share(),
            takes_offers: self.semaphore.session.hands_off,
            ..Place::new(object.channel(), object.key())
        }
    }

    async fn send(&mut self, subscribe: bool) -> Result<Outcome<HeldPermits>> {
        let session = &self.semaphore.session;
        let wait = Outcome::Wait(Expiry::In(session.watchdog.lease().duration()));
        if subscribe {
            // Reading may be repeated, acquiring must not. So the connection is made and the channel
            // subscribed before anything is acquired, at no extra cost to requests that must wait anyway.
            let read = counters::read(&self.semaphore.object);
            let (channel, delivery) = (self.place().channel, Delivery::QUEUED_INSPECTION);
            let store = &session.store;
            let answer = store.run(&read, Some(channel), delivery, self.progress);
            if answer.await?.reply < i64::from(self.semaphore.permits) {
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

    fn take(&mut self, offer: Offer, _: Instant) -> Option<(HeldPermits, Option<Instant>)> {
        let offered = offer.downcast::<OfferedPermits>().ok()?;
        Some((offered.take(self.share())?, None))
    }
}

impl PermitsRequest<'_> {
    fn share(&self) -> Share {
        Share::Permits(self.semaphore.permits)
    }

    /// Makes one attempt. If it is dropped after it was sent, or the answer takes too long, a
    /// background task awaits the answer and drops the permits that it grants, which releases them.
    async fn try_acquire(&self) -> Result<Outcome<HeldPermits>> {
        let session = self.semaphore.session.clone();
        let object = self.semaphore.object.clone();
        let warning = self.semaphore.warning.clone();
        let (background, store) = (session.background.clone(), session.store.clone());
        let (permits, progress) = (self.semaphore.permits, Arc::new(Progress::default()));
        let shared_progress = progress.clone();
        let _forward = ForwardState {
            from: shared_progress.clone(),
            to: self.progress,
        };
        let mut attempt = UnclaimedAttempt {
            object: object.clone(),
            permits,
            progress: progress.clone(),
            is_granted: false,
            outcome: None,
        };
        let work = async move {
            let step = take_permits(&object, permits);
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
                    Some(Outcome::Done(ttl)) => {
                        tracing::debug!(semaphore = object.full_name(), permits, "acquired");
                        warning.record(object.full_name(), true);
                        let ends = ttl
                            .duration()
                            .and_then(|ttl| answer.sent_at.checked_add(ttl));
                        let mut acquired = HeldPermits::new(session, object.clone(), permits, ends);
                        attempt.is_granted = true;
                        let confirmed = match answer.confirmation {
                            Some(confirmation) => {
                                acquired.bind_to(answer.server, &confirmation);
                                confirmation.confirmed(&progress).await
                            }
                            None => Ok(()),
                        };
                        match confirmed {
                            Ok(()) => {
                                acquired.confirmed();
                                Ok(Outcome::Done(acquired))
                            }
                            Err(error) => Err(match acquired.release().await {
                                // Nothing else releases them: the caller has to know.
                                Err(unknown @ Error::OutcomeUnknown { .. }) => unknown,
                                // If this failed, too, it continues in the background.
                                _ => error,
                            }),
                        }
                    }
                    Some(Outcome::Wait(left)) => Ok(Outcome::Wait(left)),
                    None => {
                        warning.record(object.full_name(), false);
                        Ok(Outcome::Wait(Expiry::Never))
                    }
                },
                Err(error) => Err(error),
            });
            attempt
        };
        let in_flight = || shared_progress.was_sent();
        let mut work = pin!(background.detach_on_drop(&self.semaphore.object, work, in_flight));
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
    /// Whether the store has answered that it took the permits. Then they have an owner that releases them.
    is_granted: bool,
    outcome: Option<Result<Outcome<HeldPermits>>>,
}

impl UnclaimedAttempt {
    /// Returns the outcome to the caller; without one, a response timeout of `after`.
    fn into_outcome(mut self, after: Duration) -> Result<Outcome<HeldPermits>> {
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
        if lost && !self.is_granted {
            tracing::warn!(
                semaphore = self.object.full_name(),
                permits = self.permits,
                "an unanswered request may have acquired permits; if so, they stay acquired"
            );
        }
    }
}
