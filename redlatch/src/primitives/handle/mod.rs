//! What all locks have in common, written once: the handle, the ways to ask, the guard.
//!
//! A kind of lock brings its steps ([`Rules`]); what is done with them is the same for all.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::hold::{Hold, Kind};
use crate::lease::Lease;
use crate::name::{Family, Place};
use crate::owner::{ClientId, Owner};
use crate::session::Session;
use crate::step::{Outcome, Step};
use crate::store::{Lane, Sent};
use crate::wait::Queue;

mod guard;
mod held;
mod report;
mod request;

pub use guard::Guard;
pub(crate) use guard::run_while;
pub(crate) use held::Held;
pub(crate) use report::report;
pub(crate) use request::Request;
pub use request::{Acquire, TryAcquire};

/// What tells one kind of lock from another: a marker, and the settings of a handle.
///
/// The kinds are those of this crate; see [`Reentrant`] and what is listed below it.
#[expect(
    private_bounds,
    reason = "sealed: the rules of a kind are the crate's own"
)]
pub trait LockKind: Rules {}

impl<K: Rules> LockKind for K {}

/// The kind of [`Lock`] unless another is named: re-entrant, woken by messages (Redisson: `RLock`).
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Reentrant;

/// A kind whose holder is an [`Owner`], who may hold it several times: all but permits.
pub trait OwnedKind {}

/// The steps of one kind of lock, and how its waiters wait.
pub(crate) trait Rules: Kind + Sized + 'static {
    /// What comes with an acquisition: a fencing token, or nothing.
    type Won: Clone + Send + Sync + 'static;

    const FAMILY: Family;

    /// Whether an owner is somebody who can be named, and can hold it again.
    const OWNED: bool = true;

    /// Where to wait.
    const QUEUE: Queue = Queue::Exclusive;

    /// Takes it, or says how long somebody else may still have it.
    fn acquire<'a>(&'a self, ask: Ask<'a>) -> impl Step<Reply = Outcome<Self::Won>> + 'a;

    /// Who holds it.
    fn inspect<'a>(&'a self, place: &'a Place) -> impl Step<Reply = Vec<Holder>> + 'a;

    /// Takes it from whoever holds it; whether anybody did.
    fn force<'a>(&'a self, place: &'a Place) -> impl Step<Reply = bool> + 'a;

    /// Whether its settings can be used. Said at use, because making a handle cannot fail.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// The same for somebody who waits no longer than this, if that makes a difference.
    fn waiting_at_most(&self, wait: Duration) -> Option<Self> {
        let _ = wait;
        None
    }

    /// How an owner is written in the store.
    fn field(&self, place: &Place, client: &ClientId, owner: Owner) -> String {
        place.field(client.field(owner))
    }

    /// Where a waiter is called.
    fn channel<'a>(&self, hold: &'a Hold) -> &'a str {
        hold.place.channel()
    }

    /// How long to sleep before the next try, if that takes the place of being called.
    fn pause(&self, tries: u32) -> Option<Duration> {
        let _ = tries;
        None
    }

    /// Whether what was won keeps everybody else in the line out until word comes that it is over.
    /// Else the next one asks at once: it can be shared, or nobody says when it ends.
    fn keeps_others_out(&self) -> bool {
        matches!(Self::QUEUE, Queue::Exclusive) && self.pause(0).is_none()
    }

    /// How long the store remembers somebody who waits, if it does: then giving up is a step too.
    fn remembers_waiters(&self) -> Option<Lease> {
        None
    }
}

/// What an acquisition asks for.
#[derive(Clone, Copy)]
pub(crate) struct Ask<'a> {
    pub(crate) hold: &'a Hold,
    /// The hold count wanted, so that sent twice is the same as sent once.
    pub(crate) count: u32,
    pub(crate) lease: Lease,
    /// Whether it will be asked for again if it cannot be had now.
    pub(crate) waits: bool,
}

/// A lock that one owner at a time holds, over all processes that use the same store.
///
/// A handle is cheap, does nothing by itself, and can be cloned and shared. What it locks is the
/// *name*: two handles of one name are one lock, also in other processes, also in Java through
/// Redisson's `getLock(name)`.
///
/// Held locks are renewed by the client's watchdog until they are released; see [`Acquire::lease`]
/// for a lease that is not. Who waits is woken by a message of the store, not by polling, and
/// waiters of one client are served in order of arrival.
///
/// # When not to use it
///
/// Inside one process a [`tokio::sync::Mutex`] does the same at a thousandth of the cost. And a
/// lock with a lease is never proof: a holder that is stopped for longer than its lease can wake up
/// beside the next one. Ask [`Guard::is_valid`] before each write, or put the work into
/// [`Lock::run`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
/// let client = redlatch::Client::embedded(); // or Client::connect("redis://127.0.0.1").await?
/// let lock = client.lock("orders:42");
/// let guard = lock.lock().await?;
/// assert!(lock.try_lock().await?.is_none());
/// guard.unlock().await?;
/// # Ok(()) }
/// ```
pub struct Lock<K: LockKind = Reentrant> {
    pub(crate) session: Arc<Session>,
    pub(crate) place: Arc<Place>,
    pub(crate) kind: Arc<K>,
    pub(crate) reentrant: bool,
}

impl<K: LockKind> Lock<K> {
    pub(crate) fn new(session: Arc<Session>, name: &str, kind: K) -> Lock<K> {
        let place = Place::new(K::FAMILY, &session.prefix, name);
        Lock {
            session,
            place: Arc::new(place),
            kind: Arc::new(kind),
            reentrant: true,
        }
    }

    /// The same lock, asked for in another way.
    pub(crate) fn with_kind(mut self, kind: K) -> Lock<K> {
        self.kind = Arc::new(kind);
        self
    }

    /// The same lock for owners that must not re-enter it: an owner that holds it and asks again
    /// is told [`Error::AlreadyHeld`] at once instead of getting a second hold or waiting for
    /// itself (Redisson: the non-reentrant lock). Others see no difference.
    #[must_use]
    pub fn non_reentrant(mut self) -> Lock<K> {
        self.reentrant = false;
        self
    }

    /// The name, as it was given.
    pub fn name(&self) -> &str {
        self.place.name()
    }

    /// Waits for the lock as long as it takes. Await it, or set something first: [`Acquire`].
    pub fn lock(&self) -> Acquire<K> {
        Acquire {
            request: Request::new(self),
        }
    }

    /// Takes the lock if it is free: `None` if somebody else holds it. Await it, or set something
    /// first, such as how long to wait: [`TryAcquire`].
    pub fn try_lock(&self) -> TryAcquire<K> {
        TryAcquire::new(Request::new(self))
    }

    /// Waits for the lock, runs `work` while it is held, and releases it.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] as soon as the lock is lost: `work` is dropped then, at the await point
    /// where it stands. It is not polled again after the lease has ended, also when the process was
    /// stopped meanwhile. When the loss shows only at the release, `work` was done, but perhaps not
    /// alone. Otherwise the errors of [`Lock::lock`]; `work` was not begun then. A release that the
    /// store does not answer is no error: it goes on in the background.
    ///
    /// # Cancel safety
    ///
    /// When dropped, `work` is dropped and the lock released in the background.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// let answer = client.lock("a").run(async { 6 * 7 }).await?;
    /// assert_eq!(answer, 42);
    /// # Ok(()) }
    /// ```
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output> {
        let guard = self.lock().await?;
        let output = guard.run(work).await?;
        done(output, guard.unlock().await)
    }

    /// Whether anybody holds the lock.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidName`], [`Error::WrongKind`], [`Error::Unavailable`],
    /// [`Error::ResponseTimeout`]; so for all methods that only ask.
    pub async fn is_locked(&self) -> Result<bool> {
        Ok(self.holder().await?.is_some())
    }

    /// Whether `owner` holds the lock, through this client, as the store sees it.
    pub async fn is_held_by(&self, owner: Owner) -> Result<bool> {
        Ok(self.hold_count(owner).await? > 0)
    }

    /// How often `owner` holds the lock, through this client, as the store sees it. 0 if not at
    /// all.
    pub async fn hold_count(&self, owner: Owner) -> Result<u32> {
        let owner = self.session.id.field(owner);
        let holders = self.holders().await?;
        let mine = holders.iter().find(|holder| holder.owner == owner);
        Ok(mine.map_or(0, |holder| holder.holds))
    }

    /// How long the lock is held at most, unless it is renewed. `None`: nobody holds it.
    ///
    /// [`Duration::MAX`] for a key whose expiry somebody has removed.
    pub async fn remaining_lease(&self) -> Result<Option<Duration>> {
        let holder = self.holder().await?;
        Ok(holder.map(|holder| holder.remaining.unwrap_or(Duration::MAX)))
    }

    /// Who holds the lock, how often and for how long; `None` if nobody does. Of several readers
    /// the one that holds it longest.
    pub async fn holder(&self) -> Result<Option<Holder>> {
        let holders = self.holders().await?;
        let longest = |holder: &Holder| holder.remaining.unwrap_or(Duration::MAX);
        Ok(holders.into_iter().max_by_key(longest))
    }

    /// All who hold the lock: one, unless it is the read side of a read-write lock.
    pub async fn holders(&self) -> Result<Vec<Holder>> {
        let place = self.place()?;
        self.session.store.look(&self.kind.inspect(place)).await
    }

    /// Takes the lock from whoever holds it, in whatever process, and wakes a waiter. Whether
    /// anybody held it. The holder learns of it at its next renewal or release.
    ///
    /// Touches nothing but a lock: other data under the same key is an [`Error::WrongKind`].
    ///
    /// # Errors
    ///
    /// Those of [`Lock::is_locked`], and [`Error::OutcomeUnknown`]: the connection broke before the
    /// answer came. It is not asked again, because by then somebody else may hold the lock.
    ///
    /// # Cancel safety
    ///
    /// When dropped, it goes on in the background if it has begun.
    pub async fn force_unlock(&self) -> Result<bool> {
        let (kind, place) = (self.kind.clone(), self.place()?.clone());
        let store = self.session.store.clone();
        // Not repeated: the second time it would take the lock from the next one.
        let unlocked = self.session.finish(async move {
            let step = kind.force(&place);
            let (what, sent) = ("unlocking by force", Sent::default());
            let run = store.run_unrepeated(&step, what, Lane::First, Duration::ZERO, &sent);
            Ok(run.await?.reply)
        });
        let unlocked = unlocked.await?;
        if unlocked {
            tracing::info!(lock = self.name(), "unlocked by force");
        }
        Ok(unlocked)
    }

    /// The place, if its name can be used.
    pub(crate) fn place(&self) -> Result<&Arc<Place>> {
        self.place.check()?;
        Ok(&self.place)
    }
}

/// What work came to whose lock has been given back since: lost, if that shows only then. A release
/// that the store does not answer is no error; it goes on in the background.
pub(crate) fn done<T>(output: T, released: Result<()>) -> Result<T> {
    match released {
        Err(lost @ Error::Lost { .. }) => Err(lost),
        _ => Ok(output),
    }
}

impl<K: LockKind> Clone for Lock<K> {
    fn clone(&self) -> Lock<K> {
        Lock {
            session: self.session.clone(),
            place: self.place.clone(),
            kind: self.kind.clone(),
            reentrant: self.reentrant,
        }
    }
}

impl<K: LockKind> std::fmt::Debug for Lock<K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lock")
            .field("name", &self.name())
            .field("reentrant", &self.reentrant)
            .finish_non_exhaustive()
    }
}

/// Who holds a lock.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// `<client id>:<number>`: in redlatch the number of an [`Owner`], in Redisson a thread's id.
    pub owner: String,
    /// How often it holds the lock: more than 1 when re-entered.
    pub holds: u32,
    /// How long the store keeps the lock for it unless it is renewed. `None` for ever, because
    /// somebody removed the key's expiry.
    pub remaining: Option<Duration>,
}
