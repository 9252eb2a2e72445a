//! The fair lock (Redisson: `RFairLock`, `RedissonFairLock`): first come, first served, across all
//! clients. Its state is the lock's hash plus a queue of waiters; `rules` describes the algorithm.

#[cfg(test)]
pub(crate) mod differential;
#[cfg(test)]
pub(crate) mod exploration;
mod queue;
mod rules;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

pub(crate) use self::queue::{FairQueue, Turn};
pub(crate) use self::rules::{all_keys, serve_queue};
use crate::error::{Error, Result};
use crate::hold::{
    AcquireParams, Handoff, HandoffParams, Hold, HoldKind, ReleaseParams, Renewal, Renewed, Spec,
};
use crate::keyspace::Keyspace;
use crate::lease::{Lease, MAX_LEASE};
use crate::locks::reentrant::handoff::{self, handoff};
use crate::locks::reentrant::rules as reentrant;
use crate::locks::{HasMinimum, Holder, Lock, LockKind, OwnedKind};
use crate::metrics::Kind;
use crate::name::{FairKeys, ObjectKeys};
use crate::observe::inspect::{Waiter, inspect};
use crate::owner::Owner;
use crate::step::{Outcome, Step};

/// A lock that is acquired in the order of the requests, across all clients, in Rust and Java
/// (Redisson: `RedissonClient.getFairLock`).
///
/// A waiter that finds the lock held joins a queue in the store; a release wakes only the next
/// waiter. A plain [`try_lock`](Lock::try_lock) neither joins the queue nor overtakes it: it
/// returns `None` while others wait. The holder may re-enter
/// ([`Guard::reenter`](crate::Guard::reenter), [`Acquire::owner`](crate::Acquire::owner))
/// regardless of the queue.
///
/// A request that gives up, is dropped or fails leaves the queue in the background. Waiters that
/// died delay the others by one [grace period](Lock::grace_period) of 5 s in total. A waiter whose
/// process hangs while its connection stays open delays them by one lease, because a release grants
/// it the lock ([`ClientBuilder::fair_grants`](crate::ClientBuilder::fair_grants)); without grants
/// it keeps its turn until its [wait time](Lock::wait_time) has passed. All these times are measured
/// by the server's clock.
///
/// A fair lock and the [`Client::lock`](crate::Client::lock) of the same name are one lock in the
/// store: they exclude each other. But requests of the plain lock do not join the queue, and its
/// releases wake no waiter of the fair lock. A release of the fair lock wakes waiters of the plain
/// lock only if the queue is empty.
///
/// When not to use it: fairness costs throughput. At each turn the lock is idle while the next
/// waiter is woken, where an unfair lock would admit any request that arrives then. Each turn also
/// shifts the queue, which takes the server about a microsecond per waiter. Use it where some
/// waiters would otherwise starve.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
/// let client = redlatch::Client::embedded(); // or Client::connect("redis://127.0.0.1").await?
/// let lock = client.fair_lock("printer");
///
/// let first = lock.lock().await?;
/// let next = tokio::spawn(lock.lock().into_future());
/// while lock.queue().await?.is_empty() {
///     tokio::task::yield_now().await; // until the spawned request has joined the queue
/// }
/// first.unlock().await?;
/// assert!(lock.try_lock().await?.is_none(), "it is another waiter's turn");
/// # use std::future::IntoFuture;
/// next.await.unwrap()?.unlock().await
/// # }
/// ```
pub type FairLock = Lock<Fair>;

/// Makes a [`Lock`] a [`FairLock`], as its type parameter.
#[derive(Debug, Clone)]
pub struct Fair {
    keys: Arc<FairKeys>,
    times: FairTimes,
}

impl Fair {
    pub(crate) fn new(prefix: &str, name: &str) -> Fair {
        Fair::from_keys(Arc::new(FairKeys::new(prefix, name)))
    }

    pub(crate) fn from_keys(keys: Arc<FairKeys>) -> Fair {
        Fair {
            keys,
            times: FairTimes::default(),
        }
    }

    /// Returns the kind with these times, for tests of other kinds that use its steps.
    #[cfg(test)]
    pub(crate) fn with_times(self, wait_time: Duration, grace_period: Duration) -> Fair {
        let times = FairTimes {
            wait_time,
            grace_period,
        };
        Fair { times, ..self }
    }
}

impl OwnedKind for Fair {}
impl HasMinimum for Lock<Fair> {}

impl QueuedKind for Fair {}

impl HasTimes for Fair {
    fn times(&mut self) -> &mut FairTimes {
        &mut self.times
    }
}

/// A kind whose waiters queue in the store: fair locks, and both sides of a fair read-write lock.
#[expect(private_bounds, reason = "sealed")]
pub trait QueuedKind: LockKind + HasTimes {}

/// A kind with these settings.
pub(crate) trait HasTimes: Clone {
    fn times(&mut self) -> &mut FairTimes;
}

/// How long the store keeps a waiter.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FairTimes {
    pub(crate) wait_time: Duration,
    pub(crate) grace_period: Duration,
}

impl Default for FairTimes {
    fn default() -> FairTimes {
        FairTimes {
            wait_time: Duration::from_secs(300),
            grace_period: Duration::from_secs(5),
        }
    }
}

impl FairTimes {
    /// Converts a time setting for the scripts. `check` rejects settings out of range before a script
    /// runs, so clamping only avoids an error here. The fallback is never reached.
    fn clamped_lease(setting: Duration) -> Lease {
        let clamped = setting.clamp(Duration::from_millis(1), MAX_LEASE);
        Lease::new(clamped).unwrap_or(Lease::WATCHDOG)
    }

    pub(crate) fn grace(&self) -> Lease {
        FairTimes::clamped_lease(self.grace_period)
    }

    pub(crate) fn wait(&self) -> Lease {
        FairTimes::clamped_lease(self.wait_time)
    }

    /// See [`HoldKind::check`].
    pub(crate) fn check(&self) -> Result<()> {
        let settings = [
            ("wait_time", self.wait_time),
            ("grace_period", self.grace_period),
        ];
        for (setting, time) in settings {
            Lease::new(time).map_err(|_| Error::InvalidSetting {
                setting,
                reason: format!("{time:?} is out of range; use 1 ms to ten years"),
            })?;
        }
        Ok(())
    }

    /// See [`HoldKind::waiting_at_most`].
    pub(crate) fn waiting_at_most(&self, wait: Duration) -> Option<FairTimes> {
        let wait_time = wait.max(Duration::from_millis(1));
        (wait_time < self.wait_time).then_some(FairTimes { wait_time, ..*self })
    }
}

impl<K: QueuedKind> Lock<K> {
    /// Sets how long the lock is kept free for a waiter of this handle when its turn has come. All
    /// others wait that long for a waiter whose process hangs, unless it was granted the lock
    /// ([`ClientBuilder::fair_grants`](crate::ClientBuilder::fair_grants)). A waiter without a connection keeps
    /// its turn no longer than the [grace period](Lock::grace_period). Default 300 s, as in
    /// Redisson (`fairLockWaitTimeout`); 1 ms to [`MAX_LEASE`](crate::MAX_LEASE), truncated to
    /// whole milliseconds. Other values fail with [`Error::InvalidSetting`] when the lock is requested.
    ///
    /// If a request has a shorter wait limit ([`TryAcquire::wait`](crate::TryAcquire::wait)), that limit
    /// replaces this time.
    ///
    /// A short time causes polling: every waiter that is not next checks at this interval whether
    /// the waiters before it were dropped. With 10 ms, each of them sends a hundred requests a second.
    ///
    /// A waiter must be able to take its turn within this time. If its process is stopped or
    /// disconnected for longer, it loses its position and continues to wait at the end of the queue.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// let lock = client.fair_lock("printer").wait_time(Duration::from_secs(10));
    /// lock.lock().await?.unlock().await
    /// # }
    /// ```
    #[must_use]
    pub fn wait_time(self, wait_time: Duration) -> Lock<K> {
        let mut kind = (*self.kind).clone();
        kind.times().wait_time = wait_time;
        self.with_kind(kind)
    }

    /// Sets how long disconnected waiters keep their positions in the queue once the lock is free
    /// and it is the turn of one of them. Default 5 s; 1 ms to [`MAX_LEASE`](crate::MAX_LEASE),
    /// truncated to whole milliseconds. Other values fail with [`Error::InvalidSetting`] when the
    /// lock is requested.
    ///
    /// A waiter counts as connected while a connection subscribes to its channel. When the turn of
    /// a disconnected waiter comes, the grace period begins for all disconnected waiters at the
    /// same time. So all waiters that died together delay the others by one grace period, however
    /// many they are. A waiter that reconnects before its turn, or within the grace period, keeps
    /// its position. Choose a time that is long enough for clients to reconnect, also after a failover.
    ///
    /// Connected waiters do not depend on this time, whether they wait in Rust or in Java. No
    /// waiter keeps its turn longer than its [wait time](Lock::wait_time), which also applies if
    /// its process hangs while its connection stays open.
    ///
    /// The client whose release or attempt finds the waiters disconnected applies its own setting. Use
    /// the same value for all handles of a name.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// let lock = client.fair_lock("printer").grace_period(Duration::from_secs(2));
    /// lock.lock().await?.unlock().await
    /// # }
    /// ```
    #[must_use]
    pub fn grace_period(self, grace_period: Duration) -> Lock<K> {
        let mut kind = (*self.kind).clone();
        kind.times().grace_period = grace_period;
        self.with_kind(kind)
    }

    /// Returns the waiters for the lock in any process, the next one first. Omits waiters that
    /// have timed out.
    ///
    /// # Errors
    ///
    /// As [`Lock::is_locked`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// assert!(client.fair_lock("printer").queue().await?.is_empty());
    /// # Ok(()) }
    /// ```
    pub async fn queue(&self) -> Result<Vec<Waiter>> {
        let state = inspect(&self.session, self.valid_kind()?.object()).await?;
        Ok(state.map_or_else(Vec::new, |state| state.queue().to_vec()))
    }

    /// Returns the number of waiters before `owner`, which waits through this client: 0 if it is
    /// next. `None` if it does not wait, for example because it already holds the lock.
    ///
    /// # Errors
    ///
    /// As [`Lock::is_locked`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// let me = redlatch::Owner::new();
    /// assert_eq!(client.fair_lock("printer").position(me).await?, None);
    /// # Ok(()) }
    /// ```
    pub async fn position(&self, owner: Owner) -> Result<Option<usize>> {
        let owner = self.session.id.owner_id(owner);
        let queue = self.queue().await?;
        Ok(queue.iter().position(|waiter| waiter.owner == owner))
    }
}

impl HoldKind for Fair {
    fn object(&self) -> &Arc<ObjectKeys> {
        &self.keys.object
    }

    fn spec(&self) -> Spec {
        Spec {
            grants: true,
            ..Spec::of(Kind::FairLock)
        }
    }

    fn waiter_channel(&self, field: &str) -> Option<String> {
        Some(self.keys.waiter_channel(field))
    }

    fn renewal<'a>(&'a self, hold: &'a Hold) -> Renewal<'a> {
        Renewal::of_lock(rules::renew_script(), hold, hold.object.channel())
    }

    fn renew(&self, keyspace: &mut Keyspace, hold: &Hold, lease: Option<Lease>) -> Result<Renewed> {
        rules::renew(keyspace, &self.keys, hold, lease)
    }

    fn release<'a>(&'a self, params: ReleaseParams<'a>) -> Step<'a, bool> {
        rules::release(&self.keys, params, self.times.grace())
    }

    fn handoff<'a>(&'a self, params: HandoffParams<'a>) -> Option<Step<'a, Handoff>> {
        let variant = handoff::Variant {
            script: rules::handoff_script(),
            wakes: true,
            writer: false,
            tokens: None,
        };
        Some(handoff(params, variant, |keyspace, _| {
            FairQueue::new(keyspace, &self.keys).wake_waiting()
        }))
    }

    fn acquire<'a>(&'a self, params: AcquireParams<'a>) -> Step<'a, Outcome> {
        let turn = Turn {
            params,
            wait_time: self.times.wait(),
            grace: self.times.grace(),
        };
        rules::acquire(&self.keys, turn)
    }

    fn inspect(&self) -> Step<'_, Vec<Holder>> {
        reentrant::inspect(self.object())
    }

    fn force(&self) -> Step<'_, bool> {
        rules::force(&self.keys, self.times.grace())
    }

    fn check(&self) -> Result<()> {
        self.times.check()
    }

    fn waiting_at_most(&self, wait: Duration) -> Option<Fair> {
        let times = self.times.waiting_at_most(wait)?;
        Some(Fair {
            times,
            ..self.clone()
        })
    }

    fn erased_waiting_at_most(&self, wait: Duration) -> Option<Arc<dyn HoldKind>> {
        Some(Arc::new(self.waiting_at_most(wait)?))
    }

    fn waiter_ttl(&self) -> Option<Lease> {
        Some(self.times.wait())
    }
}
