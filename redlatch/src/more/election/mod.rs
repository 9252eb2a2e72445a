//! Leader election: of the candidates in any process, one leads at a time, for a term with a number
//! of its own.
//!
//! An election is the fair lock of its name, with the fencing token of the fenced lock of its name
//! as the epoch, plus the latest term. The token and the term never expire. `rules` describes the
//! steps.
//!
//! Invariants, and what must not happen:
//!
//! - *At most one leadership is valid at a time.* It is a hold of the lock: its lease counts from
//!   before the request was sent, and it is lost for good when that ends. Nothing else makes it
//!   valid.
//! - *Epochs only grow, and no two leaderships have the same.* The lock and the epoch change in one
//!   step. A repeated step of an owner that already leads does not count, and each campaign has a
//!   new owner, also in a scope. The epoch and the term have their own keys, so they outlive all
//!   keys of the lock. Mutant `epoch-not-incremented`.
//! - *An epoch that was advanced is not issued again.* There is one counter for tokens and epochs,
//!   so no command can advance another one than the next term takes. The next epoch is greater than
//!   the counter and than the epoch of the latest term: one of them may be missing. The term of the
//!   current leader does not change: its epoch is what it has told the resource.
//! - *No holder without a term.* The step that acquires the lock begins the term. Turns are
//!   requested and never granted: a grant would write a hold without a term.
//! - *No value of a former leader replaces that of a later one.* `proclaim` checks the lock and the
//!   leader in the step that writes. A value that is delayed on a broken connection has a smaller
//!   revision than those sent after it.
//! - *No leader is reported whose lock is gone.* `Read` checks the lock. The term alone says
//!   nothing. Mutant `ended-term-is-reported`.
//! - *The last report of an observer is the final state.* Each call reads the term behind a
//!   subscription. Each change publishes on that channel, also a release that wakes only the next
//!   candidate, which may be dead. A broken connection counts as a message, and the end of a lease,
//!   which no step publishes, is known. Mutant `term-publishes-nothing`.
//! - *No observer waits for another one to read.* Each has a queue of its own (`observer`).
//! - *No candidate that hangs blocks the others.* Its turn counts from the release, and lasts as
//!   long as the lease, at least [`MIN_TURN`].

#[cfg(test)]
mod differential;
mod observer;
mod rules;
#[cfg(test)]
mod tests;

use std::future::{Future, IntoFuture};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

pub use self::observer::Observer;
use crate::error::Result;
use crate::hold::{AcquireParams, Hold, HoldKind, ReleaseParams, Renewal, Renewed, Spec};
use crate::join::Boxed;
use crate::keyspace::Keyspace;
use crate::lease::Lease;
use crate::locks::fair::{Fair, FairLock};
use crate::locks::fenced::{Fenced, FencedLock};
use crate::locks::{self, Guard, Holder, Lock, OwnedKind};
use crate::metrics::Kind;
use crate::more::revocation::Revocable;
use crate::name::{ElectionKeys, ObjectKeys};
use crate::observe::inspect::Waiter;
use crate::owner::{Owner, OwnerId};
use crate::session::Session;
use crate::step::{Outcome, Step};

/// Shortest time for which a candidate keeps its turn: with a very short lease it could not take it on a busy machine.
const MIN_TURN: Duration = Duration::from_secs(5);

/// An election: of all candidates, in any process, one leads at a time ([`Client::election`](crate::Client::election)).
///
/// [`campaign`](Election::campaign) waits until this candidate leads. Its [`Leadership`] is held like a lock: the watchdog
/// renews it, and it ends when it is resigned, dropped or lost. Candidates lead in the order in which they campaigned.
/// [`observe`](Election::observe) and [`leader`](Election::leader) need no candidate: each leader has a value for
/// them, such as its address.
///
/// The interface is that of etcd's `concurrency.Election`. Redisson has no election.
///
/// # Fencing
///
/// No election guarantees that a former leader has stopped: a process that is stopped for longer than its lease can resume
/// while the next one leads. The [`epoch`](Leadership::epoch) is a *fencing token*: a number greater than those of all
/// earlier leaderships. Send it with each request to a resource that rejects a smaller one than it has seen, as for a
/// [`FencedLock`](crate::FencedLock). Run the work in [`Leadership::run`], which ends it when the leadership is lost.
///
/// # When a leader dies
///
/// The next candidate leads when the lease of the dead leader ends
/// ([`ClientBuilder::watchdog_lease`](crate::ClientBuilder::watchdog_lease), default 30 s). Candidates that died before their turn delay the others by 5 s in
/// total; one whose process hangs while its connection stays open, by one lease, at least 5 s. A leader that resigns, is
/// dropped or ends its program in order is succeeded within a round trip.
///
/// # Keys
///
/// The election `name` is the [`FairLock`] of the same name, so `redlatch show` and
/// [`Client::inspect`](crate::Client::inspect) show its leader and candidates. Do not use that lock otherwise: its holder
/// excludes the candidates, but leads no term. Epochs are counted as the tokens of the [`FencedLock`](crate::FencedLock) `name`,
/// and the latest term is in the key `redlatch_election:{name}`. Neither key expires.
///
/// # After lost data
///
/// If the keys are lost (a restart without persistence, a failover to a replica that missed them), epochs count from 1 again, and
/// a resource that remembers a greater one rejects every leader. Call [`advance_epoch`](Election::advance_epoch) with the greatest
/// epoch that the resource has seen. [`ClientBuilder::replica_sync`](crate::ClientBuilder::replica_sync) avoids the loss.
///
/// # When not to use it
///
/// If work must merely not run twice at the same time, a [`Lock`] is enough. If several leaders at a time are fine, use an
/// [`ExpirableSemaphore`](crate::ExpirableSemaphore).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
/// let client = redlatch::Client::embedded(); // or Client::connect("redis://127.0.0.1").await?
/// let election = client.election("scheduler");
/// let mut observer = election.observe();
/// assert_eq!(observer.next().await?, None);
///
/// let leadership = election.campaign("10.0.0.7:8080").await?;
/// let leader = observer.next().await?.expect("a leader");
/// assert_eq!((leader.epoch, &*leader.value), (leadership.epoch(), "10.0.0.7:8080"));
///
/// let sum = leadership.run(async { 6 * 7 }).await?; // an error as soon as the leadership is lost
/// leadership.resign().await?;
/// assert_eq!(observer.next().await?, None);
/// # assert_eq!(sum, 42);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Election {
    session: Arc<Session>,
    keys: Arc<ElectionKeys>,
}

/// The leader of an election.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Leader {
    /// The number of its term: greater than those of all earlier leaders.
    pub epoch: u64,
    /// Its id as a candidate: [`Leadership::owner_id`].
    pub owner: OwnerId,
    /// The value with which it campaigned, or which it proclaimed last.
    pub value: String,
}

impl Election {
    pub(crate) fn new(session: Arc<Session>, name: &str) -> Election {
        Election {
            keys: Arc::new(ElectionKeys::new(&session.prefix, name)),
            session,
        }
    }

    /// Returns the name as it was passed in.
    pub fn name(&self) -> &str {
        self.keys.fair.object.name()
    }

    /// Joins the candidates, and waits until this one leads. Await the request, or configure it first: [`Campaign`]. Each
    /// campaign is a candidate of its own. `value` is for observers; it is sent with each attempt, so keep it short.
    pub fn campaign(&self, value: impl Into<String>) -> Campaign {
        let owner = Owner::new();
        let lease = self.session.watchdog.lease().duration();
        let fair = Fair::from_keys(self.keys.fair.clone());
        let elected = Elected {
            // As long as a dead leader delays the others.
            fair: fair.waiting_at_most(lease.max(MIN_TURN)).unwrap_or(fair),
            keys: self.keys.clone(),
            value: value.into(),
            successor: OnceLock::new(),
        };
        Campaign {
            owner_id: self.session.id.owner_id(owner),
            request: Lock::from_kind(self.session.clone(), elected)
                .lock()
                .owner(owner),
        }
    }

    /// Returns the current leader, or `None` if there is none.
    ///
    /// The answer may be out of date when it arrives. Only the [`Leadership`] itself knows whether it is valid.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidName`](crate::Error::InvalidName), [`Error::WrongKind`](crate::Error::WrongKind),
    /// [`Error::Unavailable`](crate::Error::Unavailable), [`Error::ResponseTimeout`](crate::Error::ResponseTimeout).
    pub async fn leader(&self) -> Result<Option<Leader>> {
        self.keys.fair.object.check()?;
        let step = rules::read(&self.keys);
        let read = self.session.store.run_idempotent(&step).await?;
        Ok(read.map(|(leader, _)| leader))
    }

    /// Raises the epoch to at least `at_least`, so that the next leader gets a greater one. Never lowers it. Returns the resulting
    /// epoch; with `at_least` 0 this is the latest one, or 0 if there was no leader yet.
    ///
    /// For a store that has lost its data, see [`Election`](Election#after-lost-data). A current leader keeps its epoch: resign or
    /// depose it to get a leader with a greater one. Calling it twice has the effect of calling it once.
    ///
    /// Errors and cancel safety are those of [`FencedLock::advance_token`](crate::Lock::advance_token), which does the same.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// let election = client.election("scheduler");
    /// assert_eq!(election.advance_epoch(7000).await?, 7000); // the greatest epoch that the resource has seen
    /// assert_eq!(election.campaign("10.0.0.7:8080").await?.epoch(), 7001);
    /// # Ok(()) }
    /// ```
    pub async fn advance_epoch(&self, at_least: u64) -> Result<u64> {
        let fenced = Fenced::new(&self.session.prefix, self.name());
        FencedLock::from_kind(self.session.clone(), fenced)
            .advance_token(at_least)
            .await
    }

    /// Returns the changes of the leader, starting with the current one: [`Observer`]. Sends nothing.
    pub fn observe(&self) -> Observer {
        Observer::new(self.clone())
    }

    /// Returns the candidates that wait for their turn, the next one first.
    ///
    /// # Errors
    ///
    /// As [`Election::leader`].
    pub async fn candidates(&self) -> Result<Vec<Waiter>> {
        self.fair_lock().queue().await
    }

    /// Asks the leader to resign, in any process. Returns the candidate that was asked; `None`: there is no leader. The leader
    /// decides: its [`Leadership::asked`] completes. All else is as for [`Lock::ask`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// let election = client.election("scheduler");
    /// let leadership = election.campaign("10.0.0.7:8080").await?;
    /// let asked = election.ask().await?; // in another process
    /// assert_eq!(asked.as_ref(), Some(leadership.owner_id()));
    /// leadership.asked().await;
    /// leadership.resign().await
    /// # }
    /// ```
    pub async fn ask(&self) -> Result<Option<OwnerId>> {
        self.fair_lock().ask().await
    }

    /// Asks the leader to resign as [`Election::ask`] does. If it has not by the end of `limit`, its leadership is lost:
    /// [`Lock::revoke`].
    pub async fn revoke(&self, limit: Duration) -> Result<Option<OwnerId>> {
        self.fair_lock().revoke(limit).await
    }

    /// Waits until a candidate, mostly the result of [`Election::ask`], does not lead, at most this long: [`Lock::released_by`].
    pub async fn released_by(&self, owner: OwnerId, wait: Duration) -> Result<bool> {
        self.fair_lock().released_by(owner, wait).await
    }

    /// Returns the fair lock with the same name. Its holder is the leader.
    fn fair_lock(&self) -> FairLock {
        let fair = Fair::from_keys(self.keys.fair.clone());
        FairLock::from_kind(self.session.clone(), fair)
    }
}

impl std::fmt::Debug for Election {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Election")
            .field("name", &self.name())
            .finish_non_exhaustive()
    }
}

/// Waits until this candidate leads when awaited: [`Election::campaign`].
///
/// Errors and cancel safety are those of [`Acquire`](crate::Acquire): if it is dropped, the candidate leaves the queue, and a
/// leadership that it acquired meanwhile is resigned in the background.
#[must_use = "there is no candidate until this is awaited"]
#[derive(Debug)]
pub struct Campaign {
    owner_id: OwnerId,
    request: locks::Acquire<Lock<Elected>>,
}

impl Campaign {
    /// Returns the id of this candidate: among [`candidates`](Election::candidates), and as [`Leader::owner`].
    pub fn owner_id(&self) -> &OwnerId {
        &self.owner_id
    }

    /// Waits through an outage of the store that lasts at most this long; `None`: through any. As
    /// [`Acquire::outage_limit`](crate::Acquire::outage_limit).
    pub fn outage_limit(mut self, limit: impl Into<Option<Duration>>) -> Campaign {
        self.request = self.request.outage_limit(limit);
        self
    }

    /// Adds a text for people, which `redlatch show` finds: [`Acquire::note`](crate::Acquire::note).
    pub fn note(mut self, note: impl Into<String>) -> Campaign {
        self.request = self.request.note(note);
        self
    }
}

impl IntoFuture for Campaign {
    type Output = Result<Leadership>;
    type IntoFuture = Boxed<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            Ok(Leadership {
                guard: self.request.await?,
                owner_id: self.owner_id,
                revision: AtomicI64::new(0),
            })
        })
    }
}

/// The term of a leader. Dropping it resigns in the background, as dropping a [`Guard`] releases it.
#[must_use = "it is resigned as soon as it is dropped"]
#[derive(Debug)]
pub struct Leadership {
    guard: Guard<Lock<Elected>>,
    owner_id: OwnerId,
    /// Number of values proclaimed.
    revision: AtomicI64,
}

impl Leadership {
    /// Returns the number of this term, a fencing token: greater than those of all earlier leaderships of the election.
    pub fn epoch(&self) -> u64 {
        self.guard.held.token
    }

    /// Returns the id of the leader: [`Campaign::owner_id`].
    pub fn owner_id(&self) -> &OwnerId {
        &self.owner_id
    }

    /// Returns whether this certainly leads: [`Guard::is_valid`]. Once `false`, it stays `false`.
    pub fn is_valid(&self) -> bool {
        self.guard.is_valid()
    }

    /// Returns how long this certainly leads without a renewal. Zero if the leadership was lost.
    pub fn valid_for(&self) -> Duration {
        self.guard.valid_for()
    }

    /// Completes when the leadership is lost: the store reported it, or the lease ended without a successful renewal. Never
    /// completes if it is resigned first.
    ///
    /// # Cancel safety
    ///
    /// Can be dropped and called again at any time.
    pub fn lost(&self) -> impl Future<Output = ()> + Send + 'static + use<> {
        self.guard.lost()
    }

    /// Completes when another client asks the leader to resign ([`Election::ask`]), also as the holder of a fair
    /// lock with the election's name. Otherwise as [`Guard::asked`].
    ///
    /// # Cancel safety
    ///
    /// Can be dropped and called again at any time.
    pub fn asked(&self) -> impl Future<Output = ()> + Send + 'static + use<> {
        self.guard.asked()
    }

    /// Runs `work` while this leads, until another client asks the leader to resign. Then `work` is dropped at its current await point.
    /// `None`: it was asked. It leads on until it resigns. Otherwise as [`Leadership::run`].
    pub async fn run_until_asked<F: Future>(&self, work: F) -> Result<Option<F::Output>> {
        self.guard.run_until_asked(work).await
    }

    /// Runs `work` while this leads. The leadership continues afterwards.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`](crate::Error::Lost) as soon as it is lost; `work` is then dropped and never polled after the lease has ended.
    ///
    /// # Cancel safety
    ///
    /// When dropped, it drops `work`.
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output> {
        self.guard.run(work).await
    }

    /// Replaces the value that observers see. The epoch stays the same.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`](crate::Error::Lost): this does not lead any more, and nothing was changed. [`Error::Unavailable`](crate::Error::Unavailable),
    /// [`Error::ResponseTimeout`](crate::Error::ResponseTimeout): there was no answer; observers may see either value until the next one is
    /// proclaimed.
    ///
    /// # Cancel safety
    ///
    /// If it is dropped, observers may see either value. It never replaces the value of a later call. The order of the
    /// calls counts, not the order in which they are awaited.
    pub fn proclaim(
        &self,
        value: impl Into<String>,
    ) -> impl Future<Output = Result<()>> + Send + 'static {
        let kind = self.guard.handle().kind;
        let hold_ref = self.guard.hold_ref().clone();
        let revision = self.revision.fetch_add(1, Ordering::Relaxed) + 1;
        let value = value.into();
        async move {
            let hold = &hold_ref.hold;
            if let Some(loss) = hold.loss() {
                return Err(hold.lost_error(loss));
            }
            let step = rules::proclaim(&kind.keys, &hold.field, revision, &value);
            if hold_ref.session.store.run_idempotent(&step).await? {
                return Ok(());
            }
            hold_ref.session.watchdog.report_missing(hold);
            Err(hold.not_held_error())
        }
    }

    /// Ends the leadership, and waits until the store has confirmed it. The next candidate leads.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`](crate::Error::Lost): it had ended before, so another candidate may have led meanwhile. Otherwise as [`Guard::unlock`].
    ///
    /// # Cancel safety
    ///
    /// When dropped, the leadership is resigned in the background.
    pub async fn resign(self) -> Result<()> {
        self.guard.unlock().await
    }

    /// Ends the leadership in favor of a candidate, which becomes the next leader before all others that wait. If it does not
    /// wait any more, the next candidate leads, as after [`resign`](Leadership::resign); errors and cancel safety
    /// are the same, too. [`Election::candidates`] lists the candidates.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// # use std::future::IntoFuture;
    /// let election = client.election("scheduler");
    /// let leadership = election.campaign("first").await?;
    /// let candidates = ["second", "third"].map(|value| election.campaign(value));
    /// let third = candidates[1].owner_id().clone();
    /// # let [second, next] = candidates.map(|campaign| tokio::spawn(campaign.into_future()));
    /// # while election.candidates().await?.len() < 2 { tokio::task::yield_now().await; }
    /// // Once both wait for their turn:
    /// leadership.resign_to(&third).await?;
    /// # let next = next.await.unwrap()?;
    /// assert_eq!(election.leader().await?.map(|leader| leader.owner), Some(third));
    /// # next.resign().await?;
    /// # second.await.unwrap()?.resign().await
    /// # }
    /// ```
    pub async fn resign_to(self, candidate: &OwnerId) -> Result<()> {
        let kind = self.guard.handle().kind;
        // It is set once: this consumes the leadership.
        let _ = kind.successor.set(candidate.clone());
        self.resign().await
    }
}

/// The kind of an election's lock, as one campaign uses it.
#[derive(Debug)]
pub(crate) struct Elected {
    fair: Fair,
    keys: Arc<ElectionKeys>,
    value: String,
    /// The candidate to which the leader resigns.
    successor: OnceLock<OwnerId>,
}

impl OwnedKind for Elected {}
impl Revocable for Elected {}

impl HoldKind for Elected {
    fn object(&self) -> &Arc<ObjectKeys> {
        self.fair.object()
    }

    fn spec(&self) -> Spec {
        Spec::of(Kind::Election)
    }

    fn waiter_channel(&self, field: &str) -> Option<String> {
        self.fair.waiter_channel(field)
    }

    fn renewal<'a>(&'a self, hold: &'a Hold) -> Renewal<'a> {
        self.fair.renewal(hold)
    }

    fn renew(&self, keyspace: &mut Keyspace, hold: &Hold, lease: Option<Lease>) -> Result<Renewed> {
        self.fair.renew(keyspace, hold, lease)
    }

    fn release<'a>(&'a self, params: ReleaseParams<'a>) -> Step<'a, bool> {
        let successor = self.successor.get().map(OwnerId::as_str);
        let turn = self.fair.waiter_ttl().unwrap_or(Lease::WATCHDOG);
        let lock = self.fair.release(params);
        rules::release(lock, params, &self.keys, successor, turn)
    }

    fn acquire<'a>(&'a self, params: AcquireParams<'a>) -> Step<'a, Outcome> {
        rules::acquire(
            self.fair.acquire(params),
            params.hold,
            &self.keys,
            &self.value,
        )
    }

    fn inspect(&self) -> Step<'_, Vec<Holder>> {
        self.fair.inspect()
    }

    fn force(&self) -> Step<'_, bool> {
        self.fair.force()
    }

    fn waiter_ttl(&self) -> Option<Lease> {
        self.fair.waiter_ttl()
    }
}
