//! The requests for several locks: builders that are awaited.

use std::future::IntoFuture;
use std::time::Duration;

use crate::error::Result;
use crate::join::Boxed;
use crate::lease::{Lease, WaitLimit};
use crate::owner::Owner;

/// Several locks that are held as one: [`MultiLock`](crate::MultiLock) and
/// [`RedLock`](crate::RedLock).
#[expect(private_bounds, reason = "sealed: there are these two")]
pub trait LockOfMany: Obtain {
    /// The guard that holds the locks.
    type Guard: Send + 'static;
}

/// Acquires several locks.
pub(crate) trait Obtain: Clone + Send + Sync + 'static {
    fn obtain(
        &self,
        lease: Option<Lease>,
        owner: Option<Owner>,
        wait: WaitLimit,
        outage_limit: Option<Duration>,
    ) -> impl Future<Output = Result<Option<Self::Guard>>> + Send
    where
        Self: LockOfMany;
}

/// Acquires several locks when awaited, waiting without a limit:
/// [`MultiLock::lock`](crate::MultiLock::lock), [`RedLock::lock`](crate::RedLock::lock).
///
/// # Errors
///
/// [`InvalidMembers`](crate::Error::InvalidMembers), [`InvalidLease`](crate::Error::InvalidLease),
/// [`NoRuntime`](crate::Error::NoRuntime); for a multi-lock also the errors of its members' own
/// [`lock`](crate::Acquire). A RedLock treats errors of its members as refusals, unless a majority
/// of them fail in a way that waiting cannot fix (a key of another kind, wrong credentials).
///
/// # Cancel safety
///
/// May be dropped at any point: locks that were acquired by then are released in the background.
#[must_use = "nothing is acquired until this is awaited"]
#[derive(Debug)]
pub struct AcquireMany<L: LockOfMany> {
    lock: L,
    lease: Option<Duration>,
    owner: Option<Owner>,
    outage_limit: Option<Duration>,
}

/// Acquires several locks or gives up when awaited:
/// [`MultiLock::try_lock`](crate::MultiLock::try_lock),
/// [`RedLock::try_lock`](crate::RedLock::try_lock).
///
/// Errors and cancel safety are those of [`AcquireMany`].
#[must_use = "nothing is acquired until this is awaited"]
#[derive(Debug)]
pub struct TryAcquireMany<L: LockOfMany> {
    request: AcquireMany<L>,
    wait: Duration,
}

impl<L: LockOfMany> AcquireMany<L> {
    pub(crate) fn new(lock: &L) -> AcquireMany<L> {
        AcquireMany {
            lock: lock.clone(),
            lease: None,
            owner: None,
            outage_limit: None,
        }
    }

    /// Holds every member for exactly this long unless it is released earlier; nothing is renewed.
    /// 1 ms to [`MAX_LEASE`](crate::MAX_LEASE), truncated to whole milliseconds. Default: the
    /// watchdog of each member's client renews it.
    pub fn lease(mut self, lease: Duration) -> AcquireMany<L> {
        self.lease = Some(lease);
        self
    }

    /// Acquires for this owner. If it already holds a member, it re-enters. Default: the owner of
    /// the scope ([`Owner::scope`]), or a new one.
    pub fn owner(mut self, owner: Owner) -> AcquireMany<L> {
        self.owner = Some(owner);
        self
    }

    /// Waits through an outage of the members' stores that lasts at most this long:
    /// [`ClientBuilder::outage_limit`](crate::ClientBuilder::outage_limit), for this request.
    /// Default: the shortest limit that is set for a member's client. Without any, a multi-lock
    /// fails as a single lock does, and a RedLock waits through any outage.
    pub fn outage_limit(mut self, limit: Duration) -> AcquireMany<L> {
        self.outage_limit = Some(limit);
        self
    }

    async fn obtain(&self, wait: WaitLimit) -> Result<Option<L::Guard>> {
        let lease = self.lease.map(Lease::new).transpose()?;
        let owner = self.owner.or_else(Owner::current);
        let obtained = self.lock.obtain(lease, owner, wait, self.outage_limit);
        obtained.await
    }
}

impl<L: LockOfMany> TryAcquireMany<L> {
    pub(crate) fn new(lock: &L) -> TryAcquireMany<L> {
        TryAcquireMany {
            request: AcquireMany::new(lock),
            wait: Duration::ZERO,
        }
    }

    /// Waits at most this long, counted from the first poll. The request returns at this limit,
    /// also during an outage: `None` if a store reported another holder, or the error if the stores
    /// could not be reached. Steps that are in flight then are settled in the background.
    pub fn wait(mut self, wait: Duration) -> TryAcquireMany<L> {
        self.wait = wait;
        self
    }

    /// As [`AcquireMany::outage_limit`]. The wait limit wins if it is shorter.
    pub fn outage_limit(mut self, limit: Duration) -> TryAcquireMany<L> {
        self.request = self.request.outage_limit(limit);
        self
    }

    /// As [`AcquireMany::lease`].
    pub fn lease(mut self, lease: Duration) -> TryAcquireMany<L> {
        self.request = self.request.lease(lease);
        self
    }

    /// As [`AcquireMany::owner`].
    pub fn owner(mut self, owner: Owner) -> TryAcquireMany<L> {
        self.request = self.request.owner(owner);
        self
    }
}

impl<L: LockOfMany> IntoFuture for AcquireMany<L> {
    type Output = Result<L::Guard>;
    type IntoFuture = Boxed<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            // Without a wait limit it never returns `None`; the loop proves that to the compiler.
            loop {
                if let Some(guard) = self.obtain(WaitLimit::Endless).await? {
                    return Ok(guard);
                }
            }
        })
    }
}

impl<L: LockOfMany> IntoFuture for TryAcquireMany<L> {
    type Output = Result<Option<L::Guard>>;
    type IntoFuture = Boxed<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move { self.request.obtain(WaitLimit::at_most(self.wait)).await })
    }
}
