//! The handles of locks, semaphores and latches for threads.

use std::time::Duration;

use super::forward::forward;
use super::request::{Acquire, Guard, TryAcquire, TrySetPermits, TryWait, Wait};
use super::{Blocking, Worker, current_thread};
use crate::error::Result;
use crate::inspect::{HeldPermit, Holder, Waiter};
use crate::kind::{FairPermits, FairShared, OwnedKind, Permits, QueuedKind, Reentrant};
use crate::{Backoff, Expiry, Owner, PermitId};

/// A handle of a lock: [`crate::Lock`].
pub type Lock<K = Reentrant> = Blocking<crate::Lock<K>>;

/// A handle of a fair lock: [`crate::FairLock`].
pub type FairLock = Blocking<crate::FairLock>;

/// A handle of a fenced lock: [`crate::FencedLock`].
pub type FencedLock = Blocking<crate::FencedLock>;

/// A handle of a spin lock: [`crate::SpinLock`].
pub type SpinLock = Blocking<crate::SpinLock>;

/// A handle of the lock of one value of a group: [`crate::GroupLock`].
pub type GroupLock = Blocking<crate::GroupLock>;

/// The read side of a read-write lock: [`crate::ReadLock`].
pub type ReadLock = Blocking<crate::ReadLock>;

/// The write side of a read-write lock: [`crate::WriteLock`].
pub type WriteLock = Blocking<crate::WriteLock>;

/// A lock that either many reading threads or one writing thread holds: [`crate::ReadWriteLock`].
///
/// ```
/// # fn main() -> redlatch::Result<()> {
/// let client = redlatch::blocking::Client::embedded()?; // or connect("redis://127.0.0.1")?
/// let catalogue = client.read_write_lock("catalogue");
/// let writer = catalogue.write().lock().block()?;
/// let reader = catalogue.read().lock().block()?; // the same thread: a writer may also read
/// writer.unlock()?;
/// assert!(!catalogue.write().is_locked()?);
/// reader.unlock()
/// # }
/// ```
pub type ReadWriteLock = Blocking<crate::ReadWriteLock>;

/// The read side of a fair read-write lock: [`crate::FairReadLock`].
pub type FairReadLock = Blocking<crate::FairReadLock>;

/// The write side of a fair read-write lock: [`crate::FairWriteLock`].
pub type FairWriteLock = Blocking<crate::FairWriteLock>;

/// A read-write lock that is acquired in the order of the requests: [`crate::FairReadWriteLock`].
///
/// ```
/// # fn main() -> redlatch::Result<()> {
/// let client = redlatch::blocking::Client::embedded()?; // or connect("redis://127.0.0.1")?
/// let catalogue = client.fair_read_write_lock("catalogue");
/// let writer = catalogue.write().lock().block()?;
/// let reader = catalogue.read().lock().block()?; // the same thread: a writer may also read
/// writer.unlock()?;
/// assert!(catalogue.queue()?.is_empty());
/// reader.unlock()
/// # }
/// ```
pub type FairReadWriteLock = Blocking<crate::FairReadWriteLock>;

/// A handle of a fair semaphore: [`crate::FairSemaphore`].
///
/// ```
/// # fn main() -> redlatch::Result<()> {
/// let client = redlatch::blocking::Client::embedded()?; // or connect("redis://127.0.0.1")?
/// let jobs = client.fair_semaphore("heavy-jobs", 1);
/// let permit = jobs.acquire().block()?;
/// assert!(jobs.try_acquire().block()?.is_none());
/// permit.release()
/// # }
/// ```
pub type FairSemaphore = Blocking<crate::FairSemaphore>;

/// What permits of a fair semaphore are acquired of.
type FairPermitLock = crate::Lock<FairShared<FairPermits>>;

/// Several locks that are held together or not at all: [`crate::MultiLock`].
///
/// ```
/// # fn main() -> redlatch::Result<()> {
/// use redlatch::blocking::{Client, MultiLock};
///
/// let client = Client::embedded()?; // or connect("redis://127.0.0.1")?
/// let both = MultiLock::new([client.lock("account:1"), client.lock("account:2")]);
/// let guard = both.lock().block()?;
/// assert!(client.lock("account:2").is_held_by_current_thread()?);
/// guard.unlock()
/// # }
/// ```
pub type MultiLock = Blocking<crate::MultiLock>;

/// A lock on several independent servers: [`crate::RedLock`].
///
/// ```
/// # fn main() -> redlatch::Result<()> {
/// use redlatch::blocking::{Client, RedLock};
///
/// let clients = [Client::embedded()?, Client::embedded()?, Client::embedded()?];
/// let lock = RedLock::new(clients.each_ref().map(|client| client.lock("orders:42")));
/// let guard = lock.lock().block()?;
/// assert!(guard.is_valid());
/// guard.unlock()
/// # }
/// ```
pub type RedLock = Blocking<crate::RedLock>;

/// A lock as a member of several locks: created `From` a [`Lock`] or a reference to one.
pub type Member = Blocking<crate::Member>;

/// A handle of a semaphore: [`crate::Semaphore`], which also describes when to use another type.
///
/// ```
/// # fn main() -> redlatch::Result<()> {
/// let client = redlatch::blocking::Client::embedded()?; // or connect("redis://127.0.0.1")?
/// let downloads = client.semaphore("downloads");
/// downloads.try_set_permits(1).block()?;
/// let permit = downloads.acquire().block()?;
/// assert!(downloads.try_acquire().block()?.is_none());
/// # permit.release() }
/// ```
pub type Semaphore = Blocking<crate::Semaphore>;

/// A handle of an expirable semaphore: [`crate::ExpirableSemaphore`].
///
/// ```
/// use std::time::Duration;
///
/// # fn main() -> redlatch::Result<()> {
/// let client = redlatch::blocking::Client::embedded()?; // or connect("redis://127.0.0.1")?
/// let jobs = client.expirable_semaphore("heavy-jobs");
/// jobs.try_set_permits(1)?;
/// let permit = jobs.acquire().block()?;
/// let brief = Duration::from_millis(1);
/// assert!(jobs.try_acquire().wait(brief).block()?.is_none());
/// permit.release()?;
/// assert_eq!(jobs.available()?, 1);
/// # Ok(()) }
/// ```
pub type ExpirableSemaphore = Blocking<crate::ExpirableSemaphore>;

/// A handle of a count-down latch: [`crate::CountDownLatch`].
///
/// ```
/// # fn main() -> redlatch::Result<()> {
/// let client = redlatch::blocking::Client::embedded()?; // or connect("redis://127.0.0.1")?
/// let ready = client.count_down_latch("workers-ready");
/// ready.try_set_count(1)?;
/// let other = ready.clone();
/// let worker = std::thread::spawn(move || other.count_down());
/// ready.wait().block()?;
/// # worker.join().unwrap()?; Ok(()) }
/// ```
pub type CountDownLatch = Blocking<crate::CountDownLatch>;

forward! { [<K: OwnedKind> Lock<K>] "crate::Lock" {
    get name() -> &str;
    set non_reentrant();
    new lock() -> Acquire<crate::Lock<K>>;
    new try_lock() -> TryAcquire<crate::Lock<K>>;
    run is_locked() -> bool;
    run is_held_by(owner: Owner) -> bool;
    run hold_count(owner: Owner) -> u32;
    run remaining_lease() -> Option<Expiry>;
    run holder() -> Option<Holder>;
    run holders() -> Vec<Holder>;
    run force_unlock() -> bool;
} }

forward! { [<K: QueuedKind> Lock<K>] "crate::Lock" {
    set wait_time(wait_time: Duration);
    set grace_period(grace_period: Duration);
    run queue() -> Vec<Waiter>;
    run position(owner: Owner) -> Option<usize>;
} }

forward! { [SpinLock] "crate::SpinLock" {
    set backoff(backoff: Backoff);
} }

forward! { [FencedLock] "crate::FencedLock" {
    set clock_tokens();
    run current_token() -> u64;
    run advance_token(at_least: u64) -> u64;
    run delete_token() -> bool;
} }

forward! { [ReadWriteLock] "crate::ReadWriteLock" {
    get name() -> &str;
    set prefer_writers();
    new read() -> ReadLock;
    new write() -> WriteLock;
} }

forward! { [FairReadWriteLock] "crate::FairReadWriteLock" {
    get name() -> &str;
    set wait_time(wait_time: Duration);
    set grace_period(grace_period: Duration);
    new read() -> FairReadLock;
    new write() -> FairWriteLock;
    run queue() -> Vec<Waiter>;
} }

forward! { [FairSemaphore] "crate::FairSemaphore" {
    get name() -> &str;
    set wait_time(wait_time: Duration);
    set grace_period(grace_period: Duration);
    new acquire() -> Acquire<FairPermitLock>;
    new acquire_many(permits: u32) -> Acquire<FairPermitLock>;
    new try_acquire() -> TryAcquire<FairPermitLock>;
    new try_acquire_many(permits: u32) -> TryAcquire<FairPermitLock>;
    run available() -> i64;
    run holders() -> Vec<Holder>;
    run queue() -> Vec<Waiter>;
    run force_release() -> bool;
} }

impl FairSemaphore {
    /// Acquires one permit, calls `work` while it is held, and releases it: [`Acquire::run`].
    pub fn run<T>(&self, work: impl FnOnce(&Guard<FairPermitLock>) -> T) -> Result<T> {
        self.acquire().run(work)
    }
}

forward! { [MultiLock] "crate::MultiLock" {
    get names() -> impl Iterator<Item = &str>;
    new lock() -> Acquire<crate::MultiLock>;
    new try_lock() -> TryAcquire<crate::MultiLock>;
    run is_held_by(owner: Owner) -> bool;
} }

forward! { [RedLock] "crate::RedLock" {
    get names() -> impl Iterator<Item = &str>;
    set member_timeout(timeout: Duration);
    set backoff(backoff: Backoff);
    new lock() -> Acquire<crate::RedLock>;
    new try_lock() -> TryAcquire<crate::RedLock>;
    run is_held_by(owner: Owner) -> bool;
} }

forward! { [Semaphore] "crate::Semaphore" {
    get name() -> &str;
    new try_set_permits(permits: u32) -> TrySetPermits;
    new acquire() -> Acquire<crate::Semaphore>;
    new acquire_many(permits: u32) -> Acquire<crate::Semaphore>;
    new try_acquire() -> TryAcquire<crate::Semaphore>;
    new try_acquire_many(permits: u32) -> TryAcquire<crate::Semaphore>;
    run release(permits: u32) -> ();
    run release_if_exists(permits: u32) -> bool;
    run add_permits(permits: i32) -> ();
    run drain() -> i64;
    run available() -> i64;
    run delete() -> bool;
} }

forward! { [ExpirableSemaphore] "crate::ExpirableSemaphore" {
    get name() -> &str;
    set permits(permits: u32);
    new acquire() -> Acquire<crate::Lock<Permits>>;
    new acquire_many(permits: u32) -> Acquire<crate::Lock<Permits>>;
    new try_acquire() -> TryAcquire<crate::Lock<Permits>>;
    new try_acquire_many(permits: u32) -> TryAcquire<crate::Lock<Permits>>;
    run release(id: PermitId) -> ();
    run release_many(ids: &[PermitId]) -> ();
    run try_release(id: PermitId) -> bool;
    run try_release_many(ids: &[PermitId]) -> usize;
    run update_lease(id: PermitId, lease: Duration) -> bool;
    run lease_of(id: PermitId) -> Option<Expiry>;
    run available() -> i64;
    run acquired() -> i64;
    run total() -> i64;
    run held_permits() -> Vec<HeldPermit>;
    run try_set_permits(permits: u32) -> bool;
    run set_permits(permits: u32) -> ();
    run add_permits(permits: i32) -> ();
    run force_release() -> bool;
    run delete() -> bool;
} }

forward! { [CountDownLatch] "crate::CountDownLatch" {
    get name() -> &str;
    run try_set_count(count: u32) -> bool;
    run count_down() -> u64;
    run count_down_by(by: u32) -> u64;
    run count() -> u64;
    new wait() -> Wait;
    new try_wait() -> TryWait;
    run delete() -> bool;
} }

impl<K: OwnedKind> Lock<K> {
    /// Acquires the lock, calls `work` while it is held, and releases it: [`Acquire::run`].
    pub fn run<T>(&self, work: impl FnOnce(&Guard<crate::Lock<K>>) -> T) -> Result<T> {
        self.lock().run(work)
    }

    /// Returns whether the calling thread holds the lock, according to the store.
    pub fn is_held_by_current_thread(&self) -> Result<bool> {
        self.is_held_by(current_thread())
    }
}

impl ExpirableSemaphore {
    /// Acquires one permit, calls `work` while it is held, and releases it: [`Acquire::run`].
    pub fn run<T>(&self, work: impl FnOnce(&Guard<crate::Lock<Permits>>) -> T) -> Result<T> {
        self.acquire().run(work)
    }
}

impl<K: OwnedKind> From<&Lock<K>> for Member {
    fn from(lock: &Lock<K>) -> Member {
        Blocking {
            inner: crate::Member::from(&lock.inner),
            worker: lock.worker.clone(),
        }
    }
}

impl<K: OwnedKind> From<Lock<K>> for Member {
    fn from(lock: Lock<K>) -> Member {
        Member::from(&lock)
    }
}

/// Methods of several locks. The calls run on the thread of the first member's client.
macro_rules! lock_set {
    ($lock:ident) => {
        impl $lock {
            #[doc = concat!("Creates a handle: [`crate::", stringify!($lock), "::new`].")]
            pub fn new<M: Into<Member>>(members: impl IntoIterator<Item = M>) -> $lock {
                let members = members.into_iter().map(Into::into);
                let (inner, workers): (Vec<_>, _) =
                    members.map(|member| (member.inner, member.worker)).unzip();
                Blocking {
                    inner: crate::$lock::new(inner),
                    worker: Worker::joined(workers),
                }
            }

            /// Adds a member.
            #[must_use]
            pub fn and(self, member: impl Into<Member>) -> $lock {
                let member = member.into();
                Blocking {
                    inner: self.inner.and(member.inner),
                    worker: Worker::joined(vec![self.worker, member.worker]),
                }
            }

            /// Acquires, calls `work` while it is held, and releases: [`Acquire::run`].
            pub fn run<T>(&self, work: impl FnOnce(&Guard<crate::$lock>) -> T) -> Result<T> {
                self.lock().run(work)
            }

            /// Returns whether the calling thread holds it, according to the stores.
            pub fn is_held_by_current_thread(&self) -> Result<bool> {
                self.is_held_by(current_thread())
            }
        }
    };
}

lock_set!(MultiLock);
lock_set!(RedLock);
