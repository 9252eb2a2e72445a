//! The requests for locks, several locks as one, and permits: builders that are awaited.
//!
//! 1. The target of a request implements [`AcquireOnce`](super::AcquireOnce), which makes one acquisition with given [`Options`].
//! 2. [`Acquire`] and [`TryAcquire`] collect the options, and run it when they are awaited.
//! 3. The result is a [`Guard`], which also runs work while it is held.

use std::future::{Future, IntoFuture};
use std::time::Duration;

use super::{Acquirable, Guard, HasLease, HasMinimum, HasOwner, Held as _, Lock, Options};
use crate::error::Result;
use crate::hold::Hold;
use crate::join::Boxed;
use crate::lease::Expiry;
use crate::owner::Owner;
use crate::session::HoldRef;

/// Acquires a lock, several locks as one, or permits when awaited, waiting without a limit:
/// [`Lock::lock`], [`MultiLock::lock`](crate::MultiLock::lock),
/// [`RedLock::lock`](crate::RedLock::lock), [`Semaphore::acquire`](crate::Semaphore::acquire),
/// [`ExpirableSemaphore::acquire`](crate::ExpirableSemaphore::acquire).
///
/// # Errors
///
/// [`InvalidName`], [`InvalidLease`], [`InvalidCount`], [`InvalidSetting`] and [`InvalidMembers`] for what they say;
/// [`WrongKind`], [`AlreadyHeld`], [`Unavailable`], [`ResponseTimeout`], [`NoRuntime`]; [`Lost`]:
/// the answer arrived after the granted lease had ended, or the hold to re-enter was lost.
///
/// A multi-lock fails with the error of a member. A RedLock treats errors of its members as
/// refusals, unless a majority of them fail in a way that waiting cannot fix (a key of another kind,
/// wrong credentials).
///
/// For permits of a [`Semaphore`](crate::Semaphore), [`OutcomeUnknown`]: the connection broke after
/// the step was sent, so permits may have been taken that no caller has. The step is not sent
/// again, because it could take them twice.
///
/// [`InvalidName`]: crate::Error::InvalidName
/// [`InvalidLease`]: crate::Error::InvalidLease
/// [`InvalidCount`]: crate::Error::InvalidCount
/// [`InvalidSetting`]: crate::Error::InvalidSetting
/// [`InvalidMembers`]: crate::Error::InvalidMembers
/// [`WrongKind`]: crate::Error::WrongKind
/// [`AlreadyHeld`]: crate::Error::AlreadyHeld
/// [`Unavailable`]: crate::Error::Unavailable
/// [`ResponseTimeout`]: crate::Error::ResponseTimeout
/// [`NoRuntime`]: crate::Error::NoRuntime
/// [`Lost`]: crate::Error::Lost
/// [`OutcomeUnknown`]: crate::Error::OutcomeUnknown
///
/// # Cancel safety
///
/// May be dropped at any point. It leaves the queue immediately, and what was acquired meanwhile is
/// released in the background. At worst (the store can no longer be reached) a lease remains that
/// is not renewed. Once polled, it must be polled further or dropped, as with any fair lock: a
/// request that is kept but not polled keeps its position in the queue.
///
/// Permits of a [`Semaphore`](crate::Semaphore) have no lease, and their release requires the
/// answer that confirms the acquisition. If there is never an answer, after [`ResponseTimeout`] or
/// a drop, because the connection breaks or the runtime ends, the permits may stay taken. The log
/// reports it (`tracing`, level WARN, with the semaphore's name).
#[must_use = "nothing is acquired until this is awaited"]
#[derive(Debug)]
pub struct Acquire<R: Acquirable = Lock> {
    target: R,
    options: Options,
}

/// Acquires or gives up when awaited; `None` if another owner holds it: [`Lock::try_lock`] and its
/// siblings.
///
/// Errors and cancel safety are those of [`Acquire`].
#[must_use = "nothing is acquired until this is awaited"]
#[derive(Debug)]
pub struct TryAcquire<R: Acquirable = Lock> {
    request: Acquire<R>,
}

impl<R: Acquirable> Acquire<R> {
    pub(crate) fn new(target: R) -> Acquire<R> {
        let options = Options::default();
        Acquire { target, options }
    }

    /// Waits through an outage of the store that lasts at most this long:
    /// [`ClientBuilder::outage_limit`](crate::ClientBuilder::outage_limit), for this request. `None`: waits
    /// through any outage.
    ///
    /// Several locks as one default to the shortest limit that is set for a member's client.
    /// Without any, a multi-lock fails as a single lock does, and a RedLock waits through any
    /// outage. For permits of a [`Semaphore`](crate::Semaphore), a step whose outcome is unknown
    /// ([`Error::OutcomeUnknown`](crate::Error::OutcomeUnknown)) is not repeated, regardless of the limit.
    pub fn outage_limit(mut self, limit: impl Into<Option<Duration>>) -> Acquire<R> {
        self.options.outage_limit = Some(Expiry::from_limit(limit));
        self
    }

    /// Acquires, runs `work` while it is held, and releases.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`](crate::Error::Lost) as soon as it is lost; `work` is then dropped at its
    /// current await point. It is never polled after the lease has ended, even if the process was
    /// stopped meanwhile. If the loss is found only at the release, `work` has completed, but
    /// possibly while another owner held the lock. Otherwise the errors of [`Acquire`]; `work` was
    /// then not started. A release that the store does not answer is not an error: it continues in
    /// the background.
    ///
    /// # Cancel safety
    ///
    /// When dropped, it drops `work` and releases in the background.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// use std::time::Duration;
    ///
    /// let request = client.lock("a").lock().lease(Duration::from_secs(10));
    /// assert_eq!(request.run(async { 6 * 7 }).await?, 42);
    /// # Ok(()) }
    /// ```
    pub async fn run<F: Future>(self, work: F) -> Result<F::Output> {
        self.await?.run_and_release(work).await
    }

    /// Acquires for this owner, unless the caller has named one.
    #[cfg(feature = "blocking")]
    pub(crate) fn owner_or(mut self, owner: Owner) -> Acquire<R> {
        self.options.owner.get_or_insert(owner);
        self
    }

    #[expect(
        clippy::manual_async_fn,
        reason = "an `async fn` stores its arguments twice"
    )]
    fn acquire_once(&self) -> impl Future<Output = Result<Option<Guard<R>>>> + Send {
        async move {
            self.options.at_least()?;
            let timer = self.target.metrics().request();
            let acquired = self.target.acquire_once(&self.options).await;
            timer.ended(&acquired);
            let acquired = acquired?;
            // No await before this: dropping this future releases `held`, and that release must know the time.
            // Asked for again, because a future that keeps it is larger.
            if let Some(held) = &acquired
                && let Some(at_least) = self.options.at_least()?
            {
                held.retain_for(at_least);
            }
            Ok(acquired.map(|held| Guard { held }))
        }
    }
}

impl<R: Acquirable> TryAcquire<R> {
    pub(super) fn target(&self) -> &R {
        &self.request.target
    }

    pub(super) fn acquire_once(&self) -> impl Future<Output = Result<Option<Guard<R>>>> + Send {
        self.request.acquire_once()
    }

    pub(crate) fn new(target: R) -> TryAcquire<R> {
        let options = Options::waiting_at_most(Duration::ZERO);
        TryAcquire {
            request: Acquire { target, options },
        }
    }

    /// Waits at most this long, counted from the first poll, not from the creation of the request.
    /// The request returns at this limit, whether it waits for another holder, a connection or an
    /// answer. It returns `None` if the store reported another holder (or too few permits), or the
    /// error if the store could not be reached. A step that is in flight at that time is settled in
    /// the background. A time that the clock cannot represent means no limit.
    ///
    /// Without a limit (or with zero) it makes one attempt, and the response timeout applies.
    pub fn wait(mut self, wait: Duration) -> TryAcquire<R> {
        self.request.options.wait = Some(wait);
        self.request.target = self.request.target.waiting_at_most(wait);
        self
    }

    /// As [`Acquire::outage_limit`]. The wait limit wins if it is shorter. Without a wait limit it
    /// makes one attempt, even with an outage limit.
    pub fn outage_limit(mut self, limit: impl Into<Option<Duration>>) -> TryAcquire<R> {
        self.request = self.request.outage_limit(limit);
        self
    }

    /// As [`Acquire::owner_or`].
    #[cfg(feature = "blocking")]
    pub(crate) fn owner_or(mut self, owner: Owner) -> TryAcquire<R> {
        self.request = self.request.owner_or(owner);
        self
    }

    /// Acquires within the wait limit, runs `work` while it is held, and releases. `None` if it was
    /// not acquired; `work` was then not started. Errors and cancel safety as for [`Acquire::run`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// use std::time::Duration;
    ///
    /// let lock = client.lock("a");
    /// let second = Duration::from_secs(1);
    /// assert_eq!(lock.try_lock().wait(second).run(async { 6 * 7 }).await?, Some(42));
    ///
    /// let _other = lock.lock().await?;
    /// assert_eq!(lock.try_lock().wait(second).run(async { 6 * 7 }).await?, None);
    /// # Ok(()) }
    /// ```
    pub async fn run<F: Future>(self, work: F) -> Result<Option<F::Output>> {
        match self.await? {
            Some(guard) => guard.run_and_release(work).await.map(Some),
            None => Ok(None),
        }
    }
}

impl<R: HasLease> Acquire<R> {
    /// Holds it for exactly this long unless it is released earlier. The watchdog does not renew
    /// it, and it is lost when the time has passed. 1 ms to [`MAX_LEASE`](crate::MAX_LEASE),
    /// truncated to whole milliseconds. Applies to every member of several locks.
    ///
    /// Re-entering never shortens the owner's current lease; if an owner has several leases, the
    /// longest applies to all of its holds.
    pub fn lease(mut self, lease: Duration) -> Acquire<R> {
        self.options.lease = Some(lease);
        self
    }
}

impl<R: HasLease> Acquire<R> {
    /// Holds it at most this long, counted from its acquisition, although the watchdog renews it. So a task that hangs does not
    /// keep it forever, and a process that dies still keeps it for one lease only.
    ///
    /// At the limit it is lost, for the reason [`Loss::HeldTooLong`](crate::Loss::HeldTooLong):
    /// [`Guard::lost`] completes, [`Guard::is_valid`] is false, and [`Acquire::run`] drops its work. Only then the client
    /// releases it in the background, so other owners acquire it at once, even while the guard still exists. If the store
    /// cannot be reached, its lease ends, because it is not renewed any more.
    ///
    /// The limit belongs to the hold of the owner: if an owner re-enters it, the earliest limit applies to all of its guards, until
    /// the last of them is released. The read side of a write lock ([`Guard::reenter_read`], [`Guard::downgrade`]) has
    /// the same limit, which starts anew. With a fixed [`lease`](Acquire::lease), the earlier end of both applies. Of several
    /// locks, it counts from when all of them, or the majority, are held. A time that the clock cannot represent means no limit; zero is an
    /// [`InvalidSetting`](crate::Error::InvalidSetting).
    ///
    /// Redisson has no such limit: its watchdog renews for as long as the process runs.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// use std::time::Duration;
    ///
    /// let lock = client.lock("a");
    /// let hanging = lock.lock().at_most(Duration::from_secs(7200)).await?;
    /// let next = lock.lock().await?; // after two hours
    /// assert!(!hanging.is_valid() && next.is_valid());
    /// # Ok(()) }
    /// ```
    pub fn at_most(mut self, limit: Duration) -> Acquire<R> {
        self.options.hold_limits_mut().at_most = Some(limit);
        self
    }

    /// Holds it only while the holder calls [`Guard::feed`] at least once in this time, counted from the acquisition. So a task that
    /// hangs does not keep it forever, however long the work takes.
    ///
    /// If the holder does not, it is lost for the reason [`Loss::NotFed`](crate::Loss::NotFed), and released as at the
    /// limit of [`at_most`](Acquire::at_most). The interval belongs to the hold of the owner: the shortest one applies to all of its
    /// guards, and any of them can feed it. Work that feeds it needs the guard: [`Guard::run`] instead of [`Acquire::run`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// use std::time::Duration;
    ///
    /// let guard = client.lock("a").lock().fed_every(Duration::from_secs(60)).await?;
    /// for _row in 0..1000 {
    ///     tokio::time::sleep(Duration::from_secs(50)).await;
    ///     guard.feed()?;
    /// }
    /// guard.unlock().await
    /// # }
    /// ```
    pub fn fed_every(mut self, interval: Duration) -> Acquire<R> {
        self.options.hold_limits_mut().fed_every = Some(interval);
        self
    }

    /// Sets the limits that another hold has now.
    pub(crate) fn limited_as(mut self, hold: &Hold) -> Acquire<R> {
        if let Some(limits) = hold.state().period.limits() {
            *self.options.hold_limits_mut() = limits;
        }
        self
    }

    /// Adds a text for people, such as `reindex 42`, up to 256 bytes. If the hold or the wait for it lasts longer than a
    /// second, the text is in the [registry](crate::ClientBuilder::registry), where
    /// [`Client::inspect`](crate::Client::inspect) and `redlatch show` find it. If an owner re-enters a lock, the latest note
    /// replaces the earlier one.
    pub fn note(mut self, note: impl Into<String>) -> Acquire<R> {
        self.options.rare_mut().note = Some(note.into().into());
        self
    }
}

impl<R: HasLease> TryAcquire<R> {
    /// As [`Acquire::at_most`].
    pub fn at_most(mut self, limit: Duration) -> TryAcquire<R> {
        self.request = self.request.at_most(limit);
        self
    }

    /// As [`Acquire::fed_every`].
    pub fn fed_every(mut self, interval: Duration) -> TryAcquire<R> {
        self.request = self.request.fed_every(interval);
        self
    }

    /// As [`Acquire::limited_as`].
    pub(crate) fn limited_as(mut self, hold: &Hold) -> TryAcquire<R> {
        self.request = self.request.limited_as(hold);
        self
    }

    /// As [`Acquire::note`].
    pub fn note(mut self, note: impl Into<String>) -> TryAcquire<R> {
        self.request = self.request.note(note);
        self
    }
}

impl<R: HasLease> TryAcquire<R> {
    /// As [`Acquire::lease`].
    pub fn lease(mut self, lease: Duration) -> TryAcquire<R> {
        self.request = self.request.lease(lease);
        self
    }
}

impl<R: HasOwner> Acquire<R> {
    /// Acquires for this owner. If it already holds the lock, or a member of several locks, it
    /// re-enters. Default: the owner of the scope ([`Owner::scope`]), or a new, anonymous one.
    ///
    /// An anonymous owner (the [`Guard::owner`] of such an acquisition) cannot be named: the
    /// request fails with [`InvalidSetting`](crate::Error::InvalidSetting), and sends nothing. To
    /// acquire again what such a guard holds, use [`Guard::reenter`]; of several locks, name an
    /// [`Owner::new`] in the first request.
    pub fn owner(mut self, owner: Owner) -> Acquire<R> {
        self.options.owner = Some(owner);
        if let Some(rare) = &mut self.options.rare {
            rare.continues = None;
        }
        self
    }

    /// Acquires for the owner of this hold: re-enters it, or acquires its
    /// [sibling](crate::hold::HoldKind::sibling). The hold does not pass on while the request
    /// exists, because the request has a reference to it.
    pub(crate) fn continuing(mut self, hold_ref: HoldRef) -> Acquire<R> {
        hold_ref.hold.state().acquires_again = true;
        self.options.rare_mut().continues = Some(hold_ref);
        self
    }
}

impl<R: HasOwner> TryAcquire<R> {
    /// As [`Acquire::owner`].
    pub fn owner(mut self, owner: Owner) -> TryAcquire<R> {
        self.request = self.request.owner(owner);
        self
    }

    /// As [`Acquire::continuing`].
    pub(crate) fn continuing(mut self, hold_ref: HoldRef) -> TryAcquire<R> {
        self.request = self.request.continuing(hold_ref);
        self
    }
}

impl<R: HasMinimum> Acquire<R> {
    /// Keeps the lock from all owners until this time has passed since the acquisition, even if it is released earlier
    /// (ShedLock: `lockAtLeastFor`). So a job that takes 10 ms runs once, although the clocks of the machines that start it
    /// differ by seconds. 1 ms to [`MAX_LEASE`](crate::MAX_LEASE), truncated to whole milliseconds; other values fail with
    /// [`Error::InvalidSetting`](crate::Error::InvalidSetting). Redisson has nothing like it; its clients see a held lock.
    ///
    /// A release (also by a drop, or at the end of [`run`](Acquire::run)) then ends the hold of its owner immediately: there is no
    /// guard, and the watchdog does not renew it. In the same step the store sets the end of the lease to the rest of this
    /// time. Until then an owner that no request has holds the lock, of the same client: no other owner can acquire
    /// it, nor can this one again. It does not pass on to waiters of the same client; waiters acquire it at the end of the
    /// time. The process may end meanwhile. [`Lock::force_unlock`] frees it earlier.
    ///
    /// A fixed [`lease`](Acquire::lease) that is shorter is an [`InvalidSetting`](crate::Error::InvalidSetting).
    /// If the process dies before the release, or the store cannot be reached, the lease decides when the lock is free: it
    /// may be before or after this time. If an owner has several guards, the latest of their times counts, when the last
    /// guard is released.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// use std::time::Duration;
    ///
    /// let lock = client.lock("nightly-report");
    /// let minute = Duration::from_secs(60);
    /// let report = async { "sent" };
    /// assert_eq!(lock.try_lock().at_least(minute).run(report).await?, Some("sent"));
    /// assert!(lock.try_lock().await?.is_none());
    ///
    /// tokio::time::sleep(minute).await;
    /// assert!(lock.try_lock().await?.is_some());
    /// # Ok(()) }
    /// ```
    pub fn at_least(mut self, at_least: Duration) -> Acquire<R> {
        self.options.rare_mut().at_least = Some(at_least);
        self
    }
}

impl<R: HasMinimum> TryAcquire<R> {
    /// As [`Acquire::at_least`].
    pub fn at_least(mut self, at_least: Duration) -> TryAcquire<R> {
        self.request = self.request.at_least(at_least);
        self
    }
}

impl<R: Acquirable> IntoFuture for Acquire<R> {
    type Output = Result<Guard<R>>;
    type IntoFuture = Boxed<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            // Without a wait limit it never returns `None`; the loop proves that to the compiler.
            loop {
                if let Some(guard) = self.acquire_once().await? {
                    return Ok(guard);
                }
            }
        })
    }
}

impl<R: Acquirable> IntoFuture for TryAcquire<R> {
    type Output = Result<Option<Guard<R>>>;
    type IntoFuture = Boxed<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move { self.acquire_once().await })
    }
}
