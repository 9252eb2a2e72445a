//! The same locks for threads: they need no runtime, and the thread is the owner.
//!
//! As in Java, a thread that holds a lock may acquire it again (re-entrancy), and threads exclude
//! each other. The client starts its own thread, on which its connection, its watchdog and its
//! background work run; calls block the calling thread until it has answered.
//!
//! In async code use the async API: these calls block the thread on which they are made. They do
//! not panic there.
//!
//! ```
//! use std::time::Duration;
//!
//! # fn main() -> redlatch::Result<()> {
//! let client = redlatch::blocking::Client::embedded()?; // or connect("redis://127.0.0.1")?
//! let lock = client.lock("orders:42");
//! let outer = lock.lock()?;
//! let inner = lock.lock()?; // the same thread: re-entered
//! assert_eq!(inner.hold_count(), 2);
//! inner.unlock()?;
//! outer.unlock()?;
//!
//! let brief = lock.with_lease(Duration::from_secs(10));
//! let guard = brief.try_lock_for(Duration::from_secs(1))?;
//! assert!(guard.is_some());
//! # Ok(()) }
//! ```

use std::sync::Arc;

use crate::error::Result;
use crate::kind::{Fair, Fenced, LockKind, Spin};
use crate::{ClientBuilder, ClientStatus, Embedded, Owner};

mod count_down_latch;
mod expirable_semaphore;
mod fair_lock;
mod lock;
mod many;
mod read_write_lock;
mod semaphore;
mod worker;

pub use count_down_latch::CountDownLatch;
pub use expirable_semaphore::{ExpirableSemaphore, PermitGuard};
pub use lock::{Guard, Lock};
pub use many::{Many, ManyGuard, Member, MultiLock, RedLock};
pub use read_write_lock::ReadWriteLock;
pub use semaphore::{Semaphore, SemaphorePermits};
use worker::Worker;

thread_local! {
    static THREAD: Owner = Owner::new();
}

/// Returns the owner that identifies the calling thread in this module: what [`Lock::holder`]
/// returns when this thread holds a lock.
pub fn current_thread() -> Owner {
    // A thread that is being destroyed has lost its identity, so it gets a new one.
    THREAD
        .try_with(|owner| *owner)
        .unwrap_or_else(|_| Owner::new())
}

/// A connection to a store, for threads: [`crate::Client`].
///
/// Clones share one connection and one thread. The thread ends with the last of them and of their
/// handles and guards, after everything that was dropped has been released. The process does not
/// wait for that when it exits: call [`Client::flush`] first if guards were dropped shortly before.
#[derive(Clone, Debug)]
pub struct Client {
    inner: crate::Client,
    worker: Arc<Worker>,
}

impl Client {
    /// Connects with the default settings: [`crate::Client::connect`].
    pub fn connect(url: &str) -> Result<Client> {
        Client::with(crate::Client::builder(), url)
    }

    /// Connects with other settings: [`ClientBuilder::connect`].
    pub fn with(settings: ClientBuilder, url: &str) -> Result<Client> {
        let worker = Worker::start()?;
        let url = url.to_owned();
        let inner = worker.run(async move { settings.connect(&url).await })??;
        Ok(Client::of(inner, worker))
    }

    /// Creates a client of a new embedded store.
    pub fn embedded() -> Result<Client> {
        Client::with_embedded(crate::Client::builder(), &Embedded::new())
    }

    /// Creates a client of an embedded store that other clients may share, also async ones.
    pub fn with_embedded(settings: ClientBuilder, store: &Embedded) -> Result<Client> {
        let worker = Worker::start()?;
        let store = store.clone();
        let inner = worker.run(async move { settings.connect_embedded(&store) })??;
        Ok(Client::of(inner, worker))
    }

    fn of(inner: crate::Client, worker: Arc<Worker>) -> Client {
        worker.manage(inner.background());
        Client { inner, worker }
    }

    /// Returns a handle of the re-entrant lock called `name`: [`crate::Client::lock`].
    pub fn lock(&self, name: &str) -> Lock {
        self.lock_of(self.inner.lock(name))
    }

    /// Returns a handle of the expirable semaphore called `name`:
    /// [`crate::Client::expirable_semaphore`].
    pub fn expirable_semaphore(&self, name: &str) -> ExpirableSemaphore {
        ExpirableSemaphore::new(self.inner.expirable_semaphore(name), self.worker.clone())
    }

    /// Returns a handle of the count-down latch called `name`: [`crate::Client::count_down_latch`].
    pub fn count_down_latch(&self, name: &str) -> CountDownLatch {
        CountDownLatch {
            inner: self.inner.count_down_latch(name),
            worker: self.worker.clone(),
        }
    }

    /// Returns a handle of the fair lock called `name`: [`crate::Client::fair_lock`].
    pub fn fair_lock(&self, name: &str) -> Lock<Fair> {
        self.lock_of(self.inner.fair_lock(name))
    }

    /// Returns a handle of the fenced lock called `name`: [`crate::Client::fenced_lock`].
    pub fn fenced_lock(&self, name: &str) -> Lock<Fenced> {
        self.lock_of(self.inner.fenced_lock(name))
    }

    /// Returns a handle of the read-write lock called `name`: [`crate::Client::read_write_lock`].
    pub fn read_write_lock(&self, name: &str) -> ReadWriteLock {
        ReadWriteLock {
            inner: self.inner.read_write_lock(name),
            worker: self.worker.clone(),
        }
    }

    /// Returns a handle of the semaphore called `name`: [`crate::Client::semaphore`].
    pub fn semaphore(&self, name: &str) -> Semaphore {
        Semaphore {
            inner: self.inner.semaphore(name),
            outage_limit: None,
            worker: self.worker.clone(),
        }
    }

    /// Returns a handle of the spin lock called `name`: [`crate::Client::spin_lock`].
    pub fn spin_lock(&self, name: &str) -> Lock<Spin> {
        self.lock_of(self.inner.spin_lock(name))
    }

    fn lock_of<K: LockKind>(&self, inner: crate::Lock<K>) -> Lock<K> {
        Lock {
            inner,
            lease: None,
            outage_limit: None,
            worker: self.worker.clone(),
        }
    }

    /// Returns the id of this client in the store.
    pub fn id(&self) -> &str {
        self.inner.id()
    }

    /// Returns the state of this client: [`crate::Client::status`].
    pub fn status(&self) -> ClientStatus {
        self.inner.status()
    }

    /// Blocks until no background work is left: [`crate::Client::flush`].
    pub fn flush(&self) -> Result<()> {
        let client = self.inner.clone();
        self.worker.run(async move { client.flush().await })
    }
}
