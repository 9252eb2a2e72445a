//! The fair lock (Redisson: `RFairLock`, `RedissonFairLock`): first come, first served, over all
//! clients. The lock's hash, and beside it a queue of those who wait.

#[cfg(test)]
mod differential;
#[cfg(test)]
mod exploration;
mod queue;
mod rules;

use std::time::Duration;

use tokio::time::Instant;

use self::rules::{Acquire, Force, Release, Waiting};
use crate::error::{Error, Result};
use crate::hold::{Hold, Kind};
use crate::lease::{Lease, MAX_LEASE};
use crate::name::{Family, Place};
use crate::owner::Owner;
use crate::primitives::handle::{Ask, Holder, Lock, OwnedKind, Reentrant, Rules};
use crate::space::Space;
use crate::step::{BoxedStep, Outcome, Script, Step};

/// A lock that is had in the order in which it was asked for, over all clients, in Rust and Java
/// (Redisson: `RedissonClient.getFairLock`).
///
/// Who finds it held joins a queue in the store; a release wakes only the next one. A plain
/// [`try_lock`](Lock::try_lock) does not join the queue, and does not overtake it either: it gets
/// nothing while others wait. The holder may enter again ([`Guard::reenter`](crate::Guard::reenter),
/// [`Acquire::owner`](crate::Acquire::owner)) past the queue.
///
/// Whoever gives up, is dropped or gets an error leaves the queue, in the background if the store
/// cannot be reached. Waiters that died delay the others by one [grace period](Lock::grace_period) of 5 s
/// in all. A waiter whose process hangs while its connection stays open is waited for until its
/// [wait time](Lock::wait_time) has passed. All of this goes by the server's clock.
///
/// The lock itself is the same as that of [`Client::lock`](crate::Client::lock): both exclude each
/// other. But who comes through that handle does not queue, and its release calls nobody here. A
/// release here calls those who wait there when nobody is left in the queue.
///
/// When not to use it: being fair costs. The lock is idle while the next one is called, with each
/// turn, where an unfair lock would let in whoever comes just then; and the queue is moved up with
/// each turn, which takes the server about a microsecond for each one who waits. Take it where
/// somebody would otherwise be left behind.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
/// let client = redlatch::Client::embedded(); // or Client::connect("redis://127.0.0.1").await?
/// let lock = client.fair_lock("printer");
///
/// let first = lock.lock().await?;
/// let next = tokio::spawn(lock.lock().into_future());
/// while lock.queue().await?.is_empty() {
///     tokio::task::yield_now().await; // until the other has joined the queue
/// }
/// first.unlock().await?;
/// assert!(lock.try_lock().await?.is_none(), "it is somebody else's turn");
/// # use std::future::IntoFuture;
/// next.await.unwrap()?.unlock().await
/// # }
/// ```
pub type FairLock = Lock<Fair>;

/// The kind of [`FairLock`].
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Fair {
    wait_time: Duration,
    grace_period: Duration,
}

impl Default for Fair {
    fn default() -> Fair {
        Fair {
            wait_time: Duration::from_secs(300),
            grace_period: Duration::from_secs(5),
        }
    }
}

impl OwnedKind for Fair {}

impl Fair {
    /// A setting as the scripts take it; one that cannot be used is refused before anything is asked.
    fn usable(setting: Duration) -> Lease {
        let usable = setting.clamp(Duration::from_millis(1), MAX_LEASE);
        Lease::new(usable).unwrap_or(Lease::WATCHDOG)
    }

    fn grace(&self) -> Lease {
        Fair::usable(self.grace_period)
    }
}

impl Lock<Fair> {
    /// For how long the lock is kept free for whoever waits through this handle when its turn has
    /// come, before the next one may go: so long does everybody wait for one whose process hangs. A
    /// waiter without a connection is waited for no longer than the
    /// [grace period](Lock::grace_period). Default 300 s, as in Redisson (`fairLockWaitTimeout`); 1 ms to
    /// [`MAX_LEASE`](crate::MAX_LEASE), cut to whole milliseconds. Anything else is an
    /// [`Error::InvalidSetting`] of whatever is acquired.
    ///
    /// Who waits with a limit ([`TryAcquire::wait`](crate::TryAcquire::wait)) that is shorter is
    /// waited for only as long as that.
    ///
    /// A short time means asking at that pace: whoever is not the next one looks that often whether
    /// those before have been given up. With 10 ms each of them asks the store a hundred times a
    /// second.
    ///
    /// The one who waits has to be able to answer within this time: shorter than the time for which
    /// processes are stopped or cut off, it costs them their place in the queue. They go on waiting
    /// at its end.
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
    pub fn wait_time(self, wait_time: Duration) -> Lock<Fair> {
        let kind = Fair {
            wait_time,
            ..*self.kind
        };
        self.with_kind(kind)
    }

    /// How long waiters that are not connected keep their places in the queue when the lock is free and
    /// it is the turn of one of them. Default 5 s; 1 ms to [`MAX_LEASE`](crate::MAX_LEASE), cut to whole
    /// milliseconds. Other values fail with [`Error::InvalidSetting`] when the lock is requested.
    ///
    /// A waiter counts as connected while a connection listens to its channel. When the turn of a waiter
    /// comes that is not connected, the grace period begins for all waiters without a connection at the
    /// same time. So all waiters that died together delay the others by one grace period, however many
    /// they are. A waiter that reconnects before its turn, or within the grace period, keeps its place;
    /// choose a time in which clients reconnect, also after a failover.
    ///
    /// Waiters that are connected do not depend on this time, whether they wait in Rust or in Java. No
    /// waiter is waited for longer than its [wait time](Lock::wait_time), which also ends the turn of one
    /// whose process hangs while its connection stays open.
    ///
    /// The setting of the client counts that finds the absence, be it a release or a waiter. Give all
    /// handles of a name the same.
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
    pub fn grace_period(self, grace_period: Duration) -> Lock<Fair> {
        let kind = Fair {
            grace_period,
            ..*self.kind
        };
        self.with_kind(kind)
    }

    /// Who waits for the lock, in whatever process: the ids of the owners
    /// ([`Client::owner_id`](crate::Client::owner_id)), the next one first. Leaves out those at the
    /// head for whom nobody waits any longer.
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
    pub async fn queue(&self) -> Result<Vec<String>> {
        let place = self.place()?;
        self.session.store.look(&Waiting { place }).await
    }

    /// How many come before `owner`, who waits through this client: 0 for the next one. `None` if it
    /// does not wait; it may have the lock already.
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
        let owner = self.session.id.field(owner);
        let queue = self.queue().await?;
        Ok(queue.iter().position(|waiting| *waiting == owner))
    }
}

impl Kind for Fair {
    fn renew_script(&self) -> &'static Script {
        rules::renew_script()
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

    fn release<'a>(
        &'a self,
        hold: &'a Hold,
        keep: u32,
        lease: Option<Lease>,
    ) -> BoxedStep<'a, bool> {
        let grace = self.grace();
        Box::new(Release {
            hold,
            keep,
            lease,
            grace,
        })
    }
}

impl Rules for Fair {
    type Won = ();
    const FAMILY: Family = Family::Fair;

    fn acquire<'a>(&'a self, ask: Ask<'a>) -> impl Step<Reply = Outcome> + 'a {
        let (wait_time, grace) = (Fair::usable(self.wait_time), self.grace());
        Acquire {
            ask,
            wait_time,
            grace,
        }
    }

    fn inspect<'a>(&'a self, place: &'a Place) -> impl Step<Reply = Vec<Holder>> + 'a {
        Reentrant.inspect(place)
    }

    fn force<'a>(&'a self, place: &'a Place) -> impl Step<Reply = bool> + 'a {
        let grace = self.grace();
        Force { place, grace }
    }

    fn check(&self) -> Result<()> {
        let settings = [
            ("wait_time", self.wait_time),
            ("grace_period", self.grace_period),
        ];
        for (setting, time) in settings {
            Lease::new(time).map_err(|_| Error::InvalidSetting {
                setting,
                reason: format!("{time:?}: take 1 ms to ten years"),
            })?;
        }
        Ok(())
    }

    fn waiting_at_most(&self, wait: Duration) -> Option<Fair> {
        let wait_time = wait.max(Duration::from_millis(1));
        (wait_time < self.wait_time).then_some(Fair { wait_time, ..*self })
    }

    fn channel<'a>(&self, hold: &'a Hold) -> &'a str {
        &hold.own
    }

    fn remembers_waiters(&self) -> Option<Lease> {
        Some(Fair::usable(self.wait_time))
    }
}
