//! The permit-expirable semaphore (Redisson: `RPermitExpirableSemaphore`,
//! `RedissonPermitExpirableSemaphore`): permits with ids, each with its own lease. `rules`
//! describes the algorithm.

#[cfg(test)]
mod differential;
#[cfg(test)]
mod exploration;
mod permit_id;
mod rules;

use std::collections::BTreeSet;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use smallvec::smallvec;

pub use self::permit_id::{HeldPermit, PermitId};
use self::permit_id::{join_ids, split_ids};
pub(crate) use self::rules::MAX_PERMITS;
use self::rules::{Counts, ReleaseMode};
use crate::counters::UnsetWarning;
use crate::error::{Error, Loss, Result};
use crate::hold::requests::check_limit;
use crate::hold::{AcquireParams, Hold, HoldKind, ReleaseParams, Renewal, Renewed, Share, Spec};
use crate::keyspace::Keyspace;
use crate::lease::{Expiry, Lease};
use crate::locks::{Acquire, Guard, Holder, Lock, TryAcquire};
use crate::metrics::Kind;
use crate::name::{ObjectKeys, PermitKeys};
use crate::owner::{ClientId, Owner};
use crate::session::Session;
use crate::step::{Outcome, Step};
use crate::store::{Delivery, Progress};

/// The maximum number of permits in one acquisition. Each permit has its own id, by which it is
/// renewed together with those of other guards. A script that writes more would block the server for too long.
const MAX_PER_REQUEST: u32 = 1000;

/// A semaphore whose permits have leases: the permits of a crashed process return by themselves
/// (Redisson: `RPermitExpirableSemaphore`).
///
/// It has as many permits as were set ([`ExpirableSemaphore::try_set_permits`], or by the first request of a handle with [`ExpirableSemaphore::permits`]); before that, none.
/// A [`PermitGuard`] holds permits. The client's watchdog renews them until they are released or
/// dropped, or they are held for a fixed time ([`Acquire::lease`]). When the process dies, its
/// permits are free at the end of their lease, by default at most 30 s later. Permits have ids: a
/// caller that takes them out of the guard ([`PermitGuard::into_ids`](Guard::into_ids)) may release
/// them elsewhere, in another process, also in Java through Redisson's
/// `getPermitExpirableSemaphore(name)`.
///
/// Waiters of one client are served in order of arrival, even if the first one requests more
/// permits than the next. There is no order between clients: a request for many permits can be
/// overtaken for as long as others take the few that are free. Leases are measured by the server's clock.
///
/// A store that loses its data (`FLUSHALL`, eviction, a restart without persistence) loses the
/// permits and their number. Holders detect this at their next renewal. Requests of a handle that knows the number
/// ([`ExpirableSemaphore::permits`]) set it again. Others wait until it is set, and log that once for each handle (level WARN).
///
/// # When to use it, and when not
///
/// Use it where processes may crash. Permits of Redisson's plain semaphore have neither ids nor
/// leases; those of a crashed process are lost until an operator adds them again. The plain
/// semaphore costs less; that is its only advantage.
///
/// For a single permit use a [lock](crate::Client::lock); inside one process, a
/// [`tokio::sync::Semaphore`]. As with every lease, a permit is not a guarantee: a holder that is
/// stopped for longer than its lease resumes with one permit too many in use. Check
/// [`Guard::is_valid`], or run the work in [`ExpirableSemaphore::run`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
/// let client = redlatch::Client::embedded(); // or Client::connect("redis://127.0.0.1").await?
/// let jobs = client.expirable_semaphore("heavy-jobs");
/// jobs.try_set_permits(2).await?; // by the first process
///
/// let one = jobs.acquire().await?;
/// let two = jobs.acquire().await?;
/// assert!(jobs.try_acquire().await?.is_none());
/// one.release().await?;
/// assert_eq!(jobs.available().await?, 1);
/// # two.release().await }
/// ```
#[derive(Clone)]
pub struct ExpirableSemaphore {
    lock: Lock<Permits>,
}

/// Held permits of an [`ExpirableSemaphore`].
///
/// [`Guard::release`] or [`Guard::unlock`] releases them; dropping the guard releases them in the
/// background. Several permits in one guard are renewed together. As soon as one of them is lost,
/// all count as lost.
pub type PermitGuard = Guard<Lock<Permits>>;

/// A number of permits; the type parameter of [`PermitGuard`].
#[derive(Debug, Clone)]
pub struct Permits {
    keys: Arc<PermitKeys>,
    n: u32,
    /// The total number of permits, to set if none are set.
    total: Option<u32>,
    warning: UnsetWarning,
}

impl ExpirableSemaphore {
    pub(crate) fn new(session: Arc<Session>, name: &str) -> ExpirableSemaphore {
        ExpirableSemaphore {
            lock: Lock::new(session, name, Permits::new),
        }
    }

    /// Returns the name as it was passed in.
    pub fn name(&self) -> &str {
        self.lock.name()
    }

    /// Sets the total number of permits that requests of this handle set in the store if none are set: before the first one, after
    /// the store has lost its data, or after [`ExpirableSemaphore::delete`]. It changes no number that is set. From 1 to 2147483647;
    /// requests with another number fail with [`Error::InvalidCount`]. Use the same number everywhere.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// let jobs = client.expirable_semaphore("jobs").permits(3);
    /// let one = jobs.acquire().await?;
    /// assert_eq!(jobs.available().await?, 2);
    /// # one.release().await }
    /// ```
    #[must_use]
    pub fn permits(self, permits: u32) -> ExpirableSemaphore {
        let total = Some(permits);
        let kind = (*self.lock.kind).clone();
        ExpirableSemaphore {
            lock: self.lock.with_kind(Permits { total, ..kind }),
        }
    }

    /// Acquires one permit and waits for it without a limit. Await the request, or set a lease
    /// first: [`Acquire`].
    pub fn acquire(&self) -> Acquire<Lock<Permits>> {
        self.acquire_many(1)
    }

    /// Acquires this many permits, all or none, and waits for them without a limit. Await the
    /// request, or set a lease first: [`Acquire`].
    ///
    /// # Errors
    ///
    /// Those of [`Acquire`], and [`Error::InvalidCount`] unless 1 to 1000 are requested. Requesting
    /// more than there are in total is not an error, because permits may be added.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// let jobs = client.expirable_semaphore("jobs");
    /// jobs.try_set_permits(5).await?;
    /// let three = jobs.acquire_many(3).await?;
    /// assert_eq!(three.ids().len(), 3);
    /// assert_eq!(jobs.available().await?, 2);
    /// # three.release().await }
    /// ```
    pub fn acquire_many(&self, permits: u32) -> Acquire<Lock<Permits>> {
        self.with_permits(permits).lock()
    }

    /// Acquires one permit if it is free; `None` if not. Await the request, or configure it first,
    /// for example with a wait limit: [`TryAcquire`].
    ///
    /// ```
    /// # use std::time::Duration;
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> redlatch::Result<()> {
    /// # let jobs = redlatch::Client::embedded().expirable_semaphore("jobs");
    /// # jobs.try_set_permits(1).await?;
    /// let permit = jobs.try_acquire().lease(Duration::from_secs(60)).await?;
    /// assert!(permit.is_some());
    /// let second = jobs.try_acquire().wait(Duration::from_secs(1)).await?;
    /// assert!(second.is_none());
    /// # Ok(()) }
    /// ```
    pub fn try_acquire(&self) -> TryAcquire<Lock<Permits>> {
        self.try_acquire_many(1)
    }

    /// Acquires this many permits if they are free, all or none; `None` if not. Await the request,
    /// or configure it first: [`TryAcquire`]. Errors as for [`ExpirableSemaphore::acquire_many`].
    pub fn try_acquire_many(&self, permits: u32) -> TryAcquire<Lock<Permits>> {
        self.with_permits(permits).try_lock()
    }

    /// Acquires one permit, runs `work` while it is held, and releases it, as [`Lock::run`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let jobs = redlatch::Client::embedded().expirable_semaphore("jobs");
    /// jobs.try_set_permits(2).await?;
    /// let answer = jobs.run(async { 6 * 7 }).await?;
    /// assert_eq!(answer, 42);
    /// # Ok(()) }
    /// ```
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output> {
        self.lock.run(work).await
    }

    /// Releases a permit by its id.
    ///
    /// If a guard still holds the permit, release it through the guard instead. If it is released
    /// here, the guard detects the loss at the next renewal or at its own release.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`]: the permit is not held, because it has expired or was released. With the
    /// errors of [`ExpirableSemaphore::available`], it may or may not have been released.
    ///
    /// # Cancel safety
    ///
    /// When dropped, the permit may or may not have been released. Releasing it again does no harm.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let jobs = redlatch::Client::embedded().expirable_semaphore("jobs");
    /// jobs.try_set_permits(1).await?;
    /// let ids = jobs.acquire().await?.into_ids()?; // it is not renewed from here on
    /// // … and somewhere else:
    /// jobs.release(ids[0]).await?;
    /// assert!(!jobs.try_release(ids[0]).await?);
    /// # Ok(()) }
    /// ```
    pub async fn release(&self, id: PermitId) -> Result<()> {
        self.release_many(&[id]).await
    }

    /// Releases several permits by their ids: all, or none if one of them is not held. Errors and
    /// cancel safety as for [`ExpirableSemaphore::release`].
    pub async fn release_many(&self, ids: &[PermitId]) -> Result<()> {
        let (released, wanted) = self.release_ids(ids, ReleaseMode::AllOrNone).await?;
        if released < wanted {
            return Err(Error::Lost {
                name: self.name().to_owned(),
                reason: Loss::NotHeld,
            });
        }
        Ok(())
    }

    /// Releases a permit by its id, if it is held. Returns whether it was held; an expired permit
    /// was not. Errors and cancel safety as for [`ExpirableSemaphore::release`].
    pub async fn try_release(&self, id: PermitId) -> Result<bool> {
        Ok(self.try_release_many(&[id]).await? > 0)
    }

    /// Releases the permits that are held and returns their number. Errors and cancel safety as for
    /// [`ExpirableSemaphore::release`].
    ///
    /// If the connection breaks, the request is sent again. If none of the permits is held then,
    /// all count as released by the first attempt.
    pub async fn try_release_many(&self, ids: &[PermitId]) -> Result<usize> {
        Ok(self.release_ids(ids, ReleaseMode::Held).await?.0)
    }

    /// Sets a permit's remaining lease to `lease`, longer or shorter: 1 ms to
    /// [`MAX_LEASE`](crate::MAX_LEASE), truncated to whole milliseconds. Returns whether the permit
    /// is held, and thus whether the lease was set.
    ///
    /// For permits that were taken out of their guard. A guard does not notice the change: its
    /// watchdog still extends the lease, and its own validity stays as it was.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidLease`], and those of [`ExpirableSemaphore::available`].
    ///
    /// # Cancel safety
    ///
    /// When dropped, the lease may or may not have been set.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use redlatch::Expiry;
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let jobs = redlatch::Client::embedded().expirable_semaphore("jobs");
    /// jobs.try_set_permits(1).await?;
    /// let ids = jobs.acquire().await?.into_ids()?;
    /// assert!(jobs.update_lease(ids[0], Duration::from_secs(3600)).await?);
    /// let left = jobs.lease_of(ids[0]).await?.expect("it is held");
    /// assert!(left > Expiry::In(Duration::from_secs(3500)));
    /// # Ok(()) }
    /// ```
    pub async fn update_lease(&self, id: PermitId, lease: Duration) -> Result<bool> {
        let (keys, lease) = (self.keys()?, Lease::new(lease)?);
        let id = &id.to_string();
        let step = rules::update_lease(keys, id, lease);
        self.lock.session.store.run_urgent(&step).await
    }

    /// Asks the holder of a permit to release it, in any process. Returns whether the permit is held, and so was asked for.
    /// [`ExpirableSemaphore::held_permits`] lists the ids.
    ///
    /// As for a lock ([`Lock::ask`]), the holder decides: its [`Guard::asked`] completes, and
    /// [`Acquire::run_until_asked`] ends its work and releases. A guard of several permits is asked if one of them is. A permit that was
    /// taken out of its guard has no holder that could react, and Redisson does not know requests.
    ///
    /// # Errors
    ///
    /// Those of [`ExpirableSemaphore::available`].
    ///
    /// # Cancel safety
    ///
    /// When dropped, the permit may or may not have been asked for. It can be repeated: an id is never used again.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// let jobs = client.expirable_semaphore("jobs").permits(2);
    /// let permit = jobs.acquire().await?;
    /// for held in jobs.held_permits().await? {
    ///     jobs.ask(held.id).await?; // in another process
    /// }
    /// permit.asked().await;
    /// permit.release().await?;
    /// # Ok(()) }
    /// ```
    pub async fn ask(&self, id: PermitId) -> Result<bool> {
        self.ask_until(id, None).await
    }

    /// Asks for a permit as [`ExpirableSemaphore::ask`] does. If its holder has not released it by the end of `limit`, all permits of
    /// that guard are lost, for the reason [`Loss::Revoked`], and then released: [`Lock::revoke`], which has the details.
    /// Returns immediately whether the permit is held. Of several requests the earliest limit counts.
    ///
    /// # Errors
    ///
    /// Those of [`ExpirableSemaphore::ask`]. [`Error::InvalidSetting`]: the limit is longer than
    /// [`MAX_LEASE`](crate::MAX_LEASE).
    ///
    /// # Cancel safety
    ///
    /// As for [`ExpirableSemaphore::ask`].
    pub async fn revoke(&self, id: PermitId, limit: Duration) -> Result<bool> {
        check_limit(limit)?;
        self.ask_until(id, Some(limit)).await
    }

    async fn ask_until(&self, id: PermitId, limit: Option<Duration>) -> Result<bool> {
        let id = &id.to_string();
        let step = rules::ask(self.keys()?, id, limit);
        self.run_idempotent(step).await
    }

    /// Waits until a permit is not held, at most this long: [`Lock::released_by`]. Returns whether it is not.
    pub async fn released(&self, id: PermitId, wait: Duration) -> Result<bool> {
        let id = id.to_string().into();
        self.lock.until_released_by(id, wait).await
    }

    /// Returns the time until a permit expires unless it is renewed or released; `None` if it is
    /// not held. [`Expiry::Never`] for a permit that Redisson granted without a lease. Errors as
    /// for [`ExpirableSemaphore::available`].
    pub async fn lease_of(&self, id: PermitId) -> Result<Option<Expiry>> {
        let id = &id.to_string();
        self.run_idempotent(rules::lease_of(self.keys()?, id)).await
    }

    /// Returns the number of free permits; 0 if none were set. Negative if more are held than there
    /// are now in total ([`ExpirableSemaphore::set_permits`]).
    ///
    /// # Errors
    ///
    /// [`Error::InvalidName`], [`Error::WrongKind`], [`Error::Unavailable`],
    /// [`Error::ResponseTimeout`]; the same for all methods that only read.
    pub async fn available(&self) -> Result<i64> {
        Ok(self.counts().await?.available)
    }

    /// Returns the number of held permits.
    pub async fn acquired(&self) -> Result<i64> {
        Ok(self.counts().await?.acquired)
    }

    /// Returns the total number of permits, free and held.
    pub async fn total(&self) -> Result<i64> {
        let counts = self.counts().await?;
        Ok(counts.available.saturating_add(counts.acquired))
    }

    /// Returns the held permits. Omits entries that another program has written with an id of another
    /// length than a [`PermitId`]; they count in [`ExpirableSemaphore::acquired`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let jobs = redlatch::Client::embedded().expirable_semaphore("jobs");
    /// jobs.try_set_permits(3).await?;
    /// let permit = jobs.acquire().await?;
    /// let held = jobs.held_permits().await?;
    /// assert_eq!(held.len(), 1);
    /// assert_eq!(held[0].id, permit.ids()[0]);
    /// # Ok(()) }
    /// ```
    pub async fn held_permits(&self) -> Result<Vec<HeldPermit>> {
        let holders = self.lock.holders().await?.into_iter();
        let permit = |holder: Holder| {
            Some(HeldPermit {
                id: holder.owner.as_str().parse().ok()?,
                remaining: holder.remaining,
            })
        };
        Ok(holders.filter_map(permit).collect())
    }

    /// Sets the total number of permits if it is not set yet. Returns whether this call set it. A
    /// semaphore whose permits are all held has been set.
    ///
    /// # Errors
    ///
    /// Those of [`ExpirableSemaphore::available`]. [`Error::InvalidCount`]: more than 2³¹ - 1.
    /// [`Error::OutcomeUnknown`]: there was no answer, because the connection broke or the response
    /// timeout passed. The request may or may not have set the permits; it is not sent again, because
    /// the semaphore may have been deleted meanwhile.
    ///
    /// # Cancel safety
    ///
    /// If dropped after it was polled, it continues in the background.
    pub async fn try_set_permits(&self, permits: u32) -> Result<bool> {
        let keys = self.keys()?;
        check_total(permits)?;
        let session = &self.lock.session;
        let set = session
            .run_at_most_once(
                &keys.object,
                keys,
                move |keys| rules::set(keys, permits, true),
                "setting the permits",
            )
            .await?;
        self.wake_waiters();
        Ok(set)
    }

    /// Sets the total number of permits, including held ones, and wakes waiters. Fewer than are
    /// held is not an error: no permit is granted until enough have been released.
    ///
    /// # Errors
    ///
    /// Those of [`ExpirableSemaphore::available`]. [`Error::InvalidCount`]: more than 2³¹ - 1.
    ///
    /// # Cancel safety
    ///
    /// When dropped, it may or may not have set them. It can be repeated.
    ///
    /// A request whose answer is lost is sent again, and then overwrites what another client has set
    /// meanwhile.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let jobs = redlatch::Client::embedded().expirable_semaphore("jobs");
    /// jobs.set_permits(3).await?;
    /// let permits = jobs.acquire_many(3).await?;
    /// jobs.set_permits(2).await?;
    /// assert_eq!(jobs.available().await?, -1);
    /// permits.release().await?;
    /// assert_eq!(jobs.available().await?, 2);
    /// # Ok(()) }
    /// ```
    pub async fn set_permits(&self, permits: u32) -> Result<()> {
        let keys = self.keys()?;
        check_total(permits)?;
        let step = rules::set(keys, permits, false);
        self.run_idempotent(step).await?;
        self.wake_waiters();
        Ok(())
    }

    /// Adds this many free permits, or removes some; their number may then be negative.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidCount`]: more than 2³¹ - 1 would be free, or missing; nothing was changed.
    /// [`Error::OutcomeUnknown`]: the store did not answer. The request is not repeated, because it
    /// would count twice; [`ExpirableSemaphore::set_permits`] can be repeated.
    ///
    /// # Cancel safety
    ///
    /// If dropped after it started, it continues in the background.
    pub async fn add_permits(&self, permits: i32) -> Result<()> {
        let delta = i64::from(permits);
        let keys = self.keys()?;
        let session = &self.lock.session;
        match session
            .run_at_most_once(
                &keys.object,
                keys,
                move |keys| rules::add(keys, delta),
                "adding permits",
            )
            .await?
        {
            true => {
                self.wake_waiters();
                Ok(())
            }
            false => Err(Error::InvalidCount {
                count: delta,
                reason: TOO_MANY,
            }),
        }
    }

    /// Releases all held permits, whichever process holds them, and wakes waiters. Returns whether
    /// any were held. Their holders detect the loss at their next renewal or release.
    pub async fn force_release(&self) -> Result<bool> {
        self.lock.force_unlock().await
    }

    /// Deletes the semaphore. Returns whether it existed. Held permits end with it. Waiters
    /// continue to wait until permits are set again.
    ///
    /// # Errors
    ///
    /// Those of [`ExpirableSemaphore::available`]. [`Error::OutcomeUnknown`]: there was no
    /// answer, because the connection broke or the response timeout passed. The request may or may not
    /// have deleted the semaphore; it is not sent again, because it could delete one that was set
    /// meanwhile.
    ///
    /// # Cancel safety
    ///
    /// If dropped after it was polled, it continues in the background.
    pub async fn delete(&self) -> Result<bool> {
        let keys = self.keys()?;
        let session = &self.lock.session;
        session
            .run_at_most_once(&keys.object, keys, rules::delete, "deleting a semaphore")
            .await
    }

    /// Makes the local waiters ask the store. Its message may arrive after the next request of the caller, on another
    /// connection.
    fn wake_waiters(&self) {
        let channel = self.lock.kind.keys.object.channel();
        self.lock.session.waiting.wake(channel);
    }

    fn with_permits(&self, permits: u32) -> Lock<Permits> {
        let n = permits;
        let kind = (*self.lock.kind).clone();
        self.lock.clone().with_kind(Permits { n, ..kind })
    }

    fn keys(&self) -> Result<&Arc<PermitKeys>> {
        Ok(&self.lock.valid_kind()?.keys)
    }

    async fn counts(&self) -> Result<Counts> {
        self.run_idempotent(rules::count(self.keys()?)).await
    }

    /// Returns the number of released permits and the number of distinct ids.
    async fn release_ids(&self, ids: &[PermitId], mode: ReleaseMode) -> Result<(usize, usize)> {
        let keys = self.keys()?;
        // A permit named twice is released once.
        let ids: BTreeSet<_> = ids.iter().collect();
        let wanted = ids.len();
        if wanted == 0 {
            return Ok((0, 0));
        }
        let ids = &join_ids(ids);
        let waiting = &self.lock.session.waiting;
        waiting.record_release(keys.object.channel());
        let step = rules::release(keys, ids, mode, None);
        let (store, progress) = (&self.lock.session.store, Progress::default());
        let answer = store
            .run(&step, None, Delivery::IMMEDIATE, &progress)
            .await?;
        if answer.reply < wanted {
            // There may be no message.
            self.wake_waiters();
        }
        let released = match answer.reply {
            // None is held, because the first attempt, which was not answered, released them.
            0 if progress.was_repeated() => wanted,
            released => released,
        };
        Ok((released, wanted))
    }

    async fn run_idempotent<R: Send>(&self, step: Step<'_, R>) -> Result<R> {
        self.lock.session.store.run_idempotent(&step).await
    }
}

const TOO_MANY: &str = "a semaphore has at most 2147483647 permits";

/// Returns an error if a semaphore cannot have this total number of permits.
fn check_total(permits: u32) -> Result<()> {
    match permits > MAX_PERMITS {
        true => Err(Error::InvalidCount {
            count: permits.into(),
            reason: TOO_MANY,
        }),
        false => Ok(()),
    }
}

impl std::fmt::Debug for ExpirableSemaphore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ExpirableSemaphore")
            .field("name", &self.name())
            .finish_non_exhaustive()
    }
}

impl Guard<Lock<Permits>> {
    /// Returns the ids of the permits, one or more. Permits whose ids a caller knows do not pass to another task when they
    /// are released ([`ClientBuilder::local_hand_over`](crate::ClientBuilder::local_hand_over)).
    pub fn ids(&self) -> Vec<PermitId> {
        let hold = &self.hold_ref().hold;
        hold.state().ids_are_shared = true;
        let ids = split_ids(&hold.field);
        ids.filter_map(|id| id.parse().ok()).collect()
    }

    /// Releases the permits and waits until the store has confirmed it: [`Guard::unlock`], with its
    /// errors and its cancel safety.
    pub async fn release(self) -> Result<()> {
        self.unlock().await
    }

    /// Takes the permits out of the guard: they are no longer renewed or released automatically,
    /// but stay held until their lease ends or they are released by their ids.
    ///
    /// Permits that the watchdog renewed until now have between two thirds and all of its lease
    /// left; [`ExpirableSemaphore::update_lease`] sets another.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`]: they are no longer held.
    pub fn into_ids(self) -> Result<Vec<PermitId>> {
        let ids = self.ids();
        self.detach()?;
        Ok(ids)
    }
}

impl Permits {
    fn new(prefix: &str, name: &str) -> Permits {
        Permits {
            keys: Arc::new(PermitKeys::new(prefix, name)),
            n: 1,
            total: None,
            warning: UnsetWarning::default(),
        }
    }
}

impl HoldKind for Permits {
    fn object(&self) -> &Arc<ObjectKeys> {
        &self.keys.object
    }

    fn spec(&self) -> Spec {
        Spec {
            has_owner: false,
            local_handoff: true,
            ..Spec::of(Kind::ExpirableSemaphore)
        }
    }

    fn share(&self) -> Share {
        Share::Permits(self.n)
    }

    fn renewal<'a>(&'a self, hold: &'a Hold) -> Renewal<'a> {
        Renewal {
            script: rules::renew_script(),
            key: &self.keys.deadlines,
            args: smallvec![
                (&*hold.field).into(),
                self.keys.object.requests_key().into()
            ],
            weight: split_ids(&hold.field).count(),
        }
    }

    fn renew(&self, keyspace: &mut Keyspace, hold: &Hold, lease: Option<Lease>) -> Result<Renewed> {
        rules::renew(keyspace, &self.keys, hold, lease)
    }

    fn release<'a>(&'a self, params: ReleaseParams<'a>) -> Step<'a, bool> {
        let ids = &*params.hold.field;
        // A permit is never held twice, so there is either nothing to keep or nothing to release.
        let mode = match params.keep {
            0 => ReleaseMode::Held,
            _ => ReleaseMode::CountOnly,
        };
        let step = rules::release(&self.keys, ids, mode, params.requests_key());
        step.map(move |released| Ok(released == split_ids(ids).count()))
    }

    fn check(&self) -> Result<()> {
        let invalid = |count: u32, reason| {
            let count = count.into();
            Err(Error::InvalidCount { count, reason })
        };
        match self.total {
            _ if !(1..=MAX_PER_REQUEST).contains(&self.n) => {
                invalid(self.n, "request 1 to 1000 permits at a time")
            }
            Some(0) => invalid(0, "a semaphore with no permits refuses every request"),
            Some(total) if total > MAX_PERMITS => invalid(total, TOO_MANY),
            _ => Ok(()),
        }
    }

    fn acquire<'a>(&'a self, params: AcquireParams<'a>) -> Step<'a, Outcome> {
        let (ids, lease) = (&*params.hold.field, params.lease);
        let permits = self.total.unwrap_or(0);
        let step = rules::acquire(&self.keys, ids, lease, permits);
        step.map(|outcome| {
            let name = self.keys.object.full_name();
            self.warning.record(name, outcome.is_some());
            Ok(outcome.unwrap_or(Outcome::Wait(Expiry::Never)))
        })
    }

    fn inspect(&self) -> Step<'_, Vec<Holder>> {
        rules::inspect(&self.keys)
    }

    fn force(&self) -> Step<'_, bool> {
        rules::force(&self.keys)
    }

    /// The permits' ids, chosen here, identify the acquisition, so sending it twice takes them once.
    fn field(&self, _: &ClientId, _: Owner) -> String {
        let ids: Vec<_> = (0..self.n).map(|_| PermitId::random()).collect();
        join_ids(&ids)
    }
}
