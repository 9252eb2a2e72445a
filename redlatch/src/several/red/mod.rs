//! The RedLock (Redis' Redlock algorithm; Redisson: `RedissonRedLock`): a lock that a majority of
//! independent servers grants. It stores no state of its own; its holds are those of its members.
//! `round` describes the algorithm.

mod held;
mod regain;
mod round;

use std::fmt::Write as _;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tracing::Instrument as _;

use self::held::{HeldMajority, clock_drift};
use self::regain::MemberRequests;
use self::round::RedLockRequest;
use crate::backoff::Backoff;
use crate::error::{Error, Result};
use crate::join::join_all;
use crate::lease::{Expiry, Lease};
use crate::locks::{Acquire, AcquireOnce, Busy, Guard, HasLease, HasOwner, Options, TryAcquire};
use crate::metrics::{Kind, KindMetrics};
use crate::owner::Owner;
use crate::several::{
    Member, busy, remember_runtime, request_metrics, shortest_outage_limit, span, validated,
};
use crate::store::Progress;

/// A lock on several independent servers, held by the owner to which a majority granted it
/// (Redisson: `RedissonRedLock`, `getRedLock`; the Redlock algorithm).
///
/// Each of the N members is a lock of a different client, and each client uses a different,
/// independent server; none is a replica of another. In a *round*, all members are requested
/// concurrently, and the round lasts until each has answered or its time limit has passed
/// ([`RedLock::member_timeout`]). The lock is acquired if at least N/2 + 1 members have granted it
/// and it is still *valid*: for the remaining part of the lease, less an allowance for clocks that
/// run at different speeds (1 % of the lease and 2 ms). Otherwise the members that granted it are
/// released, and the next round starts after a short random pause. So it can be acquired and kept
/// while a minority hangs or is down, and it is still held when one server loses its data.
///
/// Each member is renewed by its client's watchdog; the guard is valid while a majority is. When it
/// is lost, the members that remain are released.
/// Meanwhile, members that were lost or have not granted the lock are requested again, a few times
/// a second at most, and count once they have granted it. So a held lock survives that its servers
/// restart one after the other, even without their data, if each is back before the next one
/// restarts. To force it open, force all members within a tenth of a second.
///
/// # When not to use it
///
/// It costs N times as much as one lock and depends on the clocks: servers that restart without
/// their data within a lease, or clocks that jump, can grant it to two owners. Data that must not
/// be written twice needs the fencing token of one server, from a
/// [`FencedLock`](crate::FencedLock); tokens of several servers cannot be combined. To hold
/// *different* locks together, use [`MultiLock`](crate::MultiLock).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
/// use redlatch::{Client, RedLock};
///
/// // In production, three independent servers: Client::connect("redis://one").await?, …
/// let clients = [Client::embedded(), Client::embedded(), Client::embedded()];
/// let lock = RedLock::new(clients.each_ref().map(|client| client.lock("orders:42")));
///
/// let guard = lock.lock().await?;
/// assert!(lock.try_lock().await?.is_none());
/// assert_eq!(guard.held_members(), 3);
/// guard.unlock().await
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct RedLock {
    members: Vec<Member>,
    member_timeout: Option<Duration>,
    backoff: Backoff,
}

impl RedLock {
    /// Creates a handle of the lock that these members form. Each member should be on a different,
    /// independent server, and their number odd. A lock that is passed twice, of the same client,
    /// counts once. Invalid members are reported as errors when the handle is used. Two clients of
    /// one server cannot request one name ([`Error::InvalidMembers`]). If they use different
    /// addresses of it, that is known from its run id, for which they must be permitted to call INFO.
    pub fn new<M: Into<Member>>(members: impl IntoIterator<Item = M>) -> RedLock {
        RedLock {
            members: members.into_iter().map(Into::into).collect(),
            member_timeout: None,
            backoff: Backoff::default(),
        }
    }

    /// Adds a member.
    #[must_use]
    pub fn and(mut self, member: impl Into<Member>) -> RedLock {
        self.members.push(member.into());
        self
    }

    /// Sets how long a member may take to answer before it counts as failed: long enough for a
    /// round trip, short compared with the lease. Default: a thousandth of the lease, but at least
    /// 5 ms and at most 50 ms; 30 ms with the default watchdog. At least 1 ms, at most ten years.
    #[must_use]
    pub fn member_timeout(mut self, timeout: Duration) -> RedLock {
        self.member_timeout = Some(timeout);
        self
    }

    /// Sets the pause between rounds. Default [`Backoff::default`]: a random time from half to all
    /// of 1 ms, then of 2 ms, and so on, doubled up to 128 ms.
    #[must_use]
    pub fn backoff(mut self, backoff: Backoff) -> RedLock {
        self.backoff = backoff;
        self
    }

    /// Returns the names as they were passed in.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.members.iter().map(Member::name)
    }

    /// Acquires the lock and waits for it without a limit. It also waits while a majority is
    /// unreachable, unless an outage limit is set for the request ([`Acquire::outage_limit`]) or
    /// for a member's client. Await the request, or configure it first: [`Acquire`].
    ///
    /// Waiters of one process are served in order of arrival, if they share the members' clients
    /// and set no owner with [`Acquire::owner`]: that owner may already hold the lock, and must not
    /// wait behind others that wait for it. The order of all other waiters is random.
    pub fn lock(&self) -> Acquire<RedLock> {
        Acquire::new(self.clone())
    }

    /// Acquires the lock if a majority is free, in one round; `None` if not. Await the request, or
    /// configure it first, for example with a wait limit: [`TryAcquire`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # use redlatch::{Client, RedLock};
    /// # let clients = [Client::embedded(), Client::embedded(), Client::embedded()];
    /// use std::time::Duration;
    ///
    /// let lock = RedLock::new(clients.map(|client| client.lock("orders:42")));
    /// let second = Duration::from_secs(1);
    /// let guard = lock.try_lock().wait(second).lease(10 * second).await?;
    /// assert!(guard.is_some_and(|guard| guard.valid_for() < 10 * second));
    /// # Ok(()) }
    /// ```
    pub fn try_lock(&self) -> TryAcquire<RedLock> {
        TryAcquire::new(self.clone())
    }

    /// Acquires the lock, runs `work` while it is held, and releases it: [`Acquire::run`], which
    /// also documents errors and cancel safety.
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output> {
        self.lock().run(work).await
    }

    /// Returns whether `owner` holds the lock: whether a majority of the members reports it.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidMembers`], [`Error::InvalidSetting`], [`Error::NoRuntime`], or the first
    /// error of a member, if so many fail or do not answer in time that the others cannot decide.
    pub async fn is_held_by(&self, owner: Owner) -> Result<bool> {
        let members = validated(&self.members)?;
        let member_timeout = self.checked_member_timeout(shortest_lease(&members, None))?;
        remember_runtime(&members)?;
        let queries = members
            .iter()
            .map(|member| answer_within(member_timeout, member.lock.is_held_by(owner)));
        let (mut yes, mut errors) = (0, Vec::new());
        for answer in join_all(queries).await {
            match answer {
                Ok(held) => yes += usize::from(held),
                Err(error) => errors.push(error),
            }
        }
        let quorum = quorum(members.len());
        let (failed, first) = (errors.len(), errors.into_iter().next());
        match first {
            Some(error) if yes < quorum && yes + failed >= quorum => Err(error),
            _ => Ok(yes >= quorum),
        }
    }

    /// Returns how long a member may take to answer.
    fn checked_member_timeout(&self, lease: Duration) -> Result<Duration> {
        let Some(timeout) = self.member_timeout else {
            let (shortest, longest) = (Duration::from_millis(5), Duration::from_millis(50));
            return Ok((lease / 1000).clamp(shortest, longest));
        };
        if timeout < Duration::from_millis(1) || timeout > crate::MAX_LEASE {
            return Err(Error::InvalidSetting {
                setting: "member_timeout",
                reason: "use 1 ms to ten years".into(),
            });
        }
        Ok(timeout)
    }
}

/// Returns the shortest lease with which the members are held.
fn shortest_lease(members: &[Member], lease: Option<Lease>) -> Duration {
    let leases = members.iter().map(|member| member.terms(lease).lease);
    leases.min().unwrap_or(Lease::WATCHDOG).duration()
}

/// Returns the name of the local queue for requests of the same members through the same clients.
/// No channel starts with `red `, so these requests never wait behind requests for one member.
fn queue_name(members: &[Member]) -> String {
    let mut name = String::from("red");
    for member in members {
        let (object, address) = (member.object(), member.session().store.address());
        // The key's length makes the name unambiguous.
        let key = object.identity();
        let _ = write!(name, " {:?} {} {key} {address}", object.layout(), key.len());
    }
    name
}

/// Returns how many of `members` are a majority.
fn quorum(members: usize) -> usize {
    members / 2 + 1
}

/// Waits for the answer of a member, at most this long.
async fn answer_within<T>(
    member_timeout: Duration,
    answer: impl Future<Output = Result<T>>,
) -> Result<T> {
    let answer = tokio::time::timeout(member_timeout, answer).await;
    answer.unwrap_or_else(|_| {
        Err(Error::unavailable(format!(
            "no answer within {member_timeout:?}, the RedLock's `member_timeout`"
        )))
    })
}

/// A held [`RedLock`], valid for as long as a majority of its members is held.
pub type RedGuard = Guard<RedLock>;

impl HasLease for RedLock {}
impl HasOwner for RedLock {}

impl AcquireOnce for RedLock {
    type Held = HeldMajority;

    fn metrics(&self) -> KindMetrics {
        request_metrics(&self.members, Kind::RedLock)
    }

    async fn busy(&self) -> Busy {
        busy(&self.members).await
    }

    async fn acquire_once(&self, options: &Options) -> Result<Option<HeldMajority>> {
        let (lease, named) = (options.lease()?, options.owner()?);
        let members = validated(&self.members)?;
        remember_runtime(&members)?;
        let hold_limits = options.hold_limits()?;
        let shortest = shortest_lease(&members, lease);
        if shortest <= clock_drift(shortest) {
            return Err(Error::InvalidSetting {
                setting: "lease",
                reason: "1 % and 2 ms of a RedLock's lease are reserved for clock drift; use at \
                         least 3 ms"
                    .into(),
            });
        }
        let owner = named.unwrap_or_else(Owner::anonymous);
        // Unless a member's client has an outage limit, it waits through any outage, unlike a
        // single lock.
        let outage_limit = shortest_outage_limit(&members).unwrap_or(Expiry::Never);
        let limits = options.request_limits(Some(outage_limit));
        let progress = Progress::default();
        let member_timeout = self.checked_member_timeout(shortest)?;
        let mut request = RedLockRequest {
            members: &members,
            options,
            owner,
            lease,
            member_timeout,
            backoff: self.backoff,
            queue_name: queue_name(&members),
            tries: 0,
            failure: None,
            limits,
            progress: &progress,
        };
        let first = members[0].session();
        let acquiring = first.waiting.within(&limits, &progress, &mut request);
        match acquiring.instrument(span(&members, owner)).await? {
            Some(majority) => {
                majority.start_limits(hold_limits);
                let requests = MemberRequests {
                    majority: majority.clone(),
                    ends: lease.map(|_| Instant::now() + majority.lease_left()),
                };
                Arc::new(requests).start(first.background.clone(), None);
                Ok(Some(HeldMajority(majority)))
            }
            // `failure` is set if so many members failed in the last round that the others could
            // not form a quorum. Otherwise the lock was refused.
            None => request.failure.map_or(Ok(None), Err),
        }
    }
}
