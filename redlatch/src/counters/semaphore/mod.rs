//! The semaphore (Redisson: `RSemaphore`, `RedissonSemaphore`): a number of permits without owners
//! and without leases.

mod attempt;
#[cfg(test)]
mod differential;
#[cfg(test)]
mod exploration;
mod held;
mod rules;
mod try_set_permits;

use std::sync::Arc;

pub use self::try_set_permits::TrySetPermits;
use crate::counters::{self, UnsetWarning};
use crate::error::{Error, Result};
use crate::locks::{Acquire, Guard, TryAcquire};
use crate::name::{KeyLayout, ObjectKeys};
use crate::session::Session;

/// A number of permits that all processes share, which limits concurrent work (Redisson:
/// `RSemaphore`, `getSemaphore(name)`).
///
/// A handle is cheap, does nothing by itself, and can be cloned and shared. The first caller of
/// [`Semaphore::try_set_permits`] sets the permits; until then there are none and requests wait.
///
/// A message from the store wakes a waiter as soon as there are enough permits; it also checks once
/// per watchdog lease. Waiters of one client are served in order of arrival: a request for few
/// permits does not overtake one for many. There is no order between clients.
///
/// # Which semaphore to use
///
/// The permits of this semaphore have no owner and no lease. A process that dies (`kill -9`, a
/// power cut) keeps its permits forever. An answer that is lost with its connection can have the
/// same effect ([`Error::OutcomeUnknown`]), and so can a failover before the replicas have confirmed
/// an acquisition. An operator must then correct the number with [`Semaphore::add_permits`]. A store
/// that loses its data (`FLUSHALL`, eviction, a restart without persistence) loses the permits:
/// waiters wait until they are set again. Where that must not happen, use the expirable semaphore,
/// whose permits have leases and return by themselves. Use this one for limits where a miscount is
/// harmless, for counts that are regularly set anew
/// ([`TrySetPermits::time_to_live`]), and for permits that one process acquires and another releases.
///
/// Inside one process a [`tokio::sync::Semaphore`] does the same at a thousandth of the cost.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
/// let client = redlatch::Client::embedded(); // or Client::connect("redis://127.0.0.1").await?
/// let downloads = client.semaphore("downloads");
/// downloads.try_set_permits(2).await?;
///
/// let one = downloads.acquire().await?;
/// let two = downloads.acquire().await?;
/// assert!(downloads.try_acquire().await?.is_none());
/// one.release().await?;
/// assert!(downloads.try_acquire().await?.is_some());
/// # two.release().await }
/// ```
#[derive(Clone)]
pub struct Semaphore {
    pub(crate) session: Arc<Session>,
    pub(crate) object: Arc<ObjectKeys>,
    /// How many permits a request of this handle acquires.
    permits: u32,
    warning: UnsetWarning,
}

/// Acquired permits of a [`Semaphore`] (Redisson has no such type: there, callers
/// count permits themselves). [`SemaphorePermits::release`] releases them; dropping releases them
/// in the background. Both may pass them to another task of the client that waits for as many.
///
/// Dropping never blocks and never panics. While the store cannot be reached, the release is
/// retried for ten minutes; if it fails, the log reports it (`tracing`, level WARN). A process that
/// ends without releasing its permits keeps them forever.
///
/// Permits are released only to a semaphore that still exists. A semaphore that was deleted, or
/// whose time to live has ended, is not created again with a wrong number of permits. One that was
/// set again after its time to live had ended does not get permits of the previous one either. But
/// a semaphore that was deleted and set again, or set again after the store lost its data, does get
/// them, because the store cannot tell it from the previous one. It then has more permits than were set.
pub type SemaphorePermits = Guard<Semaphore>;

impl Semaphore {
    pub(crate) fn new(session: Arc<Session>, name: &str) -> Semaphore {
        let object = ObjectKeys::new(KeyLayout::Semaphore, &session.prefix, name);
        Semaphore {
            session,
            object: Arc::new(object),
            permits: 1,
            warning: UnsetWarning::default(),
        }
    }

    /// Returns the name as it was passed in.
    pub fn name(&self) -> &str {
        self.object.name()
    }

    /// Sets the number of permits, at most 2147483647, if it is not set yet. Returns whether this
    /// call set it. Await the request, or set a time to live first: [`TrySetPermits`]. (Redisson:
    /// `trySetPermits`.)
    ///
    /// A semaphore without free permits counts as set: its permits are not set again.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidName`], [`Error::InvalidCount`], [`Error::InvalidLease`],
    /// [`Error::WrongKind`], [`Error::Unavailable`], [`Error::ResponseTimeout`]: nothing was set.
    /// [`Error::OutcomeUnknown`]: there was no answer, because the connection broke or the response
    /// timeout passed. The request may or may not have set the permits; it is not sent again, because
    /// the semaphore may have been deleted meanwhile.
    ///
    /// # Cancel safety
    ///
    /// If dropped after it was polled, it continues in the background.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// use std::time::Duration;
    ///
    /// let today = client.semaphore("mails:2026-11-21");
    /// let day = Duration::from_secs(24 * 60 * 60);
    /// assert!(today.try_set_permits(500).time_to_live(day).await?);
    /// assert!(!today.try_set_permits(900).await?);
    /// assert_eq!(today.available().await?, 500);
    /// # Ok(()) }
    /// ```
    pub fn try_set_permits(&self, permits: u32) -> TrySetPermits {
        TrySetPermits {
            semaphore: self.clone(),
            permits,
            time_to_live: None,
        }
    }

    /// Acquires one permit and waits for it without a limit.
    pub fn acquire(&self) -> Acquire<Semaphore> {
        self.acquire_many(1)
    }

    /// Acquires this many permits, all or none, and waits for them without a limit. Zero permits
    /// are granted immediately, without a round trip.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let semaphore = redlatch::Client::embedded().semaphore("cores");
    /// semaphore.try_set_permits(8).await?;
    /// let permits = semaphore.acquire_many(6).await?;
    /// assert_eq!(permits.permits(), 6);
    /// assert_eq!(semaphore.available().await?, 2);
    /// # permits.release().await }
    /// ```
    pub fn acquire_many(&self, permits: u32) -> Acquire<Semaphore> {
        Acquire::new(self.with_permits(permits))
    }

    /// Acquires one permit if it is available; `None` if not. Await the request, or set a wait
    /// limit first: [`TryAcquire::wait`]. Without a wait limit it also overtakes waiters.
    pub fn try_acquire(&self) -> TryAcquire<Semaphore> {
        self.try_acquire_many(1)
    }

    /// Acquires this many permits if they are available, all or none.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let semaphore = redlatch::Client::embedded().semaphore("cores");
    /// use std::time::Duration;
    ///
    /// semaphore.try_set_permits(8).await?;
    /// let brief = Duration::from_millis(10);
    /// assert!(semaphore.try_acquire_many(9).wait(brief).await?.is_none());
    /// assert!(semaphore.try_acquire_many(8).wait(brief).await?.is_some());
    /// # Ok(()) }
    /// ```
    pub fn try_acquire_many(&self, permits: u32) -> TryAcquire<Semaphore> {
        TryAcquire::new(self.with_permits(permits))
    }

    /// Adds permits that were acquired here or elsewhere, and wakes waiters. For the permits of a
    /// [`SemaphorePermits`], use [`SemaphorePermits::release`]. A semaphore that does not exist is
    /// created, as in Redisson, unless `permits` is zero.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidName`]; [`Error::InvalidCount`]: there would be more than 2147483647;
    /// [`Error::WrongKind`], [`Error::Unavailable`], [`Error::ResponseTimeout`]: nothing was
    /// changed. [`Error::OutcomeUnknown`]: there was no answer; the request is not sent again,
    /// because it could add the permits twice.
    ///
    /// # Cancel safety
    ///
    /// If dropped after it was polled, it continues in the background.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let semaphore = redlatch::Client::embedded().semaphore("handed-over");
    /// semaphore.release(2).await?;
    /// assert_eq!(semaphore.available().await?, 2);
    /// # Ok(()) }
    /// ```
    pub async fn release(&self, permits: u32) -> Result<()> {
        self.add(checked_count(permits)?, false).await?;
        Ok(())
    }

    /// Adds permits as [`Semaphore::release`] does, but only if the semaphore exists. Returns
    /// whether it exists.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let semaphore = redlatch::Client::embedded().semaphore("not-set");
    /// assert!(!semaphore.release_if_exists(2).await?);
    /// assert_eq!(semaphore.available().await?, 0);
    /// # Ok(()) }
    /// ```
    pub async fn release_if_exists(&self, permits: u32) -> Result<bool> {
        let available = self.add(checked_count(permits)?, true).await?;
        Ok(available.is_some())
    }

    /// Adds permits, or removes them permanently. If more are removed than are available, the
    /// number becomes negative, and releases first compensate for that. A semaphore that does not
    /// exist is created. Errors and cancel safety as [`Semaphore::release`]. (Redisson: `addPermits`.)
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let semaphore = redlatch::Client::embedded().semaphore("downloads");
    /// semaphore.try_set_permits(2).await?;
    /// let both = semaphore.acquire_many(2).await?;
    /// semaphore.add_permits(-1).await?; // one less from now on
    /// assert_eq!(semaphore.available().await?, -1);
    /// both.release().await?;
    /// assert_eq!(semaphore.available().await?, 1);
    /// # Ok(()) }
    /// ```
    pub async fn add_permits(&self, permits: i32) -> Result<()> {
        self.add(permits, false).await?;
        Ok(())
    }

    /// Removes all available permits permanently and returns their number. A negative number of
    /// permits is reset to zero. Errors and cancel safety as [`Semaphore::release`]. (Redisson:
    /// `drainPermits`.)
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let semaphore = redlatch::Client::embedded().semaphore("downloads");
    /// semaphore.try_set_permits(5).await?;
    /// assert_eq!(semaphore.drain().await?, 5);
    /// assert_eq!(semaphore.drain().await?, 0);
    /// # Ok(()) }
    /// ```
    pub async fn drain(&self) -> Result<i64> {
        let object = self.object()?;
        self.session
            .run_at_most_once(object, object, rules::drain, "draining")
            .await
    }

    /// Returns the number of available permits: 0 also if they were never set, negative if more
    /// were removed than were available. The number may have changed by the time this returns.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidName`], [`Error::WrongKind`], [`Error::Unavailable`],
    /// [`Error::ResponseTimeout`].
    pub async fn available(&self) -> Result<i64> {
        let step = counters::read(self.object()?);
        self.session.store.run_idempotent(&step).await
    }

    /// Deletes the semaphore. Returns whether it existed. Waiters continue to wait until permits are set again.
    ///
    /// # Errors
    ///
    /// As [`Semaphore::available`]; nothing was deleted. [`Error::OutcomeUnknown`]: there was no
    /// answer, because the connection broke or the response timeout passed. The request may or may not
    /// have deleted the semaphore; it is not sent again, because it could delete one that was set
    /// meanwhile.
    ///
    /// # Cancel safety
    ///
    /// If dropped after it was polled, it continues in the background.
    pub async fn delete(&self) -> Result<bool> {
        let object = self.object()?;
        self.session
            .run_at_most_once(
                object,
                object,
                |object| counters::delete(object, None),
                "deleting a semaphore",
            )
            .await
    }

    /// Returns a handle whose requests acquire this many permits.
    fn with_permits(&self, permits: u32) -> Semaphore {
        Semaphore {
            permits,
            ..self.clone()
        }
    }

    async fn add(&self, permits: i32, if_exists: bool) -> Result<Option<i64>> {
        let object = self.object()?;
        if permits == 0 && !if_exists {
            // Adding zero would create an exhausted semaphore, whose permits could not be set.
            return Ok(None);
        }
        let (waiting, channel) = (&self.session.waiting, self.object.channel());
        if permits > 0 {
            waiting.record_release(channel);
        }
        let added = self
            .session
            .run_at_most_once(
                object,
                object,
                move |object| rules::add(object, permits, if_exists),
                "adding permits",
            )
            .await;
        if let Ok(None) | Err(Error::InvalidCount { .. }) = added {
            // There is no message.
            waiting.wake(channel);
        }
        added
    }

    /// Returns the keys and channels, if the name is valid.
    fn object(&self) -> Result<&Arc<ObjectKeys>> {
        self.object.check()?;
        Ok(&self.object)
    }
}

impl std::fmt::Debug for Semaphore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Semaphore")
            .field("name", &self.name())
            .finish_non_exhaustive()
    }
}

/// Converts a number of permits to one that can be added.
fn checked_count(permits: u32) -> Result<i32> {
    i32::try_from(permits).map_err(|_| Error::InvalidCount {
        count: permits.into(),
        reason: "a semaphore has at most 2147483647 permits",
    })
}
