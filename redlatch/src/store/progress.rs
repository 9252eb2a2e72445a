//! How far a request has come: whether its step was sent, and the outcome of its last contact with the store.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use super::attempt_limiter::{AttemptLimiter, AttemptPermit};
use crate::error::Error;
use crate::sync::Mutex;

/// Records whether a step was sent, and its outcome. It lives outside of the future that sends the step, so
/// it can still be read after that future was dropped.
///
/// Used by one call at a time. The flags save most steps from locking the details.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// Whether the step may have been sent.
    sent: AtomicBool,
    /// Whether the step was sent again after it had not been answered, so that its answer may be the one to a repetition.
    repeated: AtomicBool,
    /// Whether the last contact with the store was an answer.
    answered: AtomicBool,
    /// Whether `details` contains a wait queue.
    in_queue: AtomicBool,
    /// Whether there is a permit.
    in_flight: AtomicBool,
    /// The permit of an attempt that is in flight, or was when its caller dropped it.
    permit: Mutex<Option<AttemptPermit>>,
    /// Boxed and created on demand: most requests fail at nothing and wait for nothing.
    details: Mutex<Option<Box<ProgressDetails>>>,
}

#[derive(Debug, Default)]
struct ProgressDetails {
    /// Start and error of an outage. Out of date if the store has answered since.
    failed: Option<(Instant, Error)>,
    /// The latest error of an earlier step that too few replicas have acknowledged.
    not_replicated: Option<Error>,
    /// The limiter at which the attempt waits for its permit.
    limiter: Option<Arc<AttemptLimiter>>,
    /// Start of the response timeout, if the attempt had to wait for its permit.
    timeout_start: Option<Instant>,
    /// The wait queue that the request has joined, and when. Its contacts with the store count for all its
    /// requests.
    wait_queue: Option<(Arc<dyn ContactSource>, Instant)>,
}

/// Contacts with the store, for requests that wait in a wait queue and send nothing themselves.
pub(crate) trait ContactSource: std::fmt::Debug + Send + Sync {
    /// Returns the last contact, or `None` if there has been none since then.
    fn contact_since(&self, since: Instant) -> Option<LastContact>;
}

/// The outcome of a request's last contact with the store.
#[derive(Debug, Clone)]
pub(crate) enum LastContact {
    /// The store has answered.
    Answered,
    /// The store could not be reached or did not answer; `error` is the latest error.
    Failed { since: Instant, error: Error },
}

impl Progress {
    /// Records that the step is about to be passed to the connection or to the embedded store.
    pub(crate) fn mark_sent(&self) {
        self.sent.store(true, Ordering::Relaxed);
    }

    /// Records that the step had no effect and may be sent again.
    pub(crate) fn mark_unsent(&self) {
        self.sent.store(false, Ordering::Relaxed);
        self.repeated.store(false, Ordering::Relaxed);
    }

    /// Records that the step is about to be sent again: an earlier try was not answered, and may have taken effect.
    pub(crate) fn mark_repeated(&self) {
        self.repeated.store(true, Ordering::Relaxed);
    }

    /// Returns whether an earlier try of the step may have taken effect without an answer.
    pub(crate) fn was_repeated(&self) -> bool {
        self.repeated.load(Ordering::Relaxed)
    }

    /// Returns whether the step may have been sent.
    pub(crate) fn was_sent(&self) -> bool {
        self.sent.load(Ordering::Relaxed)
    }

    /// Returns the last contact with the store, if there was any.
    pub(crate) fn last_contact(&self) -> Option<LastContact> {
        let details = self.details.lock();
        let of_queue = details.as_ref().and_then(|details| {
            let (wait_queue, since) = details.wait_queue.as_ref()?;
            wait_queue.contact_since(*since)
        });
        of_queue.or_else(|| match self.answered.load(Ordering::Relaxed) {
            true => Some(LastContact::Answered),
            false => {
                let (since, error) = details.as_ref()?.failed.clone()?;
                Some(LastContact::Failed { since, error })
            }
        })
    }

    /// Accesses the details, which are created if there are none.
    fn details<T>(&self, access: impl FnOnce(&mut ProgressDetails) -> T) -> T {
        access(self.details.lock().get_or_insert_default())
    }

    /// Records that the request has joined a wait queue.
    pub(crate) fn join_queue(&self, wait_queue: Arc<dyn ContactSource>, joined: Instant) {
        let joined = Some((wait_queue, joined));
        self.details(|details| details.wait_queue = joined);
        self.in_queue.store(true, Ordering::Relaxed);
    }

    /// Records that the request is the first in its wait queue or has left it: from now on it sends steps
    /// itself.
    pub(crate) fn leave_queue(&self) {
        if !self.in_queue.load(Ordering::Relaxed) {
            return;
        }
        self.in_queue.store(false, Ordering::Relaxed);
        let mut details = self.details.lock();
        let left = details
            .as_mut()
            .and_then(|details| details.wait_queue.take());
        drop(details);
        match left.and_then(|(wait_queue, since)| wait_queue.contact_since(since)) {
            Some(LastContact::Answered) => self.record_answer(),
            Some(LastContact::Failed { since, error }) => self.set_failure(since, error),
            None => {}
        }
    }

    /// Takes over the last contact of another step of the same request.
    pub(crate) fn merge(&self, other: &Progress) {
        match other.last_contact() {
            Some(LastContact::Answered) => self.record_answer(),
            Some(LastContact::Failed { since, error }) => self.record_failure(since, error),
            None => {}
        }
    }

    /// Records that the store has answered: an outage, if there was one, is over.
    pub(crate) fn record_answer(&self) {
        self.answered.store(true, Ordering::Relaxed);
    }

    /// Records that the store has answered an earlier step, but not yet the current one.
    pub(crate) fn expect_answer(&self) {
        if let Some(details) = &mut *self.details.lock()
            && let Some((_, error @ Error::NotReplicated { .. })) = details.failed.take()
        {
            details.not_replicated = Some(error);
        }
        self.answered.store(false, Ordering::Relaxed);
    }

    /// Returns the error of the latest earlier step that too few replicas have acknowledged. While those of the current step are
    /// awaited, this is the likely cause.
    pub(crate) fn not_replicated(&self) -> Option<Error> {
        self.details.lock().as_ref()?.not_replicated.clone()
    }

    /// Records a failure to reach the store. The outage started at `since`, or at the first failure since the
    /// last answer, if that is earlier.
    pub(crate) fn record_failure(&self, since: Instant, error: Error) {
        let since = self.details(|details| match &details.failed {
            Some((earlier, _)) if !self.answered.load(Ordering::Relaxed) => since.min(*earlier),
            _ => since,
        });
        self.set_failure(since, error);
    }

    fn set_failure(&self, since: Instant, error: Error) {
        self.details(|details| details.failed = Some((since, error)));
        self.answered.store(false, Ordering::Relaxed);
    }

    /// Keeps the permit of the attempt.
    pub(crate) fn keep_permit(&self, permit: AttemptPermit) {
        *self.permit.lock() = Some(permit);
        self.in_flight.store(true, Ordering::Relaxed);
    }

    /// Takes the permit of the attempt, for the step that settles it.
    pub(crate) fn take_permit(&self) -> Option<AttemptPermit> {
        if !self.in_flight.load(Ordering::Relaxed) {
            return None;
        }
        self.in_flight.store(false, Ordering::Relaxed);
        self.permit.lock().take()
    }

    /// Records that the attempt waits for a permit, until the result is dropped. Meanwhile the response
    /// timeout restarts with each answer to another attempt at this limiter.
    pub(crate) fn wait_for_permit(&self, limiter: Arc<AttemptLimiter>) -> impl Drop + '_ {
        self.details(|details| details.limiter = Some(limiter));
        WaitingForPermit(self)
    }

    /// Returns the start of the response timeout, if the attempt had to wait for its permit.
    pub(crate) fn timeout_start(&self) -> Option<Instant> {
        self.details.lock().as_ref()?.timeout_start()
    }

    /// Runs `work` until it is done. Returns `None` if it takes longer than `timeout`, which starts at `begun`
    /// and restarts while the attempt waits for its permit.
    pub(crate) async fn with_timeout<T>(
        &self,
        begun: Instant,
        timeout: Duration,
        mut work: Pin<&mut impl Future<Output = T>>,
    ) -> Option<T> {
        let Some(mut deadline) = begun.checked_add(timeout) else {
            return Some(work.await);
        };
        loop {
            if let Ok(done) = timeout_at(deadline, work.as_mut()).await {
                return Some(done);
            }
            let later = self.timeout_start().map(|from| from + timeout);
            deadline = later.filter(|later| *later > deadline)?;
        }
    }
}

impl ProgressDetails {
    fn timeout_start(&self) -> Option<Instant> {
        let limiter = self.limiter.as_ref();
        let latest = limiter.and_then(|limiter| limiter.latest_answer());
        self.timeout_start.max(latest)
    }
}

/// An attempt that waits for its permit.
struct WaitingForPermit<'a>(&'a Progress);

impl Drop for WaitingForPermit<'_> {
    fn drop(&mut self) {
        self.0.details(|details| {
            details.timeout_start = details.timeout_start();
            details.limiter = None;
        });
    }
}
