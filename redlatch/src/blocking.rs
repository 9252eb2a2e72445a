//! The same locks for threads: no runtime needed, the thread is the owner.
//!
//! As in Java, a thread that holds a lock and asks for it again gets it again (re-entrancy), and
//! all threads exclude each other. The client brings a thread of its own on which its connection,
//! its watchdog and its background work run; calls block the calling thread until that has
//! answered.
//!
//! In async code use the async API: these calls block the thread that they are made on. They do not
//! panic there.
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

use std::future::Future;
use std::marker::PhantomData;
use std::sync::{Arc, OnceLock, mpsc};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::background::Background;
use crate::error::{Error, Result};
use crate::{ClientBuilder, ClientStatus, Embedded, Holder, Owner};

thread_local! {
    static THREAD: Owner = Owner::new();
}

/// The owner that the calling thread is in this module: what [`Lock::holder`] shows when this
/// thread holds a lock.
pub fn current_thread() -> Owner {
    // A thread that is being torn down has lost its identity; it can only be somebody new.
    THREAD
        .try_with(|owner| *owner)
        .unwrap_or_else(|_| Owner::new())
}

/// A connection to a store, for threads: [`crate::Client`].
///
/// Clones share one connection and one thread, which ends with the last of them and of their
/// handles and guards, after what was dropped has been given back. The end of the process does not
/// wait for that: call [`Client::settled`] before it, if guards were dropped shortly before.
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

    /// A client of an embedded store of its own.
    pub fn embedded() -> Result<Client> {
        Client::with_embedded(crate::Client::builder(), &Embedded::new())
    }

    /// A client of an embedded store that others may share, also async ones.
    pub fn with_embedded(settings: ClientBuilder, store: &Embedded) -> Result<Client> {
        let worker = Worker::start()?;
        let store = store.clone();
        let inner = worker.run(async move { settings.connect_embedded(&store) })??;
        Ok(Client::of(inner, worker))
    }

    fn of(inner: crate::Client, worker: Arc<Worker>) -> Client {
        let _ = worker.background.set(inner.background());
        Client { inner, worker }
    }

    /// A handle of the re-entrant lock called `name`: [`crate::Client::lock`].
    pub fn lock(&self, name: &str) -> Lock {
        Lock {
            inner: self.inner.lock(name),
            lease: None,
            worker: self.worker.clone(),
        }
    }

    /// The id of this client in the store.
    pub fn id(&self) -> &str {
        self.inner.id()
    }

    /// What this client keeps account of: [`crate::Client::status`].
    pub fn status(&self) -> ClientStatus {
        self.inner.status()
    }

    /// Blocks until nothing is being done in the background any more: [`crate::Client::settled`].
    pub fn settled(&self) -> Result<()> {
        let client = self.inner.clone();
        self.worker.run(async move { client.settled().await })
    }
}

/// A handle of a lock, for threads: [`crate::Lock`]. The errors are those of the async methods of
/// the same names.
#[derive(Clone, Debug)]
pub struct Lock {
    inner: crate::Lock,
    lease: Option<Duration>,
    worker: Arc<Worker>,
}

impl Lock {
    /// The same lock, held for exactly this long when acquired through this handle, and not
    /// renewed: [`crate::Acquire::lease`].
    #[must_use]
    pub fn with_lease(mut self, lease: Duration) -> Lock {
        self.lease = Some(lease);
        self
    }

    /// The same lock, which a thread must not enter twice: [`crate::Lock::non_reentrant`].
    #[must_use]
    pub fn non_reentrant(mut self) -> Lock {
        self.inner = self.inner.non_reentrant();
        self
    }

    /// The name, as it was given.
    pub fn name(&self) -> &str {
        self.inner.name()
    }

    /// Blocks until the lock is had.
    pub fn lock(&self) -> Result<Guard> {
        let mut request = self.inner.lock().owner(current_thread());
        if let Some(lease) = self.lease {
            request = request.lease(lease);
        }
        let guard = self.worker.run(request.into_future())??;
        Ok(self.guard(guard))
    }

    /// Takes the lock if it is free; blocks for one answer of the store.
    pub fn try_lock(&self) -> Result<Option<Guard>> {
        self.try_lock_for(Duration::ZERO)
    }

    /// Blocks until the lock is had, at most this long: [`crate::TryAcquire::wait`].
    pub fn try_lock_for(&self, wait: Duration) -> Result<Option<Guard>> {
        let mut request = self.inner.try_lock().owner(current_thread()).wait(wait);
        if let Some(lease) = self.lease {
            request = request.lease(lease);
        }
        let guard = self.worker.run(request.into_future())??;
        Ok(guard.map(|guard| self.guard(guard)))
    }

    /// Whether anybody holds the lock.
    pub fn is_locked(&self) -> Result<bool> {
        let lock = self.inner.clone();
        self.worker.run(async move { lock.is_locked().await })?
    }

    /// Whether the calling thread holds the lock, as the store sees it.
    pub fn is_held_by_current_thread(&self) -> Result<bool> {
        Ok(self.hold_count()? > 0)
    }

    /// How often the calling thread holds the lock, as the store sees it.
    pub fn hold_count(&self) -> Result<u32> {
        let (lock, me) = (self.inner.clone(), current_thread());
        self.worker.run(async move { lock.hold_count(me).await })?
    }

    /// How long the lock is held at most unless it is renewed; `None` if it is free.
    pub fn remaining_lease(&self) -> Result<Option<Duration>> {
        let lock = self.inner.clone();
        self.worker
            .run(async move { lock.remaining_lease().await })?
    }

    /// Who holds the lock.
    pub fn holder(&self) -> Result<Option<Holder>> {
        let lock = self.inner.clone();
        self.worker.run(async move { lock.holder().await })?
    }

    /// Takes the lock from whoever holds it: [`crate::Lock::force_unlock`].
    pub fn force_unlock(&self) -> Result<bool> {
        let lock = self.inner.clone();
        self.worker.run(async move { lock.force_unlock().await })?
    }

    fn guard(&self, guard: crate::Guard) -> Guard {
        Guard {
            inner: Some(guard),
            worker: self.worker.clone(),
            thread: PhantomData,
        }
    }
}

/// A lock held by a thread: [`crate::Guard`].
///
/// Dropping does not block: it releases in the background. It stays on its thread, because the
/// thread is the owner.
#[must_use = "the lock is released as soon as the guard is dropped"]
#[derive(Debug)]
pub struct Guard {
    /// `None` only inside of `unlock`.
    inner: Option<crate::Guard>,
    worker: Arc<Worker>,
    thread: PhantomData<*const ()>,
}

impl Guard {
    /// Releases the lock and returns when the store has done so: [`crate::Guard::unlock`].
    pub fn unlock(mut self) -> Result<()> {
        match self.inner.take() {
            Some(guard) => self.worker.run(guard.unlock())?,
            None => Ok(()),
        }
    }

    /// Whether the lock is certainly still held: [`crate::Guard::is_valid`].
    pub fn is_valid(&self) -> bool {
        self.inner.as_ref().is_some_and(crate::Guard::is_valid)
    }

    /// For how long the lock is certainly held if nothing renews it.
    pub fn valid_for(&self) -> Duration {
        self.inner
            .as_ref()
            .map_or(Duration::ZERO, crate::Guard::valid_for)
    }

    /// How many guards this thread has of the lock.
    pub fn hold_count(&self) -> u32 {
        self.inner.as_ref().map_or(0, crate::Guard::hold_count)
    }

    /// The thread's owner: [`current_thread`].
    pub fn owner(&self) -> Owner {
        self.inner
            .as_ref()
            .map_or_else(current_thread, crate::Guard::owner)
    }
}

/// How long a client's thread goes on after its last handle, to give back what was dropped.
const LAST_WORK: Duration = Duration::from_secs(10);

/// The thread on which a blocking client works.
struct Worker {
    runtime: Handle,
    /// What has to be done before the thread ends.
    background: Arc<OnceLock<Background>>,
    /// Dropped with the worker, which ends the thread.
    _ends: oneshot::Sender<std::convert::Infallible>,
}

impl Worker {
    fn start() -> Result<Arc<Worker>> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|_| Error::NoRuntime)?;
        let handle = runtime.handle().clone();
        let (ends, ended) = oneshot::channel();
        let background: Arc<OnceLock<Background>> = Arc::default();
        let unfinished = background.clone();
        let work = async move {
            let _ = ended.await;
            if let Some(background) = unfinished.get() {
                let _ = tokio::time::timeout(LAST_WORK, background.settled()).await;
            }
        };
        std::thread::Builder::new()
            .name("redlatch".into())
            .spawn(move || runtime.block_on(work))
            .map_err(|_| Error::NoRuntime)?;
        Ok(Arc::new(Worker {
            runtime: handle,
            background,
            _ends: ends,
        }))
    }

    /// Runs `work` on the thread and blocks until it is done. Unlike `block_on` this never panics,
    /// wherever it is called.
    fn run<F>(&self, work: F) -> Result<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        let (tell, told) = mpsc::sync_channel(1);
        self.runtime.spawn(async move {
            let _ = tell.send(work.await);
        });
        told.recv().map_err(|_| Error::NoRuntime)
    }
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Worker").finish_non_exhaustive()
    }
}
