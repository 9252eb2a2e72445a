//! The semaphore (Redisson: `RSemaphore`, `RedissonSemaphore`): a number of permits, without owners
//! and without leases.

#[cfg(test)]
mod differential;
#[cfg(test)]
mod exploration;
mod guard;
mod request;
mod rules;

use std::sync::Arc;
use std::time::Duration;

pub use self::guard::SemaphorePermits;
pub use self::request::{AcquirePermits, TryAcquirePermits, TrySetPermits};
use self::rules::{Add, Drain};
use crate::error::{Error, Result};
use crate::name::{Family, Place};
use crate::primitives::number::{Delete, Read};
use crate::session::Session;

/// The most permits there can be, or be owed: what a Java `int` holds.
const MOST: i64 = i32::MAX as i64;

/// A number of permits that all processes share: at most so many do something at once (Redisson:
/// `RSemaphore`, `getSemaphore(name)`).
///
/// A handle is cheap, does nothing by itself, and can be cloned and shared. The permits are set once,
/// by whoever comes first ([`Semaphore::try_set_permits`]); until then there are none, and who asks
/// for one waits.
///
/// Who waits is woken by a message of the store as soon as there are enough permits, and looks by
/// itself once per watchdog lease. Waiters of one client are served first come, first served: who
/// asks for few does not overtake who waits for many. Between clients there is no order.
///
/// # Which semaphore to use
///
/// Permits of this one belong to nobody and have no lease. A process that dies (`kill -9`, a power
/// cut) keeps its permits for ever, and an answer that is lost with its connection can do the same
/// ([`Error::OutcomeUnknown`]). Then somebody has to look after it with
/// [`Semaphore::add_permits`]. A store that loses its data (`FLUSHALL`, eviction, a restart without
/// persistence) loses the permits: who waits goes on waiting until they are set anew. Where that must not happen, use the expirable semaphore, whose
/// permits have leases and come back by themselves. This one is for what is cheap to miscount, for
/// counts that are set anew now and then ([`TrySetPermits::time_to_live`]), and for permits that one
/// process takes and another gives back.
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
    pub(crate) place: Arc<Place>,
}

impl Semaphore {
    pub(crate) fn new(session: Arc<Session>, name: &str) -> Semaphore {
        let place = Place::new(Family::Semaphore, &session.prefix, name);
        Semaphore {
            session,
            place: Arc::new(place),
        }
    }

    /// The name, as it was given.
    pub fn name(&self) -> &str {
        self.place.name()
    }

    /// Sets the number of permits, if none is set: at most 2147483647. Whether it was set by this
    /// call. Await it, or set a time to live first: [`TrySetPermits`]. (Redisson: `trySetPermits`.)
    ///
    /// An exhausted semaphore is a semaphore: its permits are not set anew.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidName`], [`Error::InvalidCount`], [`Error::InvalidLease`],
    /// [`Error::WrongKind`], [`Error::Unavailable`], [`Error::ResponseTimeout`]: nothing was set.
    /// [`Error::OutcomeUnknown`]: the connection broke before the answer came. The request may have set the
    /// permits or not; it is not sent again, because the semaphore may have been deleted meanwhile.
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

    /// Waits for a permit as long as it takes.
    pub fn acquire(&self) -> AcquirePermits {
        self.acquire_many(1)
    }

    /// Waits for so many permits at once: it gets all or none. None are had at once, without asking.
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
    pub fn acquire_many(&self, permits: u32) -> AcquirePermits {
        AcquirePermits {
            semaphore: self.clone(),
            permits,
            outage_limit: None,
        }
    }

    /// Takes a permit if there is one: `None` if not. Await it, or set first how long to wait:
    /// [`TryAcquirePermits::wait`]. Without waiting it also overtakes who waits.
    pub fn try_acquire(&self) -> TryAcquirePermits {
        self.try_acquire_many(1)
    }

    /// Takes so many permits if there are so many, all or none.
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
    pub fn try_acquire_many(&self, permits: u32) -> TryAcquirePermits {
        TryAcquirePermits {
            semaphore: self.clone(),
            permits,
            wait: Duration::ZERO,
            outage_limit: None,
        }
    }

    /// Adds permits that somebody took, here or elsewhere, and wakes who waits for them. For those
    /// of a [`SemaphorePermits`] use that. A semaphore that is not there is made, as in Redisson,
    /// unless there is nothing to add.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidName`]; [`Error::InvalidCount`]: they would become more than 2147483647;
    /// [`Error::WrongKind`], [`Error::Unavailable`], [`Error::ResponseTimeout`]: nothing was
    /// changed. [`Error::OutcomeUnknown`]: there was no answer, and it is not sent again, because
    /// it could add them twice.
    ///
    /// # Cancel safety
    ///
    /// Once polled, it goes on in the background when dropped.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let semaphore = redlatch::Client::embedded().semaphore("handed-over");
    /// semaphore.release(2).await?;
    /// assert_eq!(semaphore.available().await?, 2);
    /// # Ok(()) }
    /// ```
    pub async fn release(&self, permits: u32) -> Result<()> {
        self.add(check(permits)?, false).await?;
        Ok(())
    }

    /// As [`Semaphore::release`], but only if the semaphore is there. Whether it is.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let semaphore = redlatch::Client::embedded().semaphore("not-set");
    /// assert!(!semaphore.release_if_exists(2).await?);
    /// assert_eq!(semaphore.available().await?, 0);
    /// # Ok(()) }
    /// ```
    pub async fn release_if_exists(&self, permits: u32) -> Result<bool> {
        let available = self.add(check(permits)?, true).await?;
        Ok(available.is_some())
    }

    /// Adds permits, or takes some away for good. With more taken away than there are, the number
    /// goes below zero: what is given back fills that up first. A semaphore that is not there is
    /// made. Errors and cancel safety as [`Semaphore::release`]. (Redisson: `addPermits`.)
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

    /// Takes all permits that are there, for good, and says how many that were. If permits were owed
    /// (a number below zero), they are owed no more. Errors and cancel safety as
    /// [`Semaphore::release`]. (Redisson: `drainPermits`.)
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
        let place = self.place()?.clone();
        self.session.change(Drain { place }, "draining").await
    }

    /// How many permits are there to be taken; 0 also if none were ever set, less when more were
    /// taken away than there were. It may be otherwise by the time that this returns.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidName`], [`Error::WrongKind`], [`Error::Unavailable`],
    /// [`Error::ResponseTimeout`].
    pub async fn available(&self) -> Result<i64> {
        let place = self.place()?;
        self.session.store.look(&Read { place }).await
    }

    /// Deletes the semaphore. Returns whether there was one. Waiters continue to wait, until permits are set again.
    ///
    /// # Errors
    ///
    /// As [`Semaphore::available`]. [`Error::OutcomeUnknown`]: the connection broke before the answer came. The
    /// request may have deleted the semaphore or not; it is not sent again, because it could delete one that was
    /// set meanwhile.
    ///
    /// # Cancel safety
    ///
    /// If dropped after it was polled, it continues in the background.
    pub async fn delete(&self) -> Result<bool> {
        let place = self.place()?.clone();
        let step = Delete {
            place,
            payload: None,
        };
        self.session.change(step, "deleting a semaphore").await
    }

    async fn add(&self, permits: i32, if_exists: bool) -> Result<Option<i64>> {
        let place = self.place()?.clone();
        if permits == 0 && !if_exists {
            // It would make an exhausted semaphore, whose permits nobody could set.
            return Ok(None);
        }
        let step = Add {
            place,
            permits,
            if_exists,
        };
        self.session.change(step, "adding permits").await
    }

    /// The place, if its name can be used.
    fn place(&self) -> Result<&Arc<Place>> {
        self.place.check()?;
        Ok(&self.place)
    }
}

impl std::fmt::Debug for Semaphore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Semaphore")
            .field("name", &self.name())
            .finish_non_exhaustive()
    }
}

/// A number of permits, as one that can be added.
fn check(permits: u32) -> Result<i32> {
    i32::try_from(permits).map_err(|_| Error::InvalidCount {
        count: permits.into(),
        reason: "there can be at most 2147483647 permits",
    })
}
