//! The count-down latch (Redisson: `RCountDownLatch`, `RedissonCountDownLatch`): closed while its
//! count is above zero, open at zero.

#[cfg(test)]
mod differential;
#[cfg(test)]
mod exploration;
mod rules;

use std::future::IntoFuture;
use std::sync::Arc;
use std::time::Duration;

use self::rules::{CHANGED, OPENED, count, count_down};
use crate::counters;
use crate::error::{Error, Result};
use crate::join::Boxed;
use crate::lease::Expiry;
use crate::locks::Options;
use crate::name::{KeyLayout, ObjectKeys};
use crate::session::Session;
use crate::step::Outcome;
use crate::store::{Delivery, Progress};

/// Blocks waiters until an event has happened a set number of times, in any process (Redisson:
/// `RCountDownLatch`, `getCountDownLatch(name)`).
///
/// A handle is cheap, does nothing by itself, and can be cloned and shared. One caller sets the
/// count, others count it down; at zero the latch is open and all waiters return. A latch that was
/// never set, or that was deleted, is open. An open latch can be set again.
///
/// A message from the store wakes waiters; they also check once per watchdog lease. All waiters of
/// one client share one subscription.
///
/// # When not to use it
///
/// A latch does not know its participants: if a process dies before it has counted down, the latch
/// stays closed. Wait with a limit ([`TryWait::wait`]) and decide then.
///
/// A latch that does not exist is open: after `FLUSHALL`, eviction or a restart without persistence
/// all waiters return, and so does a caller that waits before the count is set. Where returning too
/// early does harm, also check the condition itself.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
/// let client = redlatch::Client::embedded(); // or Client::connect("redis://127.0.0.1").await?
/// let ready = client.count_down_latch("workers-ready");
/// ready.try_set_count(2).await?;
///
/// let others = ready.clone();
/// let others = tokio::spawn(async move {
///     others.count_down().await?;
///     others.count_down().await
/// });
/// ready.wait().await?; // until both are ready
/// assert_eq!(ready.count().await?, 0);
/// # others.await.unwrap()?; Ok(()) }
/// ```
#[derive(Clone)]
pub struct CountDownLatch {
    pub(crate) session: Arc<Session>,
    pub(crate) object: Arc<ObjectKeys>,
}

impl CountDownLatch {
    pub(crate) fn new(session: Arc<Session>, name: &str) -> CountDownLatch {
        let mut object = ObjectKeys::new(KeyLayout::Latch, &session.prefix, name);
        let store = &session.store;
        if store.is_cluster() && store.slot(object.channel()) != store.slot(object.key()) {
            object.move_channel_to_slot();
        }
        CountDownLatch {
            session,
            object: Arc::new(object),
        }
    }

    /// Returns the name as it was passed in.
    pub fn name(&self) -> &str {
        self.object.name()
    }

    /// Sets the count of an open latch, at least 1, which closes it. Returns whether this call set
    /// it. (Redisson: `trySetCount`, which treats a count of 0 as set, even if it set that count itself.)
    ///
    /// # Errors
    ///
    /// [`Error::InvalidName`]; [`Error::InvalidCount`]: 0; [`Error::WrongKind`],
    /// [`Error::Unavailable`], [`Error::ResponseTimeout`]: nothing was set.
    /// [`Error::OutcomeUnknown`]: there was no answer, because the connection broke or the response
    /// timeout passed. The request may or may not have set the count; it is not sent again, because it
    /// could close a latch that was counted down meanwhile.
    ///
    /// # Cancel safety
    ///
    /// If dropped after it was polled, it continues in the background.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let latch = redlatch::Client::embedded().count_down_latch("a");
    /// assert!(latch.try_set_count(3).await?);
    /// assert!(!latch.try_set_count(5).await?);
    /// assert_eq!(latch.count().await?, 3);
    /// # Ok(()) }
    /// ```
    pub async fn try_set_count(&self, count: u32) -> Result<bool> {
        let object = self.object()?;
        if count == 0 {
            return Err(Error::InvalidCount {
                count: 0,
                reason: "a latch at zero is open, even if it was never set; use 1 or more",
            });
        }
        self.session
            .run_at_most_once(
                object,
                object,
                move |object| counters::set_if_absent(object, count, None, CHANGED, true),
                "setting the count",
            )
            .await
    }

    /// Decrements the count by one and returns the new count; at 0 the latch is open and all
    /// waiters return. An open latch stays open.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidName`], [`Error::WrongKind`], [`Error::Unavailable`],
    /// [`Error::ResponseTimeout`]: nothing was counted. [`Error::OutcomeUnknown`]: there was no
    /// answer, so the call may or may not have counted; it is not sent again, because it could
    /// count twice. [`CountDownLatch::count`] may show which.
    ///
    /// # Cancel safety
    ///
    /// If dropped after it was polled, it continues in the background.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let latch = redlatch::Client::embedded().count_down_latch("a");
    /// latch.try_set_count(2).await?;
    /// assert_eq!(latch.count_down().await?, 1);
    /// assert_eq!(latch.count_down().await?, 0);
    /// assert_eq!(latch.count_down().await?, 0);
    /// # Ok(()) }
    /// ```
    pub async fn count_down(&self) -> Result<u64> {
        self.count_down_by(1).await
    }

    /// Decrements the count by `by` in one step, but not below zero. Otherwise as
    /// [`CountDownLatch::count_down`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let latch = redlatch::Client::embedded().count_down_latch("a");
    /// latch.try_set_count(100).await?;
    /// assert_eq!(latch.count_down_by(40).await?, 60); // a batch of forty is done
    /// # Ok(()) }
    /// ```
    pub async fn count_down_by(&self, by: u32) -> Result<u64> {
        let object = self.object()?;
        if by == 0 {
            return self.count().await;
        }
        let counted = self
            .session
            .run_at_most_once(
                object,
                object,
                move |object| count_down(object, by),
                "counting down",
            )
            .await;
        if !matches!(counted, Ok(1..)) {
            self.wake_waiters();
        }
        counted
    }

    /// Returns the count; 0 if the latch is open.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidName`], [`Error::WrongKind`], [`Error::Unavailable`],
    /// [`Error::ResponseTimeout`].
    pub async fn count(&self) -> Result<u64> {
        let object = self.object()?;
        let step = counters::read(object);
        let number = self.session.store.run_idempotent(&step).await?;
        Ok(count(number))
    }

    /// Waits until the latch is open, without a limit; returns immediately if it already is. Await the
    /// request, or configure it first: [`Wait`]. (Redisson: `await`.)
    ///
    /// If a latch is opened and set again before a waiter has checked it, the waiter keeps waiting,
    /// as in Redisson.
    pub fn wait(&self) -> Wait {
        Wait {
            latch: self.clone(),
            options: Options::default(),
        }
    }

    /// Returns whether the latch is open. Await the request, or set a wait limit first:
    /// [`TryWait::wait`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let latch = redlatch::Client::embedded().count_down_latch("a");
    /// use std::time::Duration;
    ///
    /// latch.try_set_count(1).await?;
    /// assert!(!latch.try_wait().wait(Duration::from_millis(10)).await?);
    /// latch.count_down().await?;
    /// assert!(latch.try_wait().await?);
    /// # Ok(()) }
    /// ```
    pub fn try_wait(&self) -> TryWait {
        TryWait {
            latch: self.clone(),
            options: Options::waiting_at_most(Duration::ZERO),
        }
    }

    /// Deletes the latch, which opens it for all waiters. Returns whether there was a count.
    ///
    /// # Errors
    ///
    /// As [`CountDownLatch::count`]; nothing was deleted. [`Error::OutcomeUnknown`]: there was no
    /// answer, because the connection broke or the response timeout passed. The request may or may not
    /// have deleted the latch; it is not sent again, because it could open a latch that was set
    /// meanwhile.
    ///
    /// # Cancel safety
    ///
    /// If dropped after it was polled, it continues in the background.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let latch = redlatch::Client::embedded().count_down_latch("a");
    /// latch.try_set_count(1).await?;
    /// assert!(latch.delete().await?);
    /// latch.wait().await?;
    /// # Ok(()) }
    /// ```
    pub async fn delete(&self) -> Result<bool> {
        let object = self.object()?;
        // Redisson publishes that the count has changed, which makes its own waiters keep waiting;
        // all waiters understand the message that the latch is open.
        let deleted = self
            .session
            .run_at_most_once(
                object,
                object,
                |object| counters::delete(object, Some(OPENED)),
                "deleting a latch",
            )
            .await;
        self.wake_waiters();
        deleted
    }

    /// Wakes the waiters of this client because the latch is open, or may be. The message may arrive
    /// later, or not at all: for a request that begins now, an earlier answer does not count.
    fn wake_waiters(&self) {
        self.session.waiting.wake(self.object.channel());
    }

    async fn acquire(&self, options: &Options) -> Result<Option<()>> {
        self.session.background.remember_runtime()?;
        self.object()?;
        let limits = options.request_limits(self.session.outage_limit);
        let progress = Progress::default();
        let (session, object) = (&self.session, &*self.object);
        let look = |channel| -> Boxed<'_, _> {
            let progress = &progress;
            Box::pin(async move {
                let (step, delivery) = (counters::read(object), Delivery::QUEUED_INSPECTION);
                let answer = session.store.run(&step, channel, delivery, progress);
                Ok(match count(answer.await?.reply) {
                    0 => Outcome::Done(()),
                    // A key that was removed by other means is found gone by reading, not by a message.
                    _ => Outcome::Wait(Expiry::In(session.watchdog.lease().duration())),
                })
            })
        };
        let (waiting, channel, key) = (&session.waiting, object.channel(), object.key());
        let observed = waiting.observe(channel, key, &limits, &progress, &look);
        observed.await
    }

    /// Returns the keys and channels, if the name is valid.
    fn object(&self) -> Result<&Arc<ObjectKeys>> {
        self.object.check()?;
        Ok(&self.object)
    }
}

impl std::fmt::Debug for CountDownLatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CountDownLatch")
            .field("name", &self.name())
            .finish_non_exhaustive()
    }
}

/// Waits until a latch is open when awaited: [`CountDownLatch::wait`].
///
/// # Errors
///
/// [`Error::InvalidName`], [`Error::WrongKind`], [`Error::Unavailable`],
/// [`Error::ResponseTimeout`], [`Error::NoRuntime`].
///
/// # Cancel safety
///
/// It only waits; it can be dropped.
#[must_use = "nothing is waited for until this is awaited"]
#[derive(Debug)]
pub struct Wait {
    latch: CountDownLatch,
    options: Options,
}

/// Returns whether a latch is open, or opens within a limit, when awaited: [`CountDownLatch::try_wait`].
///
/// Errors and cancel safety are those of [`Wait`].
#[must_use = "nothing is waited for until this is awaited"]
#[derive(Debug)]
pub struct TryWait {
    latch: CountDownLatch,
    options: Options,
}

impl Wait {
    /// Waits through an outage of the store that lasts at most this long:
    /// [`ClientBuilder::outage_limit`](crate::ClientBuilder::outage_limit), for this request. `None`: waits
    /// through any outage.
    pub fn outage_limit(mut self, limit: impl Into<Option<Duration>>) -> Wait {
        self.options.outage_limit = Some(Expiry::from_limit(limit));
        self
    }
}

impl TryWait {
    /// Waits at most this long, counted from the first poll. At the limit it returns `false` if the
    /// store reported a closed latch, or the error if the store could not be reached. A time that the
    /// clock cannot represent means no limit; with zero the store is queried once.
    pub fn wait(mut self, wait: Duration) -> TryWait {
        self.options.wait = Some(wait);
        self
    }

    /// As [`Wait::outage_limit`]. The wait limit wins if it is shorter.
    pub fn outage_limit(mut self, limit: impl Into<Option<Duration>>) -> TryWait {
        self.options.outage_limit = Some(Expiry::from_limit(limit));
        self
    }
}

impl IntoFuture for Wait {
    type Output = Result<()>;
    type IntoFuture = Boxed<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move { self.latch.acquire(&self.options).await.map(drop) })
    }
}

impl IntoFuture for TryWait {
    type Output = Result<bool>;
    type IntoFuture = Boxed<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move { Ok(self.latch.acquire(&self.options).await?.is_some()) })
    }
}
