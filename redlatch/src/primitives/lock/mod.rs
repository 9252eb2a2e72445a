//! The re-entrant lock (Redisson: `RLock`, `RedissonLock`).

use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tracing::Instrument as _;

use self::rules::{Force, Inspect, LOCK, Seen};
use crate::error::{Error, Result};
use crate::lease::{Lease, Patience};
use crate::name::Place;
use crate::owner::Owner;
use crate::session::{Claim, Session, Terms};
use crate::step::Outcome;
use crate::wait::Attempt;

#[cfg(test)]
mod differential;
mod guard;
pub(crate) mod rules;

pub use guard::Guard;

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
#[derive(Clone)]
pub struct Lock {
    session: Arc<Session>,
    place: Arc<Place>,
    reentrant: bool,
}

impl Lock {
    pub(crate) fn new(session: Arc<Session>, name: &str) -> Lock {
        let place = Place::lock(&session.prefix, name);
        Lock {
            session,
            place: Arc::new(place),
            reentrant: true,
        }
    }

    /// The handle through which something was claimed.
    fn of(claim: &Claim, terms: Terms) -> Lock {
        Lock {
            session: claim.session.clone(),
            place: claim.hold.place.clone(),
            reentrant: terms.reentrant,
        }
    }

    /// The same lock for owners that must not re-enter it: an owner that holds it and asks again
    /// is told [`Error::AlreadyHeld`] at once instead of getting a second hold or waiting for
    /// itself (Redisson: the non-reentrant lock). Others see no difference.
    #[must_use]
    pub fn non_reentrant(mut self) -> Lock {
        self.reentrant = false;
        self
    }

    /// The name, as it was given.
    pub fn name(&self) -> &str {
        self.place.name()
    }

    /// Waits for the lock as long as it takes. Await it, or set something first: [`Acquire`].
    pub fn lock(&self) -> Acquire {
        Acquire {
            request: self.request(),
        }
    }

    /// Takes the lock if it is free: `None` if somebody else holds it. Await it, or set something
    /// first, such as how long to wait: [`TryAcquire`].
    pub fn try_lock(&self) -> TryAcquire {
        TryAcquire {
            request: self.request(),
            patience: Patience::None,
        }
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
        match guard.unlock().await {
            Err(lost @ Error::Lost { .. }) => Err(lost),
            _ => Ok(output),
        }
    }

    /// Whether anybody holds the lock.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidName`], [`Error::NotALock`], [`Error::Unavailable`],
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
        let field = self.session.id.field(owner);
        Ok(match self.holder().await? {
            Some(holder) if holder.owner == field => holder.holds,
            _ => 0,
        })
    }

    /// How long the lock is held at most, unless it is renewed. `None`: nobody holds it.
    ///
    /// [`Duration::MAX`] for a key whose expiry somebody has removed.
    pub async fn remaining_lease(&self) -> Result<Option<Duration>> {
        let holder = self.holder().await?;
        Ok(holder.map(|holder| holder.remaining.unwrap_or(Duration::MAX)))
    }

    /// Who holds the lock, how often and for how long; `None` if nobody does.
    pub async fn holder(&self) -> Result<Option<Holder>> {
        let place = self.place()?;
        let keys = [place.key()];
        let step = Inspect { keys: &keys };
        let seen = self.session.store.look(&step).await?;
        match seen.into_iter().next() {
            Some(Seen::Held(holder)) => Ok(Some(holder)),
            Some(Seen::NotALock(reason)) => Err(rules::not_a_lock(place, reason)),
            Some(Seen::Free) | None => Ok(None),
        }
    }

    /// Takes the lock from whoever holds it, in whatever process, and wakes a waiter. Whether
    /// anybody held it. The holder learns of it at its next renewal or release.
    ///
    /// Touches nothing but a lock: other data under the same key is an [`Error::NotALock`].
    pub async fn force_unlock(&self) -> Result<bool> {
        let place = self.place()?;
        let step = Force { place };
        let unlocked = self.session.store.look(&step).await?;
        if unlocked {
            tracing::info!(lock = place.name(), "unlocked by force");
        }
        Ok(unlocked)
    }

    fn request(&self) -> Request {
        Request {
            lock: self.clone(),
            lease: None,
            owner: None,
            again: None,
        }
    }

    /// The place, if its name can be used.
    fn place(&self) -> Result<&Arc<Place>> {
        self.place.check()?;
        Ok(&self.place)
    }
}

impl std::fmt::Debug for Lock {
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

/// What both ways to acquire have in common.
struct Request {
    lock: Lock,
    lease: Option<Duration>,
    owner: Option<Owner>,
    /// The hold to enter once more, when asked through a guard.
    again: Option<Claim>,
}

/// Waits for a lock when awaited: [`Lock::lock`].
///
/// # Errors
///
/// [`Error::InvalidName`], [`Error::InvalidLease`], [`Error::NotALock`], [`Error::AlreadyHeld`],
/// [`Error::Unavailable`], [`Error::ResponseTimeout`], [`Error::Lost`] (the answer came after the
/// lease that it granted had ended, or the hold that was to be entered again had been lost), and
/// [`Error::NoRuntime`].
///
/// # Cancel safety
///
/// May be dropped at any point. It leaves the line at once, and what may have been won meanwhile is
/// given back in the background; at worst (the store could not be reached any more) a lease remains
/// that nobody renews. But once polled it has to be polled on or dropped, as with any fair lock: one
/// that is kept and not polled keeps its place in the line.
#[must_use = "nothing is acquired until this is awaited"]
pub struct Acquire {
    request: Request,
}

/// Takes a lock, or gives up, when awaited: [`Lock::try_lock`].
///
/// Errors and cancel safety are those of [`Acquire`].
#[must_use = "nothing is acquired until this is awaited"]
pub struct TryAcquire {
    request: Request,
    patience: Patience,
}

/// A boxed future, so that requests can be awaited directly.
type Boxed<T> = Pin<Box<dyn Future<Output = T> + Send>>;

impl Acquire {
    /// Holds the lock for exactly this long, if it is not released before: the watchdog does not
    /// renew it, and it counts as lost when the time has passed. 1 ms to
    /// [`MAX_LEASE`](crate::MAX_LEASE), cut to whole milliseconds.
    ///
    /// An owner that re-enters never brings the end of its own lease nearer; while it holds several
    /// leases, the longest counts for all.
    pub fn lease(mut self, lease: Duration) -> Acquire {
        self.request.lease = Some(lease);
        self
    }

    /// Acquires for this owner, which re-enters what it holds already.
    pub fn owner(mut self, owner: Owner) -> Acquire {
        self.request.owner = Some(owner);
        self.request.again = None;
        self
    }

    /// Enters a hold once more.
    fn again(mut self, claim: Claim) -> Acquire {
        self.request.again = Some(claim);
        self
    }
}

impl TryAcquire {
    /// Waits at most this long if somebody else holds the lock. A step that was begun by then is
    /// waited for, at most the client's response timeout longer (and for its turn to be sent, when
    /// more than 512 attempts of one client are on their way). A time that the clock cannot hold is
    /// for ever.
    pub fn wait(mut self, wait: Duration) -> TryAcquire {
        self.patience = Patience::at_most(wait);
        self
    }

    /// As [`Acquire::lease`].
    pub fn lease(mut self, lease: Duration) -> TryAcquire {
        self.request.lease = Some(lease);
        self
    }

    /// As [`Acquire::owner`].
    pub fn owner(mut self, owner: Owner) -> TryAcquire {
        self.request.owner = Some(owner);
        self
    }
}

impl IntoFuture for Acquire {
    type Output = Result<Guard>;
    type IntoFuture = Boxed<Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            // Endless patience does not come back without: the loop says so to the compiler.
            loop {
                if let Some(guard) = self.request.obtain(Patience::Endless).await? {
                    return Ok(guard);
                }
            }
        })
    }
}

impl IntoFuture for TryAcquire {
    type Output = Result<Option<Guard>>;
    type IntoFuture = Boxed<Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move { self.request.obtain(self.patience).await })
    }
}

impl Request {
    async fn obtain(&self, patience: Patience) -> Result<Option<Guard>> {
        let session = &self.lock.session;
        session.background.bind()?;
        let place = self.lock.place()?;
        let terms = Terms {
            lease: match self.lease {
                Some(lease) => Lease::new(lease)?,
                None => session.watchdog.lease(),
            },
            renewed: self.lease.is_none(),
            reentrant: self.lock.reentrant,
        };
        if let Some(claim) = &self.again {
            let won = self.obtain_claimed(claim.clone(), terms, patience, true);
            return won.await;
        }
        let named = self.owner.or_else(Owner::of_scope);
        loop {
            let claim = session.claim(place, named.unwrap_or_else(Owner::new), &LOCK);
            let hold = claim.hold.clone();
            let won = self.obtain_claimed(claim, terms, patience, named.is_some());
            match won.await {
                // What the owner held until now was lost on the way: it starts anew.
                Err(Error::Lost { .. }) if named.is_some() && hold.loss().is_some() => {}
                done => return done,
            }
        }
    }

    /// `known`: the owner is one that others may know, and acquire for at the same time.
    async fn obtain_claimed(
        &self,
        claim: Claim,
        terms: Terms,
        patience: Patience,
        known: bool,
    ) -> Result<Option<Guard>> {
        let (lock, owner) = (self.lock.name(), &claim.hold.field);
        let span = tracing::debug_span!("acquire", lock, %owner);
        let obtaining = async {
            let won = obtain(&claim, terms, patience, known).await?;
            if won {
                tracing::debug!(holds = claim.hold.count(), "acquired");
            } else {
                tracing::debug!("not obtained");
            }
            Ok(won)
        };
        let won = obtaining.instrument(span).await?;
        Ok(won.then(|| Guard::new(claim, terms)))
    }
}

/// Obtains what is claimed, by waiting or by re-entering.
async fn obtain(claim: &Claim, terms: Terms, patience: Patience, known: bool) -> Result<bool> {
    let hold = &claim.hold;
    let mut entry = Entry { claim, terms };
    let waiting = &claim.session.waiting;
    if !known {
        return waiting.obtain(&mut entry, patience).await;
    }
    loop {
        if hold.count() > 0 || hold.loss().is_some() {
            // Held by this owner: those in line wait for it, so it must not wait behind them.
            return Ok(enter(claim, terms, false).await? == Outcome::Done);
        }
        tokio::select! {
            biased;
            // The same owner has got it by another acquisition: there is nothing to wait for.
            () = hold.entered() => {}
            won = waiting.obtain(&mut entry, patience) => return won,
        }
    }
}

async fn enter(claim: &Claim, terms: Terms, subscribe: bool) -> Result<Outcome> {
    let step = |hold, count| rules::Acquire::new(hold, count, terms.lease);
    claim.enter(terms, subscribe, step).await
}

/// The lock's attempt, for the waiting room.
struct Entry<'a> {
    claim: &'a Claim,
    terms: Terms,
}

impl Attempt for Entry<'_> {
    fn channel(&self) -> &str {
        self.claim.hold.place.channel()
    }

    async fn ask(&mut self, subscribe: bool) -> Result<Outcome> {
        enter(self.claim, self.terms, subscribe).await
    }

    fn lease(&self) -> Duration {
        self.terms.lease.duration()
    }
}
