//! The client: connects to a store and creates handles.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::background::Background;
use crate::client_registry::Registration;
use crate::counters::latch::CountDownLatch;
use crate::counters::semaphore::Semaphore;
use crate::error::{Error, Result};
use crate::lease::{Expiry, Lease};
use crate::locks::fair::{Fair, FairLock};
use crate::locks::fair_shared::{FairReadWriteLock, FairSemaphore};
use crate::locks::fenced::{Fenced, FencedLock};
use crate::locks::group::{Group, GroupLock, GroupValue};
use crate::locks::permits::ExpirableSemaphore;
use crate::locks::read_write::ReadWriteLock;
use crate::locks::spin::{Spin, SpinLock};
use crate::locks::{Lock, Reentrant};
use crate::metrics::Metrics;
#[cfg(feature = "metrics")]
use crate::metrics::NameAttribute;
use crate::more::election::Election;
#[cfg(feature = "cron")]
use crate::more::job::{self, Job};
use crate::more::once::{Once, Slot};
use crate::name::{KeyLayout, ObjectKeys, invalid_character};
use crate::observe::inspect::{ObjectState, inspect};
use crate::observe::listing::Listing;
use crate::observe::wait_graph::{self, WaitGraph, WaitingOwner};
use crate::observe::watch::Watch;
use crate::owner::{ClientId, Owner, OwnerId};
use crate::session::Session;
use crate::several::multi::MultiLock;
use crate::store::embedded::Embedded;
use crate::store::redis::Password;
use crate::store::redis::options::ConnectOptions;
#[cfg(feature = "tls")]
use crate::store::redis::options::Pem;
#[cfg(feature = "redis")]
use crate::store::redis::redis_client::url_of;
use crate::store::redis::{AddressMap, EMBEDDED, Redis};
use crate::store::{Credentials, Provider, ReplicaSync, SentinelReport, ServerReport, Store};
use crate::wait::{ChannelMap, WaitQueues};

/// A connection to a store, and the identity that holds locks there.
///
/// Create one per process and clone it: clones share one connection, one watchdog and one identity. The
/// connection carries commands and messages. It is restored when it breaks.
///
/// # Runtimes
///
/// A client works in a tokio runtime with time and I/O enabled (`enable_all`). Elsewhere its calls return
/// [`Error::NoRuntime`]. (If tokio's own check panics, its message may appear on stderr once.) A client may
/// be used from several runtimes, even after the runtime in which it was created has ended: the next call
/// then makes a new connection.
///
/// A connection lives in the runtime whose call made it, and answers arrive only while that runtime runs. A
/// `current_thread` runtime runs only inside of `block_on`. If it is kept but not driven, calls from other
/// runtimes fail with [`Error::ResponseTimeout`]. Nor does a waiter in such a runtime go on: the waiters behind it in this client
/// wait up to their limits, also after the lock has been released. It may have the task that renews holds, which then lose their
/// leases, or with Sentinel the one that watches the sentinels: then this client does not notice a failover while the former master
/// still answers. Drive it, drop it, or create one client for each runtime.
///
/// # Processes
///
/// A client belongs to the process that created it. In a child that `fork` creates, connect again, in a runtime that the child
/// has created: one of the parent would also run copies of the parent's tasks, which use the connections of the parent. In the
/// child's own runtime, calls of the parent's client return [`Error::NoRuntime`], and a guard that the child drops releases
/// nothing. What a guard says in the child, such as [`is_valid`](crate::Guard::is_valid), means nothing.
#[derive(Clone)]
pub struct Client {
    pub(crate) session: Arc<Session>,
}

impl Client {
    /// Connects with the default settings. See [`ClientBuilder::connect`] for URLs and errors.
    pub async fn connect(url: &str) -> Result<Client> {
        Client::builder().connect(url).await
    }

    /// Connects to the server of a client of the crate [`redis`], with the default settings: [`ClientBuilder::connect_redis`].
    #[cfg(feature = "redis")]
    pub async fn from_redis(client: &redis::Client) -> Result<Client> {
        Client::builder().connect_redis(client).await
    }

    /// Creates a client with an embedded store of its own and the default settings, for tests and for
    /// programs of one process. See [`Embedded`] for a store that several clients share.
    pub fn embedded() -> Client {
        let validated = (ClientId::random(), Lease::WATCHDOG);
        ClientBuilder::default().attach(&Embedded::new(), validated)
    }

    /// Returns a builder, for settings other than the defaults.
    pub fn builder() -> ClientBuilder {
        ClientBuilder::default()
    }

    /// Returns a handle of the re-entrant lock `name`. Sends nothing.
    ///
    /// A name has 1 to 512 bytes, without NUL and line breaks. An invalid name is reported by every operation
    /// on the handle.
    ///
    /// As in Redisson, a name that contains a `{` is assumed to have its own hash tag (`{shop}:42`), and no
    /// braces are put around it. A name whose braces enclose no tag (`a}b`, `a{b`, `{}x`) is
    /// [`Error::InvalidName`] on every store: in a cluster its keys would lie in different slots.
    ///
    /// `x` and `{x}` are two names, but in Redisson's layout they share the channel and all keys other than
    /// the lock's own (fair queue, fencing token, timeouts of readers). Do not use both.
    pub fn lock(&self, name: &str) -> Lock {
        Lock::new(self.session.clone(), name, Reentrant::new)
    }

    /// Returns a handle of the [`ExpirableSemaphore`] `name`.
    pub fn expirable_semaphore(&self, name: &str) -> ExpirableSemaphore {
        ExpirableSemaphore::new(self.session.clone(), name)
    }

    /// Returns a handle of the [`CountDownLatch`] `name`.
    pub fn count_down_latch(&self, name: &str) -> CountDownLatch {
        CountDownLatch::new(self.session.clone(), name)
    }

    /// Returns a handle of the [`Election`] `name`.
    pub fn election(&self, name: &str) -> Election {
        Election::new(self.session.clone(), name)
    }

    /// Returns a handle of the [`FairLock`] `name`.
    pub fn fair_lock(&self, name: &str) -> FairLock {
        Lock::new(self.session.clone(), name, Fair::new)
    }

    /// Returns a handle of the [`FencedLock`] `name`.
    pub fn fenced_lock(&self, name: &str) -> FencedLock {
        Lock::new(self.session.clone(), name, Fenced::new)
    }

    /// Returns a handle of the [`GroupLock`] of one value. Its name is `group[value]`.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// let guard = client.group_lock("orders", 42i64).lock().await?; // a `Long` in Java
    /// assert_eq!(guard.name(), "orders[42]");
    /// # guard.unlock().await }
    /// ```
    pub fn group_lock(&self, group: &str, value: impl Into<GroupValue>) -> GroupLock {
        let kind = Group::new(&self.session.prefix, group, &value.into());
        Lock::from_kind(self.session.clone(), kind)
    }

    /// Returns a handle of the locks of several values of a group, which are held together or not at
    /// all (Redisson: `getMultiLock(group, values)`). Locks of other kinds can be added:
    /// [`MultiLock::and`].
    ///
    /// One script acquires up to 100 values. An owner may hold values through several handles; each value is
    /// free when its last guard is released.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// let guard = client.multi_lock("accounts", ["a", "b"]).lock().await?;
    /// let others = client.multi_lock("accounts", ["b", "c"]);
    /// assert!(others.try_lock().await?.is_none());
    /// guard.unlock().await?;
    /// assert!(others.try_lock().await?.is_some());
    /// # Ok(()) }
    /// ```
    pub fn multi_lock(
        &self,
        group: &str,
        values: impl IntoIterator<Item = impl Into<GroupValue>>,
    ) -> MultiLock {
        MultiLock::new(
            values
                .into_iter()
                .map(|value| self.group_lock(group, value)),
        )
    }

    /// Returns a handle of the [`FairReadWriteLock`] `name`.
    pub fn fair_read_write_lock(&self, name: &str) -> FairReadWriteLock {
        FairReadWriteLock::new(self.session.clone(), name)
    }

    /// Returns a handle of the [`FairSemaphore`] `name` with so many permits: 1 to 2147483647.
    pub fn fair_semaphore(&self, name: &str, permits: u32) -> FairSemaphore {
        FairSemaphore::new(self.session.clone(), name, permits)
    }

    /// Returns a handle of the [`ReadWriteLock`] `name`.
    pub fn read_write_lock(&self, name: &str) -> ReadWriteLock {
        ReadWriteLock::new(self.session.clone(), name)
    }

    /// Returns a handle of the job `name`, which runs at most once for each [`Slot`]. `slot` may be a text. Sends nothing. Invalid
    /// names and slots are reported by every operation on the handle.
    pub fn once(&self, name: &str, slot: impl Into<Slot>) -> Once {
        Once::new(self.session.clone(), name, slot.into())
    }

    /// Returns a handle of the job `name`, which runs by a schedule, each firing on one of the machines that schedule it. Sends
    /// nothing.
    #[cfg(feature = "cron")]
    pub fn job(&self, name: &str) -> Job {
        Job::new(self.session.clone(), name)
    }

    /// Returns the names of the jobs that match a glob pattern and have run, in order. Finds them with SCAN, which does not block
    /// the server. [`Job::history`] reads their runs.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`], [`Error::ResponseTimeout`], [`Error::NotPermitted`].
    #[cfg(feature = "cron")]
    pub async fn jobs(&self, pattern: &str) -> Result<Vec<String>> {
        job::names(&self.session, pattern).await
    }

    /// Returns a handle of the [`Semaphore`] `name`.
    pub fn semaphore(&self, name: &str) -> Semaphore {
        Semaphore::new(self.session.clone(), name)
    }

    /// Returns a handle of the [`SpinLock`] `name`.
    pub fn spin_lock(&self, name: &str) -> SpinLock {
        Lock::new(self.session.clone(), name, Spin::new)
    }

    /// Lists the objects whose names match a glob pattern (`*`, `?`, `[a-z]`, `\`), page by page with SCAN.
    pub fn list(&self, pattern: &str) -> Listing {
        Listing::new(self.session.clone(), pattern)
    }

    /// Returns the events of the objects whose names match a glob pattern, by all clients: acquired, released,
    /// expired, waiting. Works on all deployments; [`Watch`] describes what can be missed.
    pub fn watch(&self, pattern: &str) -> Watch {
        Watch::new(self.session.clone(), pattern)
    }

    /// Returns the kind and state of the object `name`, or `None` if there is none.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidName`], [`Error::WrongKind`] (the key holds something other than a redlatch object),
    /// [`Error::Unavailable`], [`Error::ResponseTimeout`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// let _guard = client.lock("orders:42").lock().await?;
    /// let state = client.inspect("orders:42").await?;
    /// assert_eq!(state.map(|state| state.holders().len()), Some(1));
    /// # Ok(()) }
    /// ```
    pub async fn inspect(&self, name: &str) -> Result<Option<ObjectState>> {
        let object = ObjectKeys::new(KeyLayout::Lock, &self.session.prefix, name);
        object.check()?;
        inspect(&self.session, &object).await
    }

    /// Returns the owners that wait for the object `name`: those in the queue of a fair lock in their order, then those that have
    /// [registered](ClientBuilder::registry) a wait of more than a second, the longest first. Finds them with SCAN, which does
    /// not block the server.
    ///
    /// # Errors
    ///
    /// Those of [`Client::inspect`], except for [`Error::WrongKind`].
    pub async fn waiters(&self, name: &str) -> Result<Vec<WaitingOwner>> {
        let object = ObjectKeys::new(KeyLayout::Lock, &self.session.prefix, name);
        object.check()?;
        Ok(wait_graph::read_object(&self.session, &object).await?.waits)
    }

    /// Returns which owners wait for which objects, and which owners hold those, over all clients: as [`Client::waiters`], for
    /// all names with the client's prefix. [`WaitGraph::deadlocks`] finds owners that wait for each other.
    ///
    /// The store is read in several steps while locks change hands. So a deadlock should be found twice before it counts:
    /// [`WaitGraph::retain_unchanged`]. Objects that the server does not let this client read are missing.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`], [`Error::ResponseTimeout`], [`Error::NotPermitted`].
    pub async fn wait_graph(&self) -> Result<WaitGraph> {
        wait_graph::read_all(&self.session).await
    }

    /// Returns the id of this client in the store: the part of an owner before the colon.
    pub fn id(&self) -> &str {
        self.session.id.as_str()
    }

    /// Returns `owner` as the store keeps it when it acts through this client.
    pub fn owner_id(&self, owner: Owner) -> OwnerId {
        self.session.id.owner_id(owner)
    }

    /// Waits until the background work that runs now has ended: dropped guards and dropped
    /// acquisitions are settled, and what a release has passed to another task that has not taken
    /// it yet is released. Work that other tasks begin meanwhile does not count. Call it before a
    /// program ends. Otherwise the locks of dropped guards may stay held until their leases end,
    /// and permits of a semaphore, which have no lease, forever.
    ///
    /// If the store cannot be reached, it waits for a lock until its lease has ended (at least for one response timeout), after which
    /// other clients can acquire it, and
    /// for permits of a [`Semaphore`] for up to ten minutes. [`Client::flush_within`] has a limit. If the store answers but refuses
    /// the release of a lock or of permits, for example because a password has changed, it waits for that for five seconds. The
    /// client logs that, and tries to release it for as long as the program runs.
    ///
    /// It also waits until the [registry](crate::ClientBuilder::registry) has what this client no longer holds. Not outside of a runtime
    /// with timers.
    ///
    /// # Cancel safety
    ///
    /// Only waits; may be dropped.
    pub async fn flush(&self) {
        let begun = Instant::now();
        self.session.waiting.drop_offers();
        self.session.background.flush().await;
        // That needs timers, and the process of the client.
        if self.session.background.remember_runtime().is_ok() {
            self.session.registration.flush(begun).await;
        }
    }

    /// Waits as [`Client::flush`] does, but at most this long. Returns what is not settled yet, because the store does not answer
    /// or refuses it. It is still tried in the background. Outside of a runtime with timers it does not wait.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # use std::time::Duration;
    /// # let client = redlatch::Client::embedded();
    /// drop(client.lock("orders:42").lock().await?);
    /// // After SIGTERM, Kubernetes waits for 30 seconds.
    /// let unsettled = client.flush_within(Duration::from_secs(5)).await;
    /// if !unsettled.is_empty() {
    ///     eprintln!("may be held until their leases end: {unsettled}");
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Cancel safety
    ///
    /// Only waits; may be dropped.
    pub async fn flush_within(&self, limit: Duration) -> Unsettled {
        if crate::runtime::current().is_ok() {
            let _ = tokio::time::timeout(limit, self.flush()).await;
        }
        let names = self.session.background.unsettled();
        Unsettled { names }
    }

    #[cfg(feature = "blocking")]
    pub(crate) fn background(&self) -> Background {
        self.session.background.clone()
    }

    /// Returns the current counters of this client. All are zero ([`ClientStatus::is_idle`]) while it holds nothing and
    /// waits for nothing.
    pub fn status(&self) -> ClientStatus {
        ClientStatus {
            holds: self.session.watchdog.len(),
            subscriptions: self.session.waiting.channels.subscriptions(),
            background: self.session.background.running(),
            connected: self.session.store.is_connected(),
        }
    }

    /// Returns what the servers that serve keys say about themselves. For the `redlatch` command, not part of the public
    /// interface.
    #[doc(hidden)]
    pub async fn server_reports(&self) -> Result<Vec<ServerReport>> {
        self.session.store.server_reports().await
    }

    /// Returns what each sentinel says, if there are any. For the `redlatch` command, not part of the public interface.
    #[doc(hidden)]
    pub async fn sentinel_reports(&self) -> Result<Vec<SentinelReport>> {
        self.session.store.sentinel_reports().await
    }

    /// Waits for an answer of the store, in a cluster of each master, at most for the
    /// [`response_timeout`](ClientBuilder::response_timeout): for health checks. Returns how long that took.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`], [`Error::ResponseTimeout`], and what the servers refuse, such as
    /// [`Error::AuthenticationFailed`].
    pub async fn ping(&self) -> Result<Duration> {
        let begun = Instant::now();
        self.session.store.ping().await?;
        Ok(begun.elapsed())
    }
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client")
            .field("id", &self.id())
            .field("status", &self.status())
            .finish_non_exhaustive()
    }
}

/// Counters of a client: [`Client::status`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ClientStatus {
    /// Number of holds that the watchdog tracks.
    pub holds: usize,
    /// Number of subscribed channels: one per name with waiters, or with waiters until a moment ago. Spin
    /// locks subscribe to none.
    pub subscriptions: usize,
    /// Number of releases and canceled acquisitions that are being settled in the background.
    pub background: usize,
    /// Whether there is a connection to a server that serves keys, as far as is known: mostly not before the first step,
    /// and not after a loss of the connection until the next one. It asks no server: [`Client::ping`] does.
    pub connected: bool,
}

impl ClientStatus {
    /// Returns whether the client holds nothing, waits for nothing and settles nothing.
    pub fn is_idle(&self) -> bool {
        [self.holds, self.subscriptions, self.background] == [0; 3]
    }
}

/// What a client has not settled: the result of [`Client::flush_within`]. Its `Display` lists the names.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[must_use = "the locks and permits that it names may still be held in the store"]
#[non_exhaustive]
pub struct Unsettled {
    names: BTreeSet<String>,
}

impl Unsettled {
    /// Returns whether everything is settled.
    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// Returns the names of the objects of which something is not settled, in alphabetical order: a lock whose release was not
    /// confirmed, an acquisition that may have to be undone, permits, or another call that was dropped before its answer.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(String::as_str)
    }
}

impl std::fmt::Display for Unsettled {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (i, name) in self.names.iter().enumerate() {
            let separator = if i == 0 { "" } else { ", " };
            write!(f, "{separator}{name:?}")?;
        }
        Ok(())
    }
}

/// Settings of a [`Client`].
///
/// ```no_run
/// # async fn example() -> redlatch::Result<()> {
/// use std::time::Duration;
///
/// let client = redlatch::Client::builder()
///     .watchdog_lease(Duration::from_secs(10))
///     .prefix("shop:")
///     .connect("redis://127.0.0.1:6379/0")
///     .await?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
#[must_use = "settings have no effect until `connect` is called"]
pub struct ClientBuilder {
    watchdog_lease: Duration,
    prefix: String,
    outage_limit: Option<Expiry>,
    linger: Duration,
    client_id: Option<String>,
    local_hand_over: bool,
    fair_grants: bool,
    label: Option<String>,
    registry: bool,
    options: ConnectOptions,
    #[cfg(feature = "metrics")]
    name_attribute: Option<NameAttribute>,
}

/// With a shorter lease, a third of it is close to a round trip on a busy machine.
const MIN_WATCHDOG_LEASE: Duration = Duration::from_millis(100);

impl Default for ClientBuilder {
    fn default() -> ClientBuilder {
        ClientBuilder {
            watchdog_lease: Lease::WATCHDOG.duration(),
            prefix: String::new(),
            outage_limit: None,
            linger: Duration::from_secs(1),
            client_id: None,
            local_hand_over: true,
            fair_grants: true,
            label: None,
            registry: true,
            options: ConnectOptions::default(),
            #[cfg(feature = "metrics")]
            name_attribute: None,
        }
    }
}

impl ClientBuilder {
    /// Sets the lease of the locks that the watchdog renews, each time a third of it has passed. After a
    /// holder has died, waiters wait at most this long. Default 30 s, as in Redisson (`lockWatchdogTimeout`); at
    /// least 100 ms.
    pub fn watchdog_lease(mut self, lease: Duration) -> ClientBuilder {
        self.watchdog_lease = lease;
        self
    }

    /// Sets the prefix that is put before every name to make its key (Redisson: a `NameMapper`). Default none.
    pub fn prefix(mut self, prefix: impl Into<String>) -> ClientBuilder {
        self.prefix = prefix.into();
        self
    }

    /// Sets the time limit for connecting. Default 5 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> ClientBuilder {
        self.options.settings.connect_timeout = timeout;
        self
    }

    /// Sets the time limit for an answer, including all repetitions on new connections. Default 3 s, as in
    /// Redisson (`timeout`).
    pub fn response_timeout(mut self, timeout: Duration) -> ClientBuilder {
        self.options.settings.response_timeout = timeout;
        self
    }

    /// Sets how long an outage may last before waiting fails.
    ///
    /// An outage starts with the first call that fails after the store's last answer (with an error for
    /// which [`Error::is_transient`] is true) and ends with the next answer. Meanwhile a waiting request
    /// retries, with pauses of up to a second, and logs that once (level WARN). Each retry takes up to the
    /// response timeout, so waiting may fail that much later than the limit.
    ///
    /// Default: no longer than the response timeout; [`Error::NotReplicated`](crate::Error::NotReplicated) is
    /// returned at once. A RedLock waits through any outage by default. `None`: waits
    /// through any outage. A shorter wait limit has precedence. A request that does not wait
    /// (`try_lock` without `wait`) fails after the response timeout. Errors that do not go away with time
    /// (a key of another kind, wrong credentials) are returned at once.
    pub fn outage_limit(mut self, limit: impl Into<Option<Duration>>) -> ClientBuilder {
        self.outage_limit = Some(Expiry::from_limit(limit));
        self
    }

    /// Sets how long a subscription is kept after its last waiter has left, so that repeated waiting for a
    /// name does not subscribe each time. Default 1 s.
    pub fn subscription_linger(mut self, linger: Duration) -> ClientBuilder {
        self.linger = linger;
        self
    }

    /// Sets whether a lock that is released while another task of this client waits for it passes to that task
    /// without a release in the store, and permits that are released to a task that waits for as many. Default: true.
    ///
    /// It applies to locks and write locks without a fixed lease, whose owner the caller does not
    /// name; to permits of an expirable semaphore without a fixed lease, whose ids the caller does
    /// not ask for; and to permits of a semaphore. [`Guard::unlock`](crate::Guard::unlock) then
    /// returns `Ok` if no loss is known and the lease has not ended; with `false`, each release
    /// checks with the store that the lock was still held. A hold that the store has lost may be
    /// passed on for about 10 ms, or three times as long as the store needs for an answer if that is
    /// longer, unless a message reported it (for permits even then). After longer sections the
    /// release asks the store, and reports a loss.
    ///
    /// A lock with another owner (always in the blocking API) or a fixed lease passes to the next task of this client
    /// with one command, and so does a fenced lock, whose token that command increments. This does not apply where
    /// acquisitions wait for replicas ([`ClientBuilder::replica_sync`]), nor to writers that
    /// [block readers](crate::ReadWriteLock::prefer_writers).
    ///
    /// Permits pass on only while all waiting tasks request the same number. If the number of permits is reduced, the
    /// client may continue to pass on those that it has for up to 150 ms.
    ///
    /// If another client waits, the lock or permits are released to all as soon as the store has reported it: it is asked after
    /// 64 handoffs or 5 ms, beside the task that works. An answer counts for 10 ms, or for twice the time that it took, at most
    /// 100 ms. Without one that counts, permits are released, and the release of a lock asks first, for 100 ms at most.
    /// Handoffs end in any case after 50 to 150 ms (random), or after eight of them if
    /// sections are so long, but not later than after two seconds: not all that wait can be counted, not those that try from time
    /// to time, as `try_lock` in a loop, spin locks and RedLocks do. The next waiter of this client then lets the others go
    /// first, for a few milliseconds. So a request that is repeated ten times a second is granted after three seconds on
    /// average, and after 14 in 99 of 100 cases, however busy this client is, if sections last 10 ms at most; after five seconds
    /// on average with sections of 20 ms, and after 50 with sections of 200 ms. That costs about
    /// 4 % of the throughput of a lock that passes from task to task all the time. Owners in the
    /// queue of a [`FairLock`](crate::FairLock) of the same name are counted, and served. A task that is not polled within 10 ms
    /// after they were passed to it does not get them: they are released in the background. A failure is then logged instead of
    /// returned, and permits of a semaphore without an answer may stay acquired, as after
    /// [`Error::OutcomeUnknown`](crate::Error::OutcomeUnknown).
    pub fn local_hand_over(mut self, enabled: bool) -> ClientBuilder {
        self.local_hand_over = enabled;
        self
    }

    /// Sets whether a release by any client grants a fair lock to the next waiter of this client, with the message that
    /// wakes the waiter. Default: true.
    ///
    /// The waiter then has the lock after one trip instead of two. It applies to requests that wait without a fixed
    /// lease. The guard has at least a third of the lease when it is returned: its lease counts from the last request
    /// of the waiter, and the watchdog renews it as any other. A waiter whose process hangs while its connection stays
    /// open is granted the lock, too, and keeps it for one lease, even if its request has a shorter wait limit; without
    /// a grant it keeps its turn for its [wait time](crate::FairLock::wait_time). If replicas have to acknowledge acquisitions
    /// ([`replica_sync`](ClientBuilder::replica_sync)), the waiter still sends its request.
    pub fn fair_grants(mut self, enabled: bool) -> ClientBuilder {
        self.fair_grants = enabled;
        self
    }

    /// Sets whether acquisitions and releases that wait to be sent are sent together, as one script. Default: true.
    ///
    /// A client sends a step at once if fewer than 32 are in flight on its connection (over TLS: if none is). Further ones wait
    /// for answers, and up to 16 of one kind are sent as one script. The server needs about a quarter less time for them. It
    /// applies to locks, fenced locks and semaphores, but not in a cluster, and not to acquisitions that replicas have to
    /// acknowledge.
    pub fn batching(mut self, enabled: bool) -> ClientBuilder {
        self.options.settings.batching = enabled;
        self
    }

    /// Sets whether servers are asked to report it if another client changes or deletes a lock that this one holds (Redis:
    /// `CLIENT TRACKING`). Default: true.
    ///
    /// Such a report makes the watchdog check the lock at once, so that [`Guard::lost`](crate::Guard::lost) completes after two
    /// round trips. Otherwise a loss is noticed at the next renewal. Reports are requested with each renewal; for that, a
    /// lock is renewed one second after it was acquired (with a fixed lease, checked), so short holds cost nothing. After
    /// a report, for example because another reader has joined, further ones about that lock are ignored for a third of the
    /// watchdog's lease. A change by this client itself (a re-entry, another reader or permit) ends the reports until the next
    /// renewal. If a server or its ACL refuses, the client logs a warning and does not ask this server process again. Redis before
    /// 7.0.5 also reports the client's own renewals, which makes the other reports useless.
    pub fn client_tracking(mut self, enabled: bool) -> ClientBuilder {
        self.options.settings.tracking = enabled;
        self
    }

    /// Sets the attribute `name` of the [metrics](crate#metrics) of an object, from its name. `None`: the metrics of the
    /// object have none, and are part of those of its kind. Default: none have one.
    ///
    /// Each value makes some ten more time series, which exist until the program ends. So return a value from a fixed set.
    ///
    /// ```
    /// let builder = redlatch::Client::builder().metrics_name(|name| match name.split_once(':') {
    ///     Some((prefix @ ("orders" | "reports"), _)) => Some(prefix), // for `orders:42`, `orders`
    ///     _ => None,
    /// });
    /// ```
    #[cfg(feature = "metrics")]
    pub fn metrics_name(
        mut self,
        attribute: impl Fn(&str) -> Option<&str> + Send + Sync + 'static,
    ) -> ClientBuilder {
        self.name_attribute = Some(NameAttribute(Arc::new(attribute)));
        self
    }

    /// Sets whether the client registers in the store what it has held or waited for longer than a second, so that
    /// [`Client::inspect`] and `redlatch show` can name the process of a holder. Default: true.
    ///
    /// It writes the name of the machine and of the program, the process id, the version of this library, the
    /// [label](ClientBuilder::label), and for each such hold and wait the name of the object, the owner, and the
    /// [note](crate::Acquire::note), up to 500 holds and 500 waits. The key is `redlatch_client:{<client id>}`, without a prefix. It expires with the
    /// watchdog's lease if the process ends, and does not exist while there is no such hold or wait. Not registered are
    /// requests for semaphores and latches, which have no owner.
    ///
    /// No lock depends on it. Errors are only logged: after a refusal the client pauses for minutes, and if the ACL denies it,
    /// it writes nothing any more. Entries that it may not read are missing. With `false` it neither writes the registry nor
    /// reads it.
    pub fn registry(mut self, enabled: bool) -> ClientBuilder {
        self.registry = enabled;
        self
    }

    /// Sets a text by which people recognize this client in the [registry](ClientBuilder::registry), such as `report` or
    /// `worker 3`; up to 256 bytes. Default: the name of the program.
    pub fn label(mut self, label: impl Into<String>) -> ClientBuilder {
        self.label = Some(label.into());
        self
    }

    /// Sets the id of the client in the store, instead of a random UUID: 1 to 64 letters, digits, `-`, `_`
    /// or `.`.
    ///
    /// It helps in logs and listings. Processes do not share owners even if they share an id, because each
    /// numbers its owners from a random start ([`Owner`]). So a process that restarts under the same id after a
    /// crash waits for the lease of its predecessor like any other client. Within one process, give each
    /// client a different id: two clients with the same id that acquire for the same [`Owner`] would each
    /// treat the other's lock as its own, and release it.
    pub fn client_id(mut self, id: impl Into<String>) -> ClientBuilder {
        self.client_id = Some(id.into());
        self
    }

    /// Sets how many replicas must acknowledge an acquisition before it counts: [`ReplicaSync`]. Default
    /// [`ReplicaSync::All`], as in Redisson (`checkLockSyncedSlaves`).
    pub fn replica_sync(mut self, sync: ReplicaSync) -> ClientBuilder {
        self.options.settings.replica_sync = sync;
        self
    }

    /// Sets how long an acquisition waits for the replicas. Default 1 s, as in Redisson
    /// (`slavesSyncTimeout`); at least 1 ms.
    pub fn replica_timeout(mut self, timeout: Duration) -> ClientBuilder {
        self.options.settings.replica_timeout = timeout;
        self
    }

    /// Sets the user to log in as (ACL). Has precedence over the user in the URL.
    pub fn username(mut self, username: impl Into<String>) -> ClientBuilder {
        self.options.login.username = Some(username.into());
        self
    }

    /// Sets the password to log in with. Has precedence over the password in the URL, which is easily
    /// printed or logged. This one is shown neither by `Debug` nor in any error.
    pub fn password(mut self, password: impl Into<String>) -> ClientBuilder {
        self.options.login.password = Some(Password::text(password));
        self
    }

    /// Sets a file whose first line is the password. It is read again for every new connection: it
    /// may be replaced while the program runs, before the servers end the connections of the old
    /// password.
    pub fn password_file(mut self, path: impl Into<PathBuf>) -> ClientBuilder {
        self.options.login.password = Some(Password::File(path.into()));
        self
    }

    /// Sets who provides the credentials for the data servers, such as tokens that expire. It is asked for each new connection,
    /// within the [`connect_timeout`](ClientBuilder::connect_timeout), and has precedence over other users and passwords. If a
    /// server does not accept them (WRONGPASS), it is asked once more; other credentials are then tried at once.
    ///
    /// If it fails, no connection can be made: an outage with its error, which lasts until it succeeds. An empty password is an
    /// [`Error::AuthenticationFailed`].
    ///
    /// ```
    /// # async fn fetch_token() -> std::io::Result<String> { Ok("t".into()) }
    /// # fn run() {
    /// use std::time::Duration;
    /// use redlatch::{Client, Credentials};
    ///
    /// let builder = Client::builder().credentials(|| async {
    ///     let token = fetch_token().await?;
    ///     // The token is valid for fifteen minutes.
    ///     let credentials = Credentials::new(token).username("app");
    ///     std::io::Result::Ok(credentials.renewed_after(Duration::from_secs(10 * 60)))
    /// });
    /// # }
    /// ```
    pub fn credentials<F, C, E>(mut self, provider: F) -> ClientBuilder
    where
        F: Fn() -> C + Send + Sync + 'static,
        C: Future<Output = Result<Credentials, E>> + Send + 'static,
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        self.options.provider = Some(Provider::new(provider));
        self
    }

    /// Sets the user to log in as at sentinels, which have users of their own. Without it, and without
    /// `sentinel_user` in the URL, the client does not log in at sentinels.
    pub fn sentinel_username(mut self, username: impl Into<String>) -> ClientBuilder {
        self.options.sentinel_login.username = Some(username.into());
        self
    }

    /// Sets the password for sentinels: see [`sentinel_username`](ClientBuilder::sentinel_username).
    pub fn sentinel_password(mut self, password: impl Into<String>) -> ClientBuilder {
        self.options.sentinel_login.password = Some(Password::text(password));
        self
    }

    /// The same for sentinels: see [`password_file`](ClientBuilder::password_file).
    pub fn sentinel_password_file(mut self, path: impl Into<PathBuf>) -> ClientBuilder {
        self.options.sentinel_login.password = Some(Password::File(path.into()));
        self
    }

    /// Sets where to connect for an address (host and port), for servers that can only be reached at other addresses than
    /// they announce: behind a tunnel, NAT or port mapping. `None` means: there. It is called for each new connection, with
    /// the addresses in the URL as well as those that sentinels and nodes of a cluster announce, and only once: its result
    /// is not mapped again. Certificates are checked against the announced name
    /// ([`tls_server_name`](ClientBuilder::tls_server_name) replaces it). Redisson calls this a `NatMapper`.
    ///
    /// ```
    /// let builder = redlatch::Client::builder()
    ///     .map_address(|host, port| host.starts_with("10.").then(|| ("localhost".into(), port + 1000)));
    /// ```
    pub fn map_address(
        mut self,
        map: impl Fn(&str, u16) -> Option<(String, u16)> + Send + Sync + 'static,
    ) -> ClientBuilder {
        self.options.address_map = AddressMap::new(map);
        self
    }

    /// Connects to the store at a URL:
    ///
    /// | URL | store |
    /// |---|---|
    /// | `redis://[user:password@]host[:port][/db]`, `valkey://…` | one server over TCP |
    /// | `redis+unix:///path[?db=N&user=…&pass=…]` | one server over a unix socket |
    /// | `redis+sentinel://[user:password@]host[:port],…/master[/db]` | the master that these sentinels name; `?sentinel_user=…&sentinel_password=…` for themselves |
    /// | `redis+cluster://[user:password@]host[:port],…[/db]` | the cluster to which these nodes belong |
    /// | `rediss…://`, `valkeys…://` | the same with TLS (feature `tls`, on by default) |
    /// | `embedded:` | an embedded store of its own, in this process |
    ///
    /// `?db=N` can replace `/db`. An unknown, repeated or contradictory part of a URL is an
    /// [`Error::InvalidUrl`] that names it. Users and passwords may be percent-encoded.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidUrl`], [`Error::InvalidSetting`], [`Error::Unavailable`],
    /// [`Error::ResponseTimeout`], [`Error::AuthenticationFailed`], [`Error::TlsFailed`],
    /// [`Error::NotPermitted`], [`Error::UnsupportedServer`] (Redis before 6.2, a cluster node behind a URL
    /// for one server, or the other way round), [`Error::Refused`] (such as a database that the server
    /// does not have), [`Error::NoRuntime`]. The first connection is tried once.
    /// Later the client reconnects by itself.
    pub async fn connect(self, url: &str) -> Result<Client> {
        if url == EMBEDDED {
            return self.connect_embedded(&Embedded::new());
        }
        let validated = self.validate()?;
        crate::environment::check_sockets()?;
        let channels = self.channels();
        let redis = Redis::connect(url, &self.options, channels.clone()).await?;
        Ok(self.assemble(validated, Store::Redis(redis), channels))
    }

    /// Connects to the server of a client of the crate [`redis`]: with the address, TLS, user, password and database that the
    /// service has configured already. Settings of this builder have precedence.
    ///
    /// The settings are shared, not the socket: this library relies on the order of the commands on a connection, and on
    /// knowing which of them were sent, and renewals must not queue behind the service's own commands. Settings of the
    /// socket (timeouts, keepalive) stay those of this library. So does the protocol: it uses RESP3 on servers that
    /// have it, whichever the other client uses. Clients for sentinels and clusters are of other types, which do not show their settings: use a
    /// URL.
    ///
    /// # Errors
    ///
    /// Those of [`ClientBuilder::connect`]. [`Error::InvalidSetting`] names a setting that cannot be shared: `insecure`,
    /// because certificates are always verified; `tls_params`, because the certificates of such a client cannot be read (set them
    /// with [`tls_ca`](ClientBuilder::tls_ca) or [`tls_client_cert`](ClientBuilder::tls_client_cert)). A user without a
    /// password is [`Error::InvalidUrl`]: that client would not log in at all.
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
    /// let redis = redis::Client::open("redis://app:secret@10.0.0.1/2")?; // the service has it already
    /// let client = redlatch::Client::builder().prefix("shop:").connect_redis(&redis).await?;
    /// # Ok(()) }
    /// ```
    #[cfg(feature = "redis")]
    pub async fn connect_redis(self, client: &redis::Client) -> Result<Client> {
        let url = url_of(client, &self.options)?;
        self.connect(&url).await
    }

    /// Creates a client without connecting: for a service that starts while its store is down. The first step makes the
    /// connection, and errors of [`connect`](ClientBuilder::connect) that have to do with servers come from there.
    ///
    /// With one server, each acquisition asks how many replicas there are, on a connection of its own, because it is not
    /// known from the start. [`ReplicaSync::Off`] saves that.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidUrl`], [`Error::InvalidSetting`], [`Error::NoRuntime`].
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> redlatch::Result<()> {
    /// // A server may listen there or not.
    /// let client = redlatch::Client::builder().connect_lazy("redis://127.0.0.1:1")?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn connect_lazy(self, url: &str) -> Result<Client> {
        if url == EMBEDDED {
            return self.connect_embedded(&Embedded::new());
        }
        let validated = self.validate()?;
        crate::environment::check_sockets()?;
        let channels = self.channels();
        let redis = Redis::connect_lazy(url, &self.options, channels.clone())?;
        Ok(self.assemble(validated, Store::Redis(redis), channels))
    }

    /// Creates a client of an embedded store, which other clients may share.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`].
    pub fn connect_embedded(self, store: &Embedded) -> Result<Client> {
        let validated = self.validate()?;
        Ok(self.attach(store, validated))
    }
}

/// TLS, for URLs that start with `rediss` or `valkeys`. The server's certificate and its name are always
/// verified; there is no switch to disable that.
#[cfg(feature = "tls")]
impl ClientBuilder {
    /// Sets the CA certificates to trust *instead* of those of the system, in PEM: one or several. So with a
    /// private CA, a certificate from a public CA is not accepted.
    pub fn tls_ca(mut self, pem: impl Into<Vec<u8>>) -> ClientBuilder {
        self.options.tls.ca = Some(Pem::Text(pem.into()));
        self
    }

    /// Like `tls_ca`, but reads a file again for every new connection: it may be replaced while the program
    /// runs.
    pub fn tls_ca_file(mut self, path: impl Into<PathBuf>) -> ClientBuilder {
        self.options.tls.ca = Some(Pem::File(path.into()));
        self
    }

    /// Sets the name or IP address that the certificates of all servers must have, instead of the host in their address: for
    /// servers that are reached through a tunnel or proxy.
    pub fn tls_server_name(mut self, name: impl Into<String>) -> ClientBuilder {
        self.options.tls.server_name = Some(name.into());
        self
    }

    /// Sets the certificate that authenticates the client (`tls-auth-clients`), with its intermediate
    /// certificates if there are any, and its private key. Both in PEM, the key not encrypted.
    pub fn tls_client_cert(
        mut self,
        cert_pem: impl Into<Vec<u8>>,
        key_pem: impl Into<Vec<u8>>,
    ) -> ClientBuilder {
        let (cert, key) = (cert_pem.into(), key_pem.into());
        self.options.tls.client = Some((Pem::Text(cert), Pem::Text(key)));
        self
    }

    /// Like `tls_client_cert`, but reads files again for every new connection: they may be replaced while
    /// the program runs.
    pub fn tls_client_cert_files(
        mut self,
        cert: impl Into<PathBuf>,
        key: impl Into<PathBuf>,
    ) -> ClientBuilder {
        let (cert, key) = (cert.into(), key.into());
        self.options.tls.client = Some((Pem::File(cert), Pem::File(key)));
        self
    }
}

impl ClientBuilder {
    /// Validates the settings. Returns the id of the client, and the lease that the watchdog renews.
    fn validate(&self) -> Result<(ClientId, Lease)> {
        let invalid = |setting, reason: String| Err(Error::InvalidSetting { setting, reason });
        let lease = self.watchdog_lease;
        if lease < MIN_WATCHDOG_LEASE {
            let reason = format!("{lease:?} is too short; use at least 100 ms");
            return invalid("watchdog_lease", reason);
        }
        if let Some(reason) = invalid_character(&self.prefix) {
            return invalid("prefix", reason.into());
        }
        let settings = &self.options.settings;
        for (setting, timeout) in [
            ("connect_timeout", settings.connect_timeout),
            ("response_timeout", settings.response_timeout),
            ("replica_timeout", settings.replica_timeout),
        ] {
            if timeout.is_zero() || timeout > crate::MAX_LEASE {
                return invalid(setting, "use more than 0 and less than ten years".into());
            }
        }
        if self.linger > crate::MAX_LEASE {
            return invalid("subscription_linger", "use less than ten years".into());
        }
        let id = match &self.client_id {
            Some(id) => ClientId::custom(id)?,
            None => ClientId::random(),
        };
        match Lease::new(lease) {
            Ok(lease) => Ok((id, lease)),
            Err(error) => invalid("watchdog_lease", error.to_string()),
        }
    }

    /// Creates what receives the messages of the store, with the metrics of the client.
    fn channels(&self) -> Arc<ChannelMap> {
        #[cfg(feature = "metrics")]
        let metrics = Metrics::register(self.name_attribute.clone());
        #[cfg(not(feature = "metrics"))]
        let metrics = Metrics::default();
        Arc::new(ChannelMap::new(metrics))
    }

    fn attach(self, store: &Embedded, validated: (ClientId, Lease)) -> Client {
        let channels = self.channels();
        let connection = store.connect(channels.clone());
        self.assemble(validated, Store::Embedded(connection), channels)
    }

    fn assemble(
        self,
        (id, lease): (ClientId, Lease),
        store: Store,
        channels: Arc<ChannelMap>,
    ) -> Client {
        let background = Background::default();
        // If this fails, the first acquisition fails with the error.
        let _ = background.remember_runtime();
        let store = Arc::new(store);
        let waiting = WaitQueues::new(channels, store.clone(), background.clone(), self.linger);
        let (label, is_on) = (self.label, self.registry);
        let registration = Registration::new(&id, label, lease, &store, background.clone(), is_on);
        let mut session = Session::new(
            id,
            self.prefix,
            store,
            waiting,
            lease,
            background,
            registration,
        );
        session.outage_limit = self.outage_limit;
        session.hands_off = self.local_hand_over;
        session.accepts_grants = self.fair_grants;
        Client {
            session: session.share(),
        }
    }
}
