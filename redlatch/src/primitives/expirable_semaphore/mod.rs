//! The permit-expirable semaphore (Redisson: `RPermitExpirableSemaphore`,
//! `RedissonPermitExpirableSemaphore`): permits with ids, each with a lease of its own.

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

use tokio::time::Instant;

pub use self::permit_id::PermitId;
use self::permit_id::{join, split};
use self::rules::{Add, Count, Counts, Delete, LeaseOf, Release, Set, UpdateLease, Which};
use crate::error::{Error, Loss, Result};
use crate::hold::{Hold, Kind};
use crate::lease::Lease;
use crate::name::{Family, Place};
use crate::owner::{ClientId, Owner};
use crate::primitives::handle::{Acquire, Ask, Guard, Holder, Lock, Rules, TryAcquire};
use crate::session::Session;
use crate::space::Space;
use crate::step::{Args, BoxedStep, Mapped, Outcome, Script, Step};
use crate::store::{Answer, Lane, Sent};

/// The most permits that a semaphore can have: what an `int` holds in Java, where Redisson counts
/// the same ones.
const MAX_PERMITS: u32 = i32::MAX.unsigned_abs();

/// The most permits in one acquisition. Each has an id of its own and is renewed by it, together with
/// those of other guards; a script that writes more would keep the server from others for too long.
const MAX_AT_ONCE: u32 = 1000;

/// A semaphore whose permits have leases: what a process that crashed had comes back by itself
/// (Redisson: `RPermitExpirableSemaphore`).
///
/// It has as many permits as were set for it ([`ExpirableSemaphore::try_set_permits`]); before that,
/// none. A permit is held by a [`PermitGuard`], which the client's watchdog renews until it is
/// released or dropped, or for a fixed time ([`Acquire::lease`]). When the process dies, the permit
/// is free at the end of its lease, at the latest 30 s later by default. Permits have ids: whoever
/// has taken one out of its guard ([`PermitGuard::into_ids`](Guard::into_ids)) may release it
/// somewhere else, in another process, also in Java through Redisson's
/// `getPermitExpirableSemaphore(name)`.
///
/// Waiters of one client are served in order of arrival, also when the first of them wants more
/// than the next. Over several clients there is no order: who wants many permits can be overtaken
/// for as long as others take the few that are free. Time is the server's.
///
/// A store that loses its data (`FLUSHALL`, eviction, a restart without persistence) loses the permits:
/// holders learn of it at their next renewal, and who waits goes on waiting until they are set anew.
///
/// # When to use it, and when not
///
/// It is the semaphore to take where processes may crash. What they had of Redisson's plain
/// semaphore, whose permits have neither ids nor leases, is gone until somebody adds it again; that
/// one costs less, and that is all.
///
/// For one permit take a [lock](crate::Client::lock); inside one process, a
/// [`tokio::sync::Semaphore`]. And as with every lease, a permit is no proof: who is stopped for
/// longer than its lease wakes up with one permit too many in use. Ask [`Guard::is_valid`], or put
/// the work into [`ExpirableSemaphore::run`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
/// let client = redlatch::Client::embedded(); // or Client::connect("redis://127.0.0.1").await?
/// let jobs = client.expirable_semaphore("heavy-jobs");
/// jobs.try_set_permits(2).await?; // whoever comes first
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

/// Permits of an [`ExpirableSemaphore`] that are held.
///
/// Given back by [`Guard::release`] or [`Guard::unlock`], or in the background when dropped. Several
/// permits in one guard are renewed together, and lost together as soon as one of them is.
pub type PermitGuard = Guard<Permits>;

/// The kind of [`PermitGuard`]: some permits.
#[derive(Debug, Clone, Copy)]
pub struct Permits {
    n: u32,
}

impl ExpirableSemaphore {
    pub(crate) fn new(session: Arc<Session>, name: &str) -> ExpirableSemaphore {
        ExpirableSemaphore {
            lock: Lock::new(session, name, Permits { n: 1 }),
        }
    }

    /// The name, as it was given.
    pub fn name(&self) -> &str {
        self.lock.name()
    }

    /// Waits for a permit as long as it takes. Await it, or set a lease first: [`Acquire`].
    pub fn acquire(&self) -> Acquire<Permits> {
        self.acquire_many(1)
    }

    /// Waits until so many permits are free and takes them all at once. Await it, or set a lease
    /// first: [`Acquire`].
    ///
    /// # Errors
    ///
    /// Those of [`Acquire`], and [`Error::InvalidCount`] unless 1 to 1000 are asked for. More
    /// than there are in all is no error: some may be added.
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
    pub fn acquire_many(&self, permits: u32) -> Acquire<Permits> {
        self.wanting(permits).lock()
    }

    /// Takes a permit if one is free: `None` if not. Await it, or set something first, such as how
    /// long to wait: [`TryAcquire`].
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
    pub fn try_acquire(&self) -> TryAcquire<Permits> {
        self.try_acquire_many(1)
    }

    /// Takes so many permits at once if they are free: `None` if not. Await it, or set something
    /// first: [`TryAcquire`]. Errors as for [`ExpirableSemaphore::acquire_many`].
    pub fn try_acquire_many(&self, permits: u32) -> TryAcquire<Permits> {
        self.wanting(permits).try_lock()
    }

    /// Waits for a permit, runs `work` while it is held, and releases it. As [`Lock::run`].
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
    /// A permit that a guard still holds is better released through it; released here, the guard
    /// learns of its loss at the next renewal or at its own release.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`]: no such permit is out, because it has expired or was released. Those of
    /// [`ExpirableSemaphore::available`]; then it may have been released or not.
    ///
    /// # Cancel safety
    ///
    /// When dropped, the permit may have been released or not. Releasing it again does no harm.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let jobs = redlatch::Client::embedded().expirable_semaphore("jobs");
    /// jobs.try_set_permits(1).await?;
    /// let ids = jobs.acquire().await?.into_ids()?; // nobody renews it from here on
    /// // … and somewhere else:
    /// jobs.release(ids[0]).await?;
    /// assert!(!jobs.try_release(ids[0]).await?);
    /// # Ok(()) }
    /// ```
    pub async fn release(&self, id: PermitId) -> Result<()> {
        self.release_many(&[id]).await
    }

    /// Releases several permits by their ids: all, or none if one of them is not out. Errors and
    /// cancel safety as for [`ExpirableSemaphore::release`].
    pub async fn release_many(&self, ids: &[PermitId]) -> Result<()> {
        let (released, wanted) = self.give_back(ids, Which::All).await?;
        if released < wanted {
            return Err(Error::Lost {
                name: self.name().to_owned(),
                reason: Loss::NotHeld,
            });
        }
        Ok(())
    }

    /// Releases a permit by its id, if it is out. Whether it was: one that has expired was not.
    /// Errors and cancel safety as for [`ExpirableSemaphore::release`].
    pub async fn try_release(&self, id: PermitId) -> Result<bool> {
        Ok(self.try_release_many(&[id]).await? > 0)
    }

    /// Releases those of several permits that are out; how many that were. Errors and cancel safety
    /// as for [`ExpirableSemaphore::release`].
    ///
    /// When the connection breaks meanwhile, this is sent again; if then none of them is out, all
    /// count as released by the first try.
    pub async fn try_release_many(&self, ids: &[PermitId]) -> Result<usize> {
        Ok(self.give_back(ids, Which::Any).await?.0)
    }

    /// Has a permit expire this long from now, whatever its lease was: 1 ms to
    /// [`MAX_LEASE`](crate::MAX_LEASE), cut to whole milliseconds. Whether it is out (then it was
    /// done).
    ///
    /// For permits that were taken out of their guard. A guard does not learn of it: its watchdog
    /// still moves the end away, and what it knows of its own validity stays as it was.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidLease`], and those of [`ExpirableSemaphore::available`].
    ///
    /// # Cancel safety
    ///
    /// When dropped, it may have been done or not.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let jobs = redlatch::Client::embedded().expirable_semaphore("jobs");
    /// jobs.try_set_permits(1).await?;
    /// let ids = jobs.acquire().await?.into_ids()?;
    /// assert!(jobs.update_lease(ids[0], Duration::from_secs(3600)).await?);
    /// let left = jobs.lease_of(ids[0]).await?.expect("it is out");
    /// assert!(left > Duration::from_secs(3500));
    /// # Ok(()) }
    /// ```
    pub async fn update_lease(&self, id: PermitId, lease: Duration) -> Result<bool> {
        let (place, lease) = (self.lock.place()?, Lease::new(lease)?);
        let id = &id.to_string();
        self.look(&UpdateLease { place, id, lease }).await
    }

    /// How long a permit is out unless it is renewed or released; `None` if it is not out.
    /// [`Duration::MAX`] for one that Redisson gave out without a lease. Errors as for
    /// [`ExpirableSemaphore::available`].
    pub async fn lease_of(&self, id: PermitId) -> Result<Option<Duration>> {
        let place = self.lock.place()?;
        let id = &id.to_string();
        self.look(&LeaseOf { place, id }).await
    }

    /// How many permits are free; 0 if none were set. Less than 0 when more are out than there are
    /// now in all ([`ExpirableSemaphore::set_permits`]).
    ///
    /// # Errors
    ///
    /// [`Error::InvalidName`], [`Error::WrongKind`], [`Error::Unavailable`],
    /// [`Error::ResponseTimeout`]; so for all methods that only ask.
    pub async fn available(&self) -> Result<i64> {
        Ok(self.counts().await?.available)
    }

    /// How many permits are out.
    pub async fn acquired(&self) -> Result<i64> {
        Ok(self.counts().await?.acquired)
    }

    /// How many permits there are in all: those that are free and those that are out.
    pub async fn total(&self) -> Result<i64> {
        let counts = self.counts().await?;
        Ok(counts.available.saturating_add(counts.acquired))
    }

    /// Which permits are out, each as a [`Holder`] whose `owner` is the permit's id.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let jobs = redlatch::Client::embedded().expirable_semaphore("jobs");
    /// jobs.try_set_permits(3).await?;
    /// let permit = jobs.acquire().await?;
    /// let out = jobs.holders().await?;
    /// assert_eq!(out.len(), 1);
    /// assert_eq!(out[0].owner, permit.ids()[0].to_string());
    /// # Ok(()) }
    /// ```
    pub async fn holders(&self) -> Result<Vec<Holder>> {
        self.lock.holders().await
    }

    /// Sets how many permits there are, if that has not been done. Whether this did it; a semaphore
    /// whose permits are all out has been set too.
    ///
    /// # Errors
    ///
    /// Those of [`ExpirableSemaphore::available`]. [`Error::InvalidCount`]: more than 2³¹ - 1.
    /// [`Error::OutcomeUnknown`]: the connection broke before the answer came. The request may have set the
    /// permits or not; it is not sent again, because the semaphore may have been deleted meanwhile.
    ///
    /// # Cancel safety
    ///
    /// If dropped after it was polled, it continues in the background.
    pub async fn try_set_permits(&self, permits: u32) -> Result<bool> {
        let step = self.set(permits, true)?;
        let session = &self.lock.session;
        session.change(step, "setting the permits").await
    }

    /// Sets how many permits there are in all, those that are out included, and wakes who waits for
    /// more. Fewer than are out is no error: no permit is granted until enough have been released.
    ///
    /// # Errors
    ///
    /// Those of [`ExpirableSemaphore::available`]. [`Error::InvalidCount`]: more than 2³¹ - 1.
    ///
    /// # Cancel safety
    ///
    /// When dropped, it may have set them or not. It can be repeated.
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
        self.look(&self.set(permits, false)?).await?;
        Ok(())
    }

    /// Adds so many permits to those that are free, or takes some away; then there may be fewer
    /// than none.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidCount`]: more than 2³¹ - 1 would be free, or missing; nothing was changed.
    /// [`Error::OutcomeUnknown`]: the store did not answer. It is not asked again, because done
    /// twice it would count twice; [`ExpirableSemaphore::set_permits`] can be repeated.
    ///
    /// # Cancel safety
    ///
    /// When dropped, it goes on in the background if it has begun.
    pub async fn add_permits(&self, permits: i32) -> Result<()> {
        let more = i64::from(permits);
        let place = self.lock.place()?.clone();
        let step = Add { place, more };
        if self.lock.session.change(step, "adding permits").await? {
            return Ok(());
        }
        Err(Error::InvalidCount {
            count: more,
            reason: TOO_MANY,
        })
    }

    /// Takes all permits that are out back, from whoever has them, in whatever process, and wakes
    /// who waits. Whether any were out. Their holders learn of it at their next renewal or release.
    pub async fn force_release(&self) -> Result<bool> {
        self.lock.force_unlock().await
    }

    /// Deletes the semaphore. Returns whether there was one. Permits that are out end with it. Waiters continue to
    /// wait, until permits are set again.
    ///
    /// # Errors
    ///
    /// Those of [`ExpirableSemaphore::available`]. [`Error::OutcomeUnknown`]: the connection broke before the
    /// answer came. The request may have deleted the semaphore or not; it is not sent again, because it could
    /// delete one that was set meanwhile.
    ///
    /// # Cancel safety
    ///
    /// If dropped after it was polled, it continues in the background.
    pub async fn delete(&self) -> Result<bool> {
        let place = self.lock.place()?.clone();
        let session = &self.lock.session;
        session
            .change(Delete { place }, "deleting a semaphore")
            .await
    }

    fn wanting(&self, permits: u32) -> Lock<Permits> {
        self.lock.clone().with_kind(Permits { n: permits })
    }

    async fn counts(&self) -> Result<Counts> {
        let place = self.lock.place()?;
        self.look(&Count { place }).await
    }

    fn set(&self, permits: u32, first: bool) -> Result<Set> {
        let place = self.lock.place()?.clone();
        if permits > MAX_PERMITS {
            return Err(Error::InvalidCount {
                count: permits.into(),
                reason: TOO_MANY,
            });
        }
        Ok(Set {
            place,
            permits,
            first,
        })
    }

    /// How many were released, and how many of them there are.
    async fn give_back(&self, ids: &[PermitId], which: Which) -> Result<(usize, usize)> {
        let place = self.lock.place()?;
        // Named twice is given back once.
        let ids: BTreeSet<_> = ids.iter().collect();
        let wanted = ids.len();
        if wanted == 0 {
            return Ok((0, 0));
        }
        let step = Release {
            place,
            ids: &join(ids),
            which,
        };
        let answer = self.run_step(&step).await?;
        let released = match answer.reply {
            // None is out any more because the first try, which was not answered, released them.
            0 if answer.repeated => wanted,
            released => released,
        };
        Ok((released, wanted))
    }

    async fn run_step<S: Step>(&self, step: &S) -> Result<Answer<S::Reply>> {
        let store = &self.lock.session.store;
        store.run(step, Lane::First, &Sent::default()).await
    }

    async fn look<S: Step>(&self, step: &S) -> Result<S::Reply> {
        self.lock.session.store.look(step).await
    }
}

const TOO_MANY: &str = "a semaphore has 2147483647 at most";

impl std::fmt::Debug for ExpirableSemaphore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ExpirableSemaphore")
            .field("name", &self.name())
            .finish_non_exhaustive()
    }
}

impl Guard<Permits> {
    /// The ids of the permits, one or more.
    pub fn ids(&self) -> Vec<PermitId> {
        let ids = split(&self.claim().hold.field);
        ids.filter_map(|id| id.parse().ok()).collect()
    }

    /// Gives the permits back and returns when the store has done so: [`Guard::unlock`], with its
    /// errors and its cancel safety.
    pub async fn release(self) -> Result<()> {
        self.unlock().await
    }

    /// Takes the permits out of the guard: they are neither renewed nor given back any more, but
    /// stay out until their lease ends or somebody releases them by their ids.
    ///
    /// Permits that the watchdog had renewed so far have between two thirds and the whole of its
    /// lease left; [`ExpirableSemaphore::update_lease`] gives them another.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`]: they are no longer out.
    pub fn into_ids(self) -> Result<Vec<PermitId>> {
        let ids = self.ids();
        self.detach()?;
        Ok(ids)
    }
}

impl Kind for Permits {
    fn renew_script(&self) -> &'static Script {
        rules::renew_script()
    }

    fn renew_key<'a>(&self, hold: &'a Hold) -> &'a str {
        hold.place.deadlines()
    }

    fn renew_args(&self, hold: &Hold, args: &mut Args<'_>) {
        args.text(&hold.field);
    }

    fn renew(
        &self,
        space: &mut Space,
        hold: &Hold,
        lease: Option<Lease>,
        now: Instant,
    ) -> Result<bool> {
        rules::renew(space, hold, lease, now)
    }

    fn weight(&self, hold: &Hold) -> usize {
        split(&hold.field).count()
    }

    fn release<'a>(&'a self, hold: &'a Hold, keep: u32, _: Option<Lease>) -> BoxedStep<'a, bool> {
        let all = move |released| released == split(&hold.field).count();
        Box::new(Mapped(
            Release {
                place: &hold.place,
                ids: &hold.field,
                // Nobody has them twice, so there is either nothing to keep or nothing to give back.
                which: if keep == 0 { Which::Any } else { Which::None },
            },
            all,
        ))
    }
}

impl Rules for Permits {
    type Won = ();
    const FAMILY: Family = Family::Permits;
    const OWNED: bool = false;

    fn check(&self) -> Result<()> {
        if (1..=MAX_AT_ONCE).contains(&self.n) {
            return Ok(());
        }
        Err(Error::InvalidCount {
            count: self.n.into(),
            reason: "take 1 to 1000 at once",
        })
    }

    fn acquire<'a>(&'a self, ask: Ask<'a>) -> impl Step<Reply = Outcome> + 'a {
        rules::Acquire {
            place: &ask.hold.place,
            ids: &ask.hold.field,
            lease: ask.lease,
        }
    }

    fn inspect<'a>(&'a self, place: &'a Place) -> impl Step<Reply = Vec<Holder>> + 'a {
        rules::Inspect { place }
    }

    fn force<'a>(&'a self, place: &'a Place) -> impl Step<Reply = bool> + 'a {
        rules::Force { place }
    }

    /// Whoever acquires is known by the permits' ids, which are chosen here: so an acquisition that
    /// is sent twice takes them once.
    fn field(&self, _: &Place, _: &ClientId, _: Owner) -> String {
        let ids: Vec<_> = (0..self.n).map(|_| PermitId::random()).collect();
        join(&ids)
    }

    fn keeps_others_out(&self) -> bool {
        false
    }
}
