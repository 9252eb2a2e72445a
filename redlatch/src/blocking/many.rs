//! Several locks as one, for threads.

use std::future::IntoFuture as _;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use super::{Lock, Worker, current_thread};
use crate::error::{Error, Result};
use crate::kind::{LockKind, OwnedKind};
use crate::{Backoff, LockOfMany, Owner};

/// A lock as a member: created `From` a [`Lock`] or a reference to one.
#[derive(Clone, Debug)]
pub struct Member {
    inner: crate::Member,
    worker: Arc<Worker>,
}

impl<K: LockKind + OwnedKind> From<&Lock<K>> for Member {
    fn from(lock: &Lock<K>) -> Member {
        Member {
            inner: crate::Member::from(&lock.inner),
            worker: lock.worker.clone(),
        }
    }
}

impl<K: LockKind + OwnedKind> From<Lock<K>> for Member {
    fn from(lock: Lock<K>) -> Member {
        Member::from(&lock)
    }
}

/// Several locks that are held as one, for threads: [`MultiLock`] and [`RedLock`]. The errors are
/// those of the async methods of the same names. A member's lease from [`Lock::with_lease`] has no effect here.
#[derive(Clone, Debug)]
pub struct Many<L: LockOfMany> {
    inner: L,
    lease: Option<Duration>,
    outage_limit: Option<Duration>,
    /// The threads of the members' clients. The calls run on the first; the others renew, and
    /// release what is dropped.
    workers: Vec<Arc<Worker>>,
}

/// Several locks that are held together or not at all: [`crate::MultiLock`].
///
/// ```
/// # fn main() -> redlatch::Result<()> {
/// use redlatch::blocking::{Client, MultiLock};
///
/// let client = Client::embedded()?; // or connect("redis://127.0.0.1")?
/// let both = MultiLock::new([client.lock("account:1"), client.lock("account:2")]);
/// let guard = both.lock()?;
/// assert!(client.lock("account:2").is_held_by_current_thread()?);
/// guard.unlock()
/// # }
/// ```
pub type MultiLock = Many<crate::MultiLock>;

/// A lock on several independent servers: [`crate::RedLock`].
///
/// ```
/// # fn main() -> redlatch::Result<()> {
/// use redlatch::blocking::{Client, RedLock};
///
/// let clients = [Client::embedded()?, Client::embedded()?, Client::embedded()?];
/// let lock = RedLock::new(clients.each_ref().map(|client| client.lock("orders:42")));
/// let guard = lock.lock()?;
/// assert!(guard.is_valid());
/// guard.unlock()
/// # }
/// ```
pub type RedLock = Many<crate::RedLock>;

impl MultiLock {
    /// Creates a handle of all these locks: [`crate::MultiLock::new`].
    pub fn new<M: Into<Member>>(members: impl IntoIterator<Item = M>) -> MultiLock {
        Many::of(members, crate::MultiLock::new)
    }

    /// Adds a lock to the members.
    #[must_use]
    pub fn and(mut self, member: impl Into<Member>) -> MultiLock {
        let Member { inner, worker } = member.into();
        self.inner = self.inner.and(inner);
        self.workers.push(worker);
        self
    }
}

impl RedLock {
    /// Creates a handle of the lock that these members form: [`crate::RedLock::new`].
    pub fn new<M: Into<Member>>(members: impl IntoIterator<Item = M>) -> RedLock {
        Many::of(members, crate::RedLock::new)
    }

    /// Adds a member.
    #[must_use]
    pub fn and(mut self, member: impl Into<Member>) -> RedLock {
        let Member { inner, worker } = member.into();
        self.inner = self.inner.and(inner);
        self.workers.push(worker);
        self
    }

    /// Sets how long a member may take to answer: [`crate::RedLock::timeout`].
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> RedLock {
        self.inner = self.inner.timeout(timeout);
        self
    }

    /// Sets the pause between rounds: [`crate::RedLock::backoff`].
    #[must_use]
    pub fn backoff(mut self, backoff: Backoff) -> RedLock {
        self.inner = self.inner.backoff(backoff);
        self
    }
}

impl<L: LockOfMany> Many<L> {
    fn of<M: Into<Member>>(
        members: impl IntoIterator<Item = M>,
        make: impl FnOnce(Vec<crate::Member>) -> L,
    ) -> Many<L> {
        let members: Vec<Member> = members.into_iter().map(Into::into).collect();
        let workers = members.iter().map(|member| member.worker.clone());
        Many {
            workers: workers.collect(),
            inner: make(members.into_iter().map(|member| member.inner).collect()),
            lease: None,
            outage_limit: None,
        }
    }

    /// Returns a handle of the same locks that holds them for exactly this long, without renewal:
    /// [`crate::AcquireMany::lease`].
    #[must_use]
    pub fn with_lease(mut self, lease: Duration) -> Many<L> {
        self.lease = Some(lease);
        self
    }

    /// Returns a handle of the same locks whose waiters wait through an outage of the stores that
    /// lasts at most this long: [`crate::AcquireMany::outage_limit`].
    #[must_use]
    pub fn with_outage_limit(mut self, limit: Duration) -> Many<L> {
        self.outage_limit = Some(limit);
        self
    }

    /// Blocks until they are acquired.
    pub fn lock(&self) -> Result<ManyGuard<L>> {
        let mut request = crate::AcquireMany::new(&self.inner).owner(current_thread());
        if let Some(lease) = self.lease {
            request = request.lease(lease);
        }
        if let Some(limit) = self.outage_limit {
            request = request.outage_limit(limit);
        }
        let guard = self.worker()?.run(request.into_future())??;
        Ok(self.guard(guard))
    }

    /// Acquires them if they are free; blocks for one answer of the stores.
    pub fn try_lock(&self) -> Result<Option<ManyGuard<L>>> {
        self.try_lock_for(Duration::ZERO)
    }

    /// Blocks until they are acquired, at most this long: [`crate::TryAcquireMany::wait`].
    pub fn try_lock_for(&self, wait: Duration) -> Result<Option<ManyGuard<L>>> {
        let request = crate::TryAcquireMany::new(&self.inner);
        let mut request = request.owner(current_thread()).wait(wait);
        if let Some(lease) = self.lease {
            request = request.lease(lease);
        }
        if let Some(limit) = self.outage_limit {
            request = request.outage_limit(limit);
        }
        let guard = self.worker()?.run(request.into_future())??;
        Ok(guard.map(|guard| self.guard(guard)))
    }

    fn worker(&self) -> Result<&Worker> {
        first(&self.workers)
    }

    fn guard(&self, inner: L::Guard) -> ManyGuard<L> {
        ManyGuard {
            inner,
            workers: self.workers.clone(),
            thread: PhantomData,
        }
    }
}

fn first(workers: &[Arc<Worker>]) -> Result<&Worker> {
    let first = workers.first().map(AsRef::as_ref);
    first.ok_or_else(|| Error::InvalidMembers {
        reason: "there are none; specify at least one".into(),
    })
}

/// Several locks held by a thread: [`crate::MultiGuard`] or [`crate::RedGuard`].
///
/// Dropping does not block: it releases in the background. The guard stays on its thread, because
/// the thread is the owner.
#[must_use = "the locks are released as soon as the guard is dropped"]
pub struct ManyGuard<L: LockOfMany> {
    inner: L::Guard,
    /// Same as [`Many`]'s.
    workers: Vec<Arc<Worker>>,
    thread: PhantomData<*const ()>,
}

macro_rules! guard_of {
    ($lock:ty, $guard:ident) => {
        impl Many<$lock> {
            /// Returns the names of the locks, in the order in which they were passed in.
            pub fn names(&self) -> impl Iterator<Item = &str> {
                self.inner.names()
            }

            /// Returns whether the calling thread holds it, according to the stores: the async `is_held_by`.
            pub fn is_held_by_current_thread(&self) -> Result<bool> {
                let (lock, me) = (self.inner.clone(), current_thread());
                self.worker()?.run(async move { lock.is_held_by(me).await })?
            }
        }

        impl ManyGuard<$lock> {
            #[doc = concat!("Releases and waits until it is confirmed: [`crate::", stringify!($guard), "::unlock`].")]
            pub fn unlock(self) -> Result<()> {
                first(&self.workers)?.run(self.inner.unlock())?
            }

            #[doc = concat!("Returns whether it is certainly held: [`crate::", stringify!($guard), "::is_valid`].")]
            pub fn is_valid(&self) -> bool {
                self.inner.is_valid()
            }

            #[doc = concat!("Returns how long it is certainly held: [`crate::", stringify!($guard), "::valid_for`].")]
            pub fn valid_for(&self) -> Duration {
                self.inner.valid_for()
            }

            /// Returns the thread's owner: [`current_thread`].
            pub fn owner(&self) -> Owner {
                self.inner.owner()
            }
        }

        impl std::fmt::Debug for ManyGuard<$lock> {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.inner.fmt(f)
            }
        }
    };
}

guard_of!(crate::MultiLock, MultiGuard);
guard_of!(crate::RedLock, RedGuard);

impl ManyGuard<crate::MultiLock> {
    /// Returns the names of the locks: [`crate::MultiGuard::names`].
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.inner.names()
    }

    /// Returns the fencing token of this fenced lock: [`crate::MultiGuard::token`].
    pub fn token(&self, lock: &Lock<crate::kind::Fenced>) -> Option<u64> {
        self.inner.token(&lock.inner)
    }
}

impl ManyGuard<crate::RedLock> {
    /// Returns how many members granted the lock and are known to keep it:
    /// [`crate::RedGuard::held`].
    pub fn held(&self) -> usize {
        self.inner.held()
    }
}
