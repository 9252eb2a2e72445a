//! The client for threads.

use std::sync::Arc;
use std::time::Duration;

use super::election::Election;
use super::forward::forward;
use super::handles::{
    CountDownLatch, ExpirableSemaphore, FairLock, FairReadWriteLock, FairSemaphore, FencedLock,
    GroupLock, Lock, MultiLock, ReadWriteLock, Semaphore, SpinLock,
};
use super::once::Once;
use super::polled::Polled;
use super::{Blocking, Worker};
use crate::error::{Error, Result};
use crate::inspect::{Event, Listed, ObjectState, WaitGraph, WaitingOwner};
use crate::{ClientBuilder, ClientStatus, Embedded, GroupValue, Owner, OwnerId, Slot, Unsettled};

/// A connection to a store, for threads: [`crate::Client`].
///
/// Clones share one connection and one thread. The thread ends with the last of them and of their
/// handles and guards, after everything that was dropped has been released. The process does not
/// wait for that when it exits: call [`Client::flush`] first if guards were dropped shortly before.
/// (A client from [`crate::Client::blocking`] has no thread: the async client's runtime does its
/// work.)
pub type Client = Blocking<crate::Client>;

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
        Ok(Client::managed(inner, worker))
    }

    /// Connects to the server of a client of the crate `redis`: [`crate::Client::from_redis`].
    #[cfg(feature = "redis")]
    pub fn from_redis(client: &redis::Client) -> Result<Client> {
        Client::with_redis(crate::Client::builder(), client)
    }

    /// Connects to such a server with other settings: [`ClientBuilder::connect_redis`].
    #[cfg(feature = "redis")]
    pub fn with_redis(settings: ClientBuilder, client: &redis::Client) -> Result<Client> {
        let worker = Worker::start()?;
        let client = client.clone();
        let inner = worker.run(async move { settings.connect_redis(&client).await })??;
        Ok(Client::managed(inner, worker))
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
        Ok(Client::managed(inner, worker))
    }

    /// Runs the background work of this client on its thread.
    fn managed(inner: crate::Client, worker: Arc<Worker>) -> Client {
        worker.manage(inner.background());
        Client { inner, worker }
    }

    /// Lists the objects whose names match a pattern: [`crate::Client::list`].
    pub fn list(&self, pattern: &str) -> Listing {
        Listing(Polled::new(self.inner.list(pattern), &self.worker))
    }

    /// Returns the events of the objects whose names match a pattern: [`crate::Client::watch`].
    pub fn watch(&self, pattern: &str) -> Watch {
        Watch(Polled::new(self.inner.watch(pattern), &self.worker))
    }

    /// Blocks until no background work is left: [`crate::Client::flush`].
    pub fn flush(&self) -> Result<()> {
        let client = self.inner.clone();
        self.worker.run(async move { client.flush().await })
    }

    /// Blocks until no background work is left, at most this long: [`crate::Client::flush_within`].
    pub fn flush_within(&self, limit: Duration) -> Result<Unsettled> {
        let client = self.inner.clone();
        self.worker
            .run(async move { client.flush_within(limit).await })
    }
}

forward! { [Client] "crate::Client" {
    new lock(name: &str) -> Lock;
    new expirable_semaphore(name: &str) -> ExpirableSemaphore;
    new count_down_latch(name: &str) -> CountDownLatch;
    new election(name: &str) -> Election;
    new fair_lock(name: &str) -> FairLock;
    new fair_read_write_lock(name: &str) -> FairReadWriteLock;
    new fair_semaphore(name: &str, permits: u32) -> FairSemaphore;
    new fenced_lock(name: &str) -> FencedLock;
    new group_lock(group: &str, value: impl Into<GroupValue>) -> GroupLock;
    new multi_lock(
        group: &str,
        values: impl IntoIterator<Item = impl Into<GroupValue>>
    ) -> MultiLock;
    new read_write_lock(name: &str) -> ReadWriteLock;
    new once(name: &str, slot: impl Into<Slot>) -> Once;
    new semaphore(name: &str) -> Semaphore;
    new spin_lock(name: &str) -> SpinLock;
    get id() -> &str;
    get owner_id(owner: Owner) -> OwnerId;
    get status() -> ClientStatus;
    run inspect(name: &str) -> Option<ObjectState>;
    run waiters(name: &str) -> Vec<WaitingOwner>;
    run wait_graph() -> WaitGraph;
    run ping() -> Duration;
} }

impl crate::Client {
    /// Returns a client for threads that shares this client's connection, watchdog and identity.
    /// Its calls run in the runtime that this client uses now.
    ///
    /// That runtime must be driven by other threads: a `current_thread` runtime runs only inside of
    /// `block_on`, and a call waits until it does. In async code of that runtime, blocking calls
    /// return [`Error::BlockedRuntime`] instead of waiting for themselves; inside of
    /// [`spawn_blocking`](tokio::task::spawn_blocking) they work. Make fewer calls there at a time
    /// than the runtime has blocking threads (`max_blocking_threads`): if all of them wait for
    /// locks, the runtime cannot resolve a host name to reconnect.
    ///
    /// # Errors
    ///
    /// [`Error::NoRuntime`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// let blocking = client.blocking()?;
    /// let thread = std::thread::spawn(move || blocking.lock("orders:42").lock().run(|_| 6 * 7));
    /// let joined = tokio::task::spawn_blocking(|| thread.join().unwrap());
    /// assert_eq!(joined.await.unwrap()?, 42);
    /// # Ok(()) }
    /// ```
    pub fn blocking(&self) -> Result<Client> {
        let runtime = self.background().runtime(None).ok_or(Error::NoRuntime)?;
        Ok(Blocking {
            inner: self.clone(),
            worker: Worker::shared(runtime),
        })
    }
}

/// The objects whose names match a pattern: [`crate::inspect::Listing`], as an iterator.
///
/// ```
/// # fn main() -> redlatch::Result<()> {
/// let client = redlatch::blocking::Client::embedded()?;
/// let _guard = client.lock("orders:42").lock().block()?;
/// for found in client.list("orders:*") {
///     assert_eq!(found?.name, "orders:42");
/// }
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Listing(Polled<crate::inspect::Listing>);

impl Iterator for Listing {
    type Item = Result<Listed>;

    fn next(&mut self) -> Option<Result<Listed>> {
        self.0.next()
    }
}

/// Events of the objects whose names match a pattern: [`crate::inspect::Watch`], as an iterator,
/// which blocks until there is an event and never ends. Only the end of the process stops a thread
/// that waits for one.
///
/// ```
/// # fn main() -> redlatch::Result<()> {
/// let client = redlatch::blocking::Client::embedded()?;
/// let _guard = client.lock("orders:42").lock().block()?;
/// for event in client.watch("orders:*").take(2) {
///     println!("{:?}", event?);
/// }
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Watch(Polled<crate::inspect::Watch>);

impl Iterator for Watch {
    type Item = Result<Event>;

    fn next(&mut self) -> Option<Result<Event>> {
        self.0.next()
    }
}
