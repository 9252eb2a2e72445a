//! The multi-lock (Redisson: `RedissonMultiLock`): several locks, all or nothing. It stores no
//! state of its own; its holds are those of its members. `attempt` describes the algorithm.

mod acquire_all;
mod attempt;
#[cfg(test)]
mod differential;
mod held;

use std::future::Future;
use std::time::Duration;

use tracing::Instrument as _;

use self::attempt::MultiLockRequest;
use self::held::HeldLocks;
use crate::error::{Error, Result};
use crate::join::join_all;
use crate::locks::{Acquire, AcquireOnce, Busy, Guard, HasLease, HasOwner, Options, TryAcquire};
use crate::metrics::{Kind, KindMetrics};
use crate::owner::Owner;
use crate::session::AllOrNone;
use crate::several::{
    Member, busy, remember_runtime, request_metrics, shortest_outage_limit, span, validated,
};
use crate::store::Progress;

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
/// the same name on several servers should use the same addresses. A lock that is named twice is
/// acquired once.
///
/// Two clients of one store cannot request one name: one would wait for the other ([`Error::InvalidMembers`]). If they use
/// different addresses of one server, that is known from its run id, for which they must be permitted to call INFO.
///
/// If one of the locks is lost, the guard is. The other locks are renewed until the guard is
/// released or dropped.
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
    /// first: [`Acquire`].
    pub fn lock(&self) -> Acquire<MultiLock> {
        Acquire::new(self.clone())
    }

    /// Acquires all locks if they are free; `None` if another owner holds one. Await the request,
    /// or configure it first, for example with a wait limit: [`TryAcquire`].
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
    pub fn try_lock(&self) -> TryAcquire<MultiLock> {
        TryAcquire::new(self.clone())
    }

    /// Acquires all locks, runs `work` while they are held, and releases them: [`Acquire::run`],
    /// which also documents errors and cancel safety.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// let both = redlatch::MultiLock::new([client.lock("a"), client.lock("b")]);
    /// assert_eq!(both.run(async { 6 * 7 }).await?, 42);
    /// # Ok(()) }
    /// ```
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output> {
        self.lock().run(work).await
    }

    /// Returns whether `owner` holds all locks, each through its member's client, according to the
    /// stores.
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
        let each = join_all(members.iter().map(|member| member.lock.is_held_by(owner))).await;
        let held: Result<Vec<bool>> = each.into_iter().collect();
        Ok(held?.into_iter().all(|held| held))
    }
}

/// The held locks of a [`MultiLock`].
pub type MultiGuard = Guard<MultiLock>;

impl HasLease for MultiLock {}
impl HasOwner for MultiLock {}

impl AcquireOnce for MultiLock {
    type Held = HeldLocks;

    fn metrics(&self) -> KindMetrics {
        request_metrics(&self.members, Kind::MultiLock)
    }

    async fn busy(&self) -> Busy {
        busy(&self.members).await
    }

    fn waiting_at_most(self, wait: Duration) -> MultiLock {
        let members = self.members.into_iter();
        MultiLock::new(members.map(|member| member.waiting_at_most(wait)))
    }

    async fn acquire_once(&self, options: &Options) -> Result<Option<HeldLocks>> {
        let (lease, named) = (options.lease()?, options.owner()?);
        let hold_limits = options.hold_limits()?;
        let members = in_global_order(&self.members)?;
        let waiting = &members[0].session().waiting;
        let limits = options.request_limits(shortest_outage_limit(&members));
        remember_runtime(&members)?;
        loop {
            let owner = named.unwrap_or_else(Owner::anonymous);
            let hold_refs: Result<Vec<_>> =
                members.iter().map(|one| one.lock.hold_ref(owner)).collect();
            let hold_refs = hold_refs?;
            for one in &hold_refs {
                options.set_note(&one.hold);
                one.hold.state().acquires_again = true;
            }
            let progress = Progress::default();
            let acquired = async {
                let mut request = MultiLockRequest::new(&members, &hold_refs, lease, &progress);
                waiting.within(&limits, &progress, &mut request).await
            };
            match acquired.instrument(span(&members, owner)).await {
                // The owner's previous hold was lost meanwhile: start again with a new one.
                Err(Error::Lost { .. })
                    if named.is_some() && hold_refs.iter().any(|one| one.hold.loss().is_some()) => {
                }
                Err(error) => return Err(error),
                Ok(None | Some(AllOrNone::Blocked(..))) => return Ok(None),
                Ok(Some(AllOrNone::Acquired(members))) => {
                    let held = members.iter().map(|member| &member.held);
                    held.for_each(|held| held.start_limits(hold_limits));
                    return Ok(Some(HeldLocks { owner, members }));
                }
            }
        }
    }
}

/// Returns each lock once, in the global order in which all requests acquire them: by slot, so that
/// members that one script can acquire are adjacent; by key; the write side before
/// the read side (a writer may read, but not the other way round); by store.
fn in_global_order(members: &[Member]) -> Result<Vec<Member>> {
    let mut all = validated(members)?;
    all.sort_by_cached_key(|member| {
        let object = member.object();
        let later = !object.layout().writes();
        let address = member.session().store.address();
        (member.order(), object.identity().to_owned(), later, address)
    });
    Ok(all)
}
