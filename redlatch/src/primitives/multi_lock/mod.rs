//! The multi-lock (Redisson: `RedissonMultiLock`): several locks, all or nothing. It keeps nothing
//! in the store; its holds are those of its members.

mod attempt;
#[cfg(test)]
mod differential;
mod guard;
mod member;
mod request;
mod share;
mod take;

use std::future::Future;
use std::time::Duration;

use tracing::Instrument as _;

use self::attempt::Entry;
pub use self::guard::MultiGuard;
pub use self::member::Member;
use self::member::in_order;
pub(crate) use self::member::{checked, clients_outage_limit};
pub(crate) use self::request::Obtain;
pub use self::request::{AcquireMany, LockOfMany, TryAcquireMany};
pub(crate) use self::share::{Share, any_lost};
use crate::error::{Error, Result};
use crate::lease::{Lease, Patience};
use crate::owner::Owner;
use crate::primitives::handle::done;
use crate::several::all;
use crate::store::Sent;
use crate::wait::Limits;

/// Several locks that are held together or not at all (Redisson: `RedissonMultiLock`,
/// `getMultiLock`).
///
/// The members are locks of any kind, also of different clients and stores. Two multi-locks that
/// name the same locks in another order cannot deadlock, and neither can one that shares locks with
/// many others: all are tried in one order, without waiting; if one cannot be had, those before it
/// are given back, and then that one is waited for. Members of one client that are neighbours in
/// that order are taken by one script, in one round trip: in a cluster those whose names have the
/// same hash tag (`{account}:1`, `{account}:2`).
///
/// The order is by slot in a cluster, by key and then by the store's address, so clients that take a lock of the same
/// name in several servers should give the same addresses. A lock that is named twice is taken
/// once.
///
/// # When not to use it
///
/// Who waits holds no place in the lines of all members, only of the one that is in the way; under
/// heavy contention for several of them single locks go first. If all that is protected always
/// belongs together, one lock for it is simpler. For one lock that survives the failure of a
/// server, see [`RedLock`](crate::RedLock).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
/// use redlatch::MultiLock;
///
/// let client = redlatch::Client::embedded(); // or Client::connect("redis://127.0.0.1").await?
/// let (from, to) = (client.lock("account:1"), client.lock("account:2"));
/// let both = MultiLock::new([&from, &to]);
///
/// let guard = both.lock().await?;
/// assert!(from.is_locked().await? && to.is_locked().await?);
/// guard.unlock().await?;
///
/// // Locks of different kinds:
/// let ledger = client.fenced_lock("ledger");
/// let all = both.and(&ledger);
/// let guard = all.lock().await?;
/// assert_eq!(guard.token(&ledger), Some(1));
/// guard.unlock().await
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct MultiLock {
    members: Vec<Member>,
}

impl MultiLock {
    /// A handle of all these locks together. What is wrong with them is an error of whatever is
    /// done with it. Locks of different kinds: [`MultiLock::and`], or [`Member::from`] for each.
    pub fn new<M: Into<Member>>(members: impl IntoIterator<Item = M>) -> MultiLock {
        MultiLock {
            members: members.into_iter().map(Into::into).collect(),
        }
    }

    /// The same locks and this one.
    #[must_use]
    pub fn and(mut self, member: impl Into<Member>) -> MultiLock {
        self.members.push(member.into());
        self
    }

    /// The names, as they were given.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.members.iter().map(Member::name)
    }

    /// Waits for all locks as long as it takes. Await it, or set something first: [`AcquireMany`].
    pub fn lock(&self) -> AcquireMany<MultiLock> {
        AcquireMany::new(self)
    }

    /// Takes all locks if they are free: `None` if somebody else holds one. Await it, or set
    /// something first, such as how long to wait: [`TryAcquireMany`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// use std::time::Duration;
    ///
    /// let both = redlatch::MultiLock::new([client.lock("a"), client.lock("b")]);
    /// let second = Duration::from_secs(1);
    /// let guard = both.try_lock().wait(second).lease(10 * second).await?;
    /// assert!(guard.is_some());
    /// # Ok(()) }
    /// ```
    pub fn try_lock(&self) -> TryAcquireMany<MultiLock> {
        TryAcquireMany::new(self)
    }

    /// Waits for all locks, runs `work` while they are held, and releases them:
    /// [`Lock::run`](crate::Lock::run).
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] as soon as one lock is lost: `work` is dropped then. Otherwise the errors of
    /// [`MultiLock::lock`]; `work` was not begun then.
    ///
    /// # Cancel safety
    ///
    /// When dropped, `work` is dropped and the locks are released in the background.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// let both = redlatch::MultiLock::new([client.lock("a"), client.lock("b")]);
    /// assert_eq!(both.run(async { 6 * 7 }).await?, 42);
    /// # Ok(()) }
    /// ```
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output> {
        let guard = self.lock().await?;
        let output = guard.run(work).await?;
        done(output, guard.unlock().await)
    }

    /// Whether `owner` holds all locks, each through its member's client, as the stores see it.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidMembers`], or the first error of a member, as of
    /// [`Lock::is_locked`](crate::Lock::is_locked).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// let both = redlatch::MultiLock::new([client.lock("a"), client.lock("b")]);
    /// let guard = both.lock().await?;
    /// assert!(both.is_held_by(guard.owner()).await?);
    /// # Ok(()) }
    /// ```
    pub async fn is_held_by(&self, owner: Owner) -> Result<bool> {
        let members = checked(&self.members)?;
        let each = all(members.iter().map(|member| member.0.is_held_by(owner))).await;
        let held: Result<Vec<bool>> = each.into_iter().collect();
        Ok(held?.into_iter().all(|held| held))
    }
}

impl LockOfMany for MultiLock {
    type Guard = MultiGuard;
}

impl Obtain for MultiLock {
    async fn obtain(
        &self,
        lease: Option<Lease>,
        named: Option<Owner>,
        patience: Patience,
        outage_limit: Option<Duration>,
    ) -> Result<Option<MultiGuard>> {
        let members = in_order(&self.members)?;
        let Some(waiting) = members.first().map(|first| &first.session().waiting) else {
            return Ok(None);
        };
        let limits = Limits::new(patience, outage_limit.or(clients_outage_limit(&members)));
        for member in &members {
            member.session().background.bind()?;
        }
        loop {
            let owner = named.unwrap_or_else(Owner::new);
            let claims: Result<Vec<_>> = members.iter().map(|one| one.0.claim(owner)).collect();
            let claims = claims?;
            let span =
                tracing::debug_span!("acquire", locks = members.len(), owner = owner.number());
            let sent = Sent::default();
            let obtained = async {
                let mut entry = Entry::new(&members, &claims, lease, &sent);
                waiting.within(limits, &sent, &mut entry).await
            };
            match obtained.instrument(span).await {
                // What the owner held until now was lost on the way: it starts anew.
                Err(Error::Lost { .. })
                    if named.is_some() && claims.iter().any(|one| one.hold.loss().is_some()) => {}
                Err(error) => return Err(error),
                Ok(shares) => return Ok(shares.map(|shares| MultiGuard::new(owner, shares))),
            }
        }
    }
}
