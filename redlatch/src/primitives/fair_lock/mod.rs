//! The fair lock (Redisson: `RFairLock`, `RedissonFairLock`): first come, first served, over all
//! clients. The lock's hash, and beside it a queue of those who wait.

#[cfg(test)]
mod differential;
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
/// cannot be reached. Who has died while waiting is waited for when its turn has come, but no longer
/// than its [wait time](Lock::wait_time). All of this goes by the server's clock.
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
}

impl Default for Fair {
    fn default() -> Fair {
        Fair {
            wait_time: Duration::from_secs(300),
        }
    }
}

impl OwnedKind for Fair {}

impl Fair {
    fn checked(&self) -> Result<Lease> {
        Lease::new(self.wait_time).map_err(|_| Error::InvalidSetting {
            setting: "wait_time",
            reason: format!("{:?}: take 1 ms to ten years", self.wait_time),
        })
    }

    /// As [`Fair::checked`]; what cannot be used has been refused before anything was asked.
    fn waited(&self) -> Lease {
        let usable = self.wait_time.clamp(Duration::from_millis(1), MAX_LEASE);
        Lease::new(usable).unwrap_or(Lease::WATCHDOG)
    }
}

impl Lock<Fair> {
    /// For how long the lock is kept free for whoever waits through this handle when its turn has
    /// come, before the next one may go: so long does everybody wait for one who has died in the
    /// queue. Default 300 s, as in Redisson (`fairLockWaitTimeout`); 1 ms to
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
        self.with_kind(Fair { wait_time })
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

    fn renew_keys_beside<'a>(&self, hold: &'a Hold) -> &'a [String] {
        hold.place.beside()
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
        let step = Release { hold, keep, lease };
        Box::new(step)
    }
}

impl Rules for Fair {
    type Won = ();
    const FAMILY: Family = Family::Fair;

    fn acquire<'a>(&'a self, ask: Ask<'a>) -> impl Step<Reply = Outcome> + 'a {
        let wait_time = self.waited();
        Acquire { ask, wait_time }
    }

    fn inspect<'a>(&'a self, place: &'a Place) -> impl Step<Reply = Vec<Holder>> + 'a {
        Reentrant.inspect(place)
    }

    fn force<'a>(&'a self, place: &'a Place) -> impl Step<Reply = bool> + 'a {
        Force { place }
    }

    fn check(&self) -> Result<()> {
        self.checked().map(drop)
    }

    fn waiting_at_most(&self, wait: Duration) -> Option<Fair> {
        let wait_time = wait.max(Duration::from_millis(1));
        (wait_time < self.wait_time).then_some(Fair { wait_time })
    }

    fn channel<'a>(&self, hold: &'a Hold) -> &'a str {
        &hold.own
    }

    fn remembers_waiters(&self) -> Option<Lease> {
        Some(self.waited())
    }
}
