//! The multi-lock (Redisson: `RedissonMultiLock`): several locks, all or nothing. It stores no
//! state of its own; its holds are those of its members. `attempt` describes the algorithm.

mod acquire_all;
mod attempt;
#[cfg(test)]
mod differential;
mod guard;
mod held_member;
mod member;
mod request;

use std::future::Future;
use std::time::Duration;

use tracing::Instrument as _;

use self::attempt::MultiLockRequest;
pub use self::guard::MultiGuard;
pub(crate) use self::held_member::{HeldMember, any_lost};
pub use self::member::Member;
use self::member::in_global_order;
pub(crate) use self::member::{shortest_outage_limit, validated};
pub(crate) use self::request::Obtain;
pub use self::request::{AcquireMany, LockOfMany, TryAcquireMany};
use crate::error::{Error, Result};
use crate::join::join_all;
use crate::lease::{Expiry, Lease, WaitLimit};
use crate::owner::Owner;
use crate::primitives::lock::unless_lost;
use crate::store::Progress;
use crate::wait::Limits;

/// Several locks that are held together or not at all (Redisson: `RedissonMultiLock`,
/// `getMultiLock`).
///
/// The members are locks of any kind, also of different clients and stores. Multi-locks that share
/// members, named in any order, cannot deadlock: every multi-lock tries its members in the same
/// global order, without waiting. If one member cannot be acquired, the members before it are
/// released, and then that member is waited for. Adjacent members of one client are acquired by one
/// script, in one round trip; in a cluster, those whose names have the same hash tag
/// (`{account}:1`, `{account}:2`).
///
/// The order is by slot in a cluster, by key and then by the store's address. So clients that lock
/// the same name on several servers should use the same addresses. A lock that is named twice is acquired once.
///
/// # When not to use it
///
/// A waiter has a position only in the queue of the member that blocks it, not in those of all
/// members; under heavy contention, requests for single locks go first. If the protected data
/// always belongs together, one lock for all of it is simpler. For one lock that survives the
/// failure of a server, see [`RedLock`](crate::RedLock).
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
    /// Creates a handle of all these locks. Invalid members are reported as errors when the handle
    /// is used. For locks of different kinds: [`MultiLock::and`], or [`Member::from`] for each.
    pub fn new<M: Into<Member>>(members: impl IntoIterator<Item = M>) -> MultiLock {
        MultiLock {
            members: members.into_iter().map(Into::into).collect(),
        }
    }

    /// Adds a lock to the members.
    #[must_use]
    pub fn and(mut self, member: impl Into<Member>) -> MultiLock {
        self.members.push(member.into());
        self
    }

    /// Returns the names as they were passed in.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.members.iter().map(Member::name)
    }

    /// Acquires all locks and waits for them without a limit. Await the request, or configure it
    /// first: [`AcquireMany`].
    pub fn lock(&self) -> AcquireMany<MultiLock> {
        AcquireMany::new(self)
    }

    /// Acquires all locks if they are free; `None` if another owner holds one. Await the request,
    /// or configure it first, for example with a wait limit: [`TryAcquireMany`].
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

    /// Acquires all locks, runs `work` while they are held, and releases them:
    /// [`Lock::run`](crate::Lock::run).
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] as soon as one lock is lost; `work` is then dropped. Otherwise the errors of
    /// [`MultiLock::lock`]; `work` was then not started.
    ///
    /// # Cancel safety
    ///
    /// When dropped, it drops `work` and releases the locks in the background.
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
        unless_lost(output, guard.unlock().await)
    }

    /// Returns whether `owner` holds all locks, each through its member's client, according to the stores.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidMembers`], or the first error of a member, as for
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
        let members = validated(&self.members)?;
        let each = join_all(members.iter().map(|member| member.0.is_held_by(owner))).await;
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
        wait: WaitLimit,
        outage_limit: Option<Duration>,
    ) -> Result<Option<MultiGuard>> {
        let members = in_global_order(&self.members)?;
        let Some(waiting) = members.first().map(|first| &first.session().waiting) else {
            return Ok(None);
        };
        let limits = Limits::new(
            wait,
            outage_limit
                .map(Expiry::In)
                .or(shortest_outage_limit(&members)),
        );
        for member in &members {
            member.session().background.remember_runtime()?;
        }
        loop {
            let owner = named.unwrap_or_else(Owner::new);
            let hold_refs: Result<Vec<_>> =
                members.iter().map(|one| one.0.hold_ref(owner)).collect();
            let hold_refs = hold_refs?;
            let span =
                tracing::debug_span!("acquire", locks = members.len(), owner = owner.number());
            let progress = Progress::default();
            let obtained = async {
                let mut request = MultiLockRequest::new(&members, &hold_refs, lease, &progress);
                waiting.within(limits, &progress, &mut request).await
            };
            match obtained.instrument(span).await {
                // The owner's previous hold was lost meanwhile: start again with a new one.
                Err(Error::Lost { .. })
                    if named.is_some() && hold_refs.iter().any(|one| one.hold.loss().is_some()) => {
                }
                Err(error) => return Err(error),
                Ok(held_members) => {
                    return Ok(
                        held_members.map(|held_members| MultiGuard::new(owner, held_members))
                    );
                }
            }
        }
    }
}
