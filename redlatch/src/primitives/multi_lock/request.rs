//! The ways to ask for several locks: builders that are awaited.

use std::future::IntoFuture;
use std::time::Duration;

use crate::Boxed;
use crate::error::Result;
use crate::lease::{Lease, Patience};
use crate::owner::Owner;

/// Several locks that are held as one: [`MultiLock`](crate::MultiLock) and
/// [`RedLock`](crate::RedLock).
#[expect(private_bounds, reason = "sealed: there are these two")]
pub trait LockOfMany: Obtain {
    /// What holds them.
    type Guard: Send + 'static;
}

/// How several locks are obtained.
pub(crate) trait Obtain: Clone + Send + Sync + 'static {
    fn obtain(
        &self,
        lease: Option<Lease>,
        owner: Option<Owner>,
        patience: Patience,
        outage_limit: Option<Duration>,
    ) -> impl Future<Output = Result<Option<Self::Guard>>> + Send
    where
        Self: LockOfMany;
}

/// Waits for several locks when awaited: [`MultiLock::lock`](crate::MultiLock::lock),
/// [`RedLock::lock`](crate::RedLock::lock).
///
/// # Errors
///
/// [`InvalidMembers`](crate::Error::InvalidMembers), [`InvalidLease`](crate::Error::InvalidLease),
/// [`NoRuntime`](crate::Error::NoRuntime); and of a multi-lock, the errors of its members' own
/// [`lock`](crate::Acquire). A RedLock takes errors of its members for refusals, unless most of
/// them fail in a way that waiting does not mend (a key of another kind, wrong credentials).
///
/// # Cancel safety
///
/// May be dropped at any point: what was taken by then is given back in the background.
#[must_use = "nothing is acquired until this is awaited"]
pub struct AcquireMany<L: LockOfMany> {
    lock: L,
    lease: Option<Duration>,
    owner: Option<Owner>,
    outage_limit: Option<Duration>,
}

/// Takes several locks, or gives up, when awaited: [`MultiLock::try_lock`](crate::MultiLock::try_lock),
/// [`RedLock::try_lock`](crate::RedLock::try_lock).
///
/// Errors and cancel safety are those of [`AcquireMany`].
#[must_use = "nothing is acquired until this is awaited"]
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

    /// Holds every member for exactly this long, if it is not released before; nothing is renewed.
    /// 1 ms to [`MAX_LEASE`](crate::MAX_LEASE), cut to whole milliseconds. Default: renewed by the
    /// watchdog of each member's client.
    pub fn lease(mut self, lease: Duration) -> AcquireMany<L> {
        self.lease = Some(lease);
        self
    }

    /// Acquires for this owner, which re-enters what it holds already. Default: the owner of the
    /// scope ([`Owner::scope`]), or one of its own.
    pub fn owner(mut self, owner: Owner) -> AcquireMany<L> {
        self.owner = Some(owner);
        self
    }

    /// Waits through an outage of the members' stores that lasts at most this long:
    /// [`ClientBuilder::outage_limit`](crate::ClientBuilder::outage_limit), for this request. Default: the
    /// shortest limit that was set for a member's client. If none was, a multi-lock fails as a single
    /// lock does, and a RedLock waits through any outage.
    pub fn outage_limit(mut self, limit: Duration) -> AcquireMany<L> {
        self.outage_limit = Some(limit);
        self
    }

    async fn obtain(&self, patience: Patience) -> Result<Option<L::Guard>> {
        let lease = self.lease.map(Lease::new).transpose()?;
        let owner = self.owner.or_else(Owner::of_scope);
        let obtained = self.lock.obtain(lease, owner, patience, self.outage_limit);
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

    /// Waits at most this long, counted from when this is first polled. The request returns at this
    /// limit, also during an outage: `None` if a store has said that another owner is in the way, or
    /// the error with which the stores could not be asked. Steps in flight then are settled in the
    /// background.
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
            // Endless patience does not come back without: the loop says so to the compiler.
            loop {
                if let Some(guard) = self.obtain(Patience::Endless).await? {
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
        Box::pin(async move { self.request.obtain(Patience::at_most(self.wait)).await })
    }
}
