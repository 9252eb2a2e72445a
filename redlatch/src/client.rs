//! The front door: connects to a store and hands out handles.

#[cfg(feature = "tls")]
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::background::Background;
use crate::error::{Error, Result};
use crate::lease::Lease;
use crate::listing::{Listing, look_at};
use crate::name::forbidden;
use crate::owner::{ClientId, Owner};
use crate::primitives::count_down_latch::CountDownLatch;
use crate::primitives::expirable_semaphore::ExpirableSemaphore;
use crate::primitives::fair_lock::{Fair, FairLock};
use crate::primitives::fenced_lock::{Fenced, FencedLock};
use crate::primitives::handle::{Lock, Reentrant};
use crate::primitives::read_write_lock::ReadWriteLock;
use crate::primitives::semaphore::Semaphore;
use crate::primitives::spin_lock::{Spin, SpinLock};
use crate::primitives::survey::ObjectState;
use crate::session::Session;
use crate::store::embedded::Embedded;
#[cfg(feature = "tls")]
use crate::store::redis::given::Pem;
use crate::store::redis::given::{Given, Secret};
use crate::store::redis::{Redis, Settings};
use crate::store::{ReplicaSync, SharedEar, Store};
use crate::wait::{Lines, WaitingRoom};

/// A connection to a store, and the identity under which locks are held there.
///
/// Make one per process and clone it: clones share one connection, one watchdog and one identity.
/// The connection carries everything, commands and messages; it is made anew when it breaks.
///
/// # Runtimes
///
/// A client works in a tokio runtime with time and I/O enabled (`enable_all`); elsewhere its calls
/// return [`Error::NoRuntime`]. (Where tokio's own check is a panic, its message may appear on stderr once.)
/// It may be used from several runtimes, also after the one in which it was made has ended: the next call
/// makes a new connection then.
///
/// A connection lives in the runtime whose call made it, and answers arrive only while that runtime runs. A
/// `current_thread` runtime runs only inside of `block_on`: if it is kept but not driven, calls from other
/// runtimes end with [`Error::ResponseTimeout`]. Drive it, drop it, or make one client for each runtime.
#[derive(Clone)]
pub struct Client {
    session: Arc<Session>,
}

impl Client {
    /// Connects with the default settings. See [`ClientBuilder::connect`] for URLs and errors.
    pub async fn connect(url: &str) -> Result<Client> {
        Client::builder().connect(url).await
    }

    /// A client of an embedded store of its own, with the default settings: for tests and for
    /// programs of one process. See [`Embedded`] for a store that several clients share.
    pub fn embedded() -> Client {
        let checked = Checked {
            id: ClientId::random(),
            lease: Lease::WATCHDOG,
        };
        ClientBuilder::default().attach(&Embedded::new(), checked)
    }

    /// Settings other than the defaults.
    pub fn builder() -> ClientBuilder {
        ClientBuilder::default()
    }

    /// A handle of the re-entrant lock called `name`: 1 to 512 bytes, without NUL and line breaks.
    /// Costs no round trip; a name that cannot be used is an error of whatever is done with it.
    ///
    /// As in Redisson, a name that contains a `{` is taken to bring a hash tag of its own (`{shop}:42`),
    /// and no braces are put around it. A name whose braces enclose no tag (`a}b`, `a{b`, `{}x`) is
    /// [`Error::InvalidName`] on every store: in a cluster its keys would lie in different slots.
    ///
    /// `x` and `{x}` are two names, but Redisson's layout gives both the same channel and the same keys
    /// beside the lock's own (fair queue, fencing token, timeouts of readers). Do not use both.
    pub fn lock(&self, name: &str) -> Lock {
        Lock::new(self.session.clone(), name, Reentrant)
    }

    /// A handle of the expirable semaphore called `name`: [`ExpirableSemaphore`].
    pub fn expirable_semaphore(&self, name: &str) -> ExpirableSemaphore {
        ExpirableSemaphore::new(self.session.clone(), name)
    }

    /// A handle of the count-down latch called `name`: [`CountDownLatch`].
    pub fn count_down_latch(&self, name: &str) -> CountDownLatch {
        CountDownLatch::new(self.session.clone(), name)
    }

    /// A handle of the fair lock called `name`: [`FairLock`].
    pub fn fair_lock(&self, name: &str) -> FairLock {
        Lock::new(self.session.clone(), name, Fair::default())
    }

    /// A handle of the fenced lock called `name`: [`FencedLock`].
    pub fn fenced_lock(&self, name: &str) -> FencedLock {
        Lock::new(self.session.clone(), name, Fenced)
    }

    /// A handle of the read-write lock called `name`: [`ReadWriteLock`].
    pub fn read_write_lock(&self, name: &str) -> ReadWriteLock {
        ReadWriteLock::new(self.session.clone(), name)
    }

    /// A handle of the semaphore called `name`: [`Semaphore`].
    pub fn semaphore(&self, name: &str) -> Semaphore {
        Semaphore::new(self.session.clone(), name)
    }

    /// A handle of the spin lock called `name`: [`SpinLock`].
    pub fn spin_lock(&self, name: &str) -> SpinLock {
        Lock::new(self.session.clone(), name, Spin::default())
    }

    /// The objects in the store whose names match a glob pattern (`*`, `?`, `[a-z]`, `\`), page by
    /// page with SCAN.
    pub fn list(&self, pattern: &str) -> Listing {
        Listing::new(self.session.clone(), pattern)
    }

    /// What is kept under `name`, whatever kind of object it is; `None` if nothing is.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidName`], [`Error::WrongKind`] (something that is none of our objects),
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
        look_at(&self.session, name).await
    }

    /// The id of this client in the store: what stands before the colon in owners.
    pub fn id(&self) -> &str {
        self.session.id.as_str()
    }

    /// How `owner` is written in the store when it acts through this client:
    /// `<client id>:<number>`.
    pub fn owner_id(&self, owner: Owner) -> String {
        self.session.id.field(owner)
    }

    /// Waits until nothing is being done in the background any more: dropped guards and dropped
    /// acquisitions are settled. Call it before a program ends, so that what was dropped is
    /// released and not left to its lease.
    ///
    /// # Cancel safety
    ///
    /// Waits only; can be dropped.
    pub async fn settled(&self) {
        self.session.background.settled().await;
    }

    pub(crate) fn background(&self) -> Background {
        self.session.background.clone()
    }

    /// What this client keeps account of at the moment; all zero when it holds and waits for
    /// nothing.
    pub fn status(&self) -> ClientStatus {
        ClientStatus {
            holds: self.session.watchdog.len(),
            subscriptions: self.session.waiting.subscriptions(),
            background: self.session.background.running(),
        }
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

/// What a client keeps account of: [`Client::status`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ClientStatus {
    /// Locks that are held and looked after by the watchdog.
    pub holds: usize,
    /// Channels listened to: one per name that is waited for, or was until a moment ago. Who spins
    /// listens to none.
    pub subscriptions: usize,
    /// Releases and cancelled acquisitions that are being settled in the background.
    pub background: usize,
}

/// Settings of a [`Client`].
///
/// ```no_run
/// # async fn example() -> redlatch::Result<()> {
/// use std::time::Duration;
///
/// let client = redlatch::Client::builder()
///     .watchdog(Duration::from_secs(10))
///     .prefix("shop:")
///     .connect("redis://127.0.0.1:6379/0")
///     .await?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
#[must_use = "settings do nothing until `connect`"]
pub struct ClientBuilder {
    watchdog: Duration,
    prefix: String,
    connect_timeout: Duration,
    response_timeout: Duration,
    outage_limit: Option<Duration>,
    linger: Duration,
    client_id: Option<String>,
    replica_sync: ReplicaSync,
    replica_timeout: Duration,
    given: Given,
}

/// Below this a third of the lease comes near to a round trip on a busy machine.
const SHORTEST_WATCHDOG: Duration = Duration::from_millis(100);

impl Default for ClientBuilder {
    fn default() -> ClientBuilder {
        ClientBuilder {
            watchdog: Lease::WATCHDOG.duration(),
            prefix: String::new(),
            connect_timeout: Duration::from_secs(5),
            response_timeout: Duration::from_secs(3),
            outage_limit: None,
            linger: Duration::from_secs(1),
            client_id: None,
            replica_sync: ReplicaSync::default(),
            replica_timeout: Duration::from_secs(1),
            given: Given::default(),
        }
    }
}

impl ClientBuilder {
    /// The lease of locks that the watchdog renews, each time a third of it has passed. It is how
    /// long others wait after a holder has died. Default 30 s, as in Redisson
    /// (`lockWatchdogTimeout`); at least 100 ms.
    pub fn watchdog(mut self, lease: Duration) -> ClientBuilder {
        self.watchdog = lease;
        self
    }

    /// Put before every name, to make its key (Redisson: a `NameMapper`). Default none.
    pub fn prefix(mut self, prefix: impl Into<String>) -> ClientBuilder {
        self.prefix = prefix.into();
        self
    }

    /// How long connecting may take. Default 5 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> ClientBuilder {
        self.connect_timeout = timeout;
        self
    }

    /// How long an answer may take, all repetitions on new connections included. Default 3 s, as
    /// in Redisson (`timeout`).
    pub fn response_timeout(mut self, timeout: Duration) -> ClientBuilder {
        self.response_timeout = timeout;
        self
    }

    /// How long an outage may last before waiting fails. It begins with the first call that fails after
    /// the store's last answer (the errors for which [`Error::is_transient`] is true), and ends with the
    /// next answer. While it lasts a request that waits tries again, with pauses of up to a second, and
    /// says so once in the log (level WARN). Each try takes up to the response timeout, so waiting may
    /// fail that much later than the limit.
    ///
    /// Default: no longer than the response timeout. A RedLock waits through any outage by default.
    /// [`Duration::MAX`]: waits through any outage. A wait limit wins if it is shorter, and a request
    /// that does not wait (`try_lock` without `wait`) fails with the response timeout. Errors that
    /// time does not mend (a key of another kind, wrong credentials) are returned at once.
    pub fn outage_limit(mut self, limit: Duration) -> ClientBuilder {
        self.outage_limit = Some(limit);
        self
    }

    /// How long a subscription is kept after its last waiter has gone, so that a name that is
    /// waited for again and again is not subscribed to again and again. Default 1 s.
    pub fn subscription_linger(mut self, linger: Duration) -> ClientBuilder {
        self.linger = linger;
        self
    }

    /// The client's id in the store, instead of a random UUID: 1 to 64 letters, digits, `-`, `_`
    /// or `.`.
    ///
    /// For logs and listings. Processes do not share owners even if they share an id, because each
    /// begins their numbers at random ([`Owner`]): a process that restarts under the same id after
    /// a crash waits for the lease of its predecessor as any other client does. Within one process
    /// give each client an id of its own: two clients with the same id that acquire for the same
    /// [`Owner`] would hold each other's locks.
    pub fn client_id(mut self, id: impl Into<String>) -> ClientBuilder {
        self.client_id = Some(id.into());
        self
    }

    /// How many replicas must have an acquisition before it counts: [`ReplicaSync`]. Default
    /// [`ReplicaSync::All`], as in Redisson (`checkLockSyncedSlaves`).
    pub fn replica_sync(mut self, sync: ReplicaSync) -> ClientBuilder {
        self.replica_sync = sync;
        self
    }

    /// How long the replicas are waited for after an acquisition. Default 1 s, as in Redisson
    /// (`slavesSyncTimeout`); at least 1 ms.
    pub fn replica_timeout(mut self, timeout: Duration) -> ClientBuilder {
        self.replica_timeout = timeout;
        self
    }

    /// The user to log in as, if the servers have several (ACL). Wins over the one in the URL.
    pub fn username(mut self, username: impl Into<String>) -> ClientBuilder {
        self.given.login.username = Some(username.into());
        self
    }

    /// The password to log in with. Wins over the one in the URL, where it is easily printed or
    /// logged; this one is not shown by `Debug` nor in any error.
    pub fn password(mut self, password: impl Into<String>) -> ClientBuilder {
        self.given.login.password = Some(Secret(password.into()));
        self
    }

    /// The user to log in as at sentinels. They have users of their own; without this, and without
    /// `sentinel_user` in the URL, there is no logging in at sentinels.
    pub fn sentinel_username(mut self, username: impl Into<String>) -> ClientBuilder {
        self.given.sentinel_login.username = Some(username.into());
        self
    }

    /// The password for sentinels: see [`sentinel_username`](ClientBuilder::sentinel_username).
    pub fn sentinel_password(mut self, password: impl Into<String>) -> ClientBuilder {
        self.given.sentinel_login.password = Some(Secret(password.into()));
        self
    }

    /// Connects to the store that the URL names:
    ///
    /// | URL | store |
    /// |---|---|
    /// | `redis://[user:password@]host[:port][/db]`, `valkey://…` | one server over TCP |
    /// | `redis+unix:///path[?db=N&user=…&pass=…]` | one server over a unix socket |
    /// | `redis+sentinel://[user:password@]host[:port],…/master[/db]` | the master that these sentinels name; `?sentinel_user=…&sentinel_password=…` for themselves |
    /// | `redis+cluster://[user:password@]host[:port],…` | the cluster to which these nodes belong |
    /// | `rediss…://`, `valkeys…://` | the same with TLS (feature `tls`, on by default) |
    /// | `embedded:` | an embedded store of its own, in this process |
    ///
    /// `?db=N` can stand for `/db`. A part of a URL that is unknown, given twice or contradicted by
    /// another part is an [`Error::InvalidUrl`] that names it. Users and passwords may be
    /// percent-encoded.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidUrl`], [`Error::InvalidSetting`], [`Error::Unavailable`],
    /// [`Error::ResponseTimeout`], [`Error::AuthenticationFailed`], [`Error::TlsFailed`],
    /// [`Error::NotPermitted`], [`Error::UnsupportedServer`] (Redis before 6.2, or a node of a cluster
    /// where none was meant, and the other way round), [`Error::NoRuntime`]. Connecting is tried once;
    /// only later the connection is made anew by itself.
    pub async fn connect(self, url: &str) -> Result<Client> {
        if url == "embedded:" {
            return self.connect_embedded(&Embedded::new());
        }
        let checked = self.check()?;
        crate::surroundings::check_sockets()?;
        let lines = Arc::new(Lines::default());
        let ear: SharedEar = lines.clone();
        let settings = Settings {
            connect_timeout: self.connect_timeout,
            response_timeout: self.response_timeout,
            replica_sync: self.replica_sync,
            replica_timeout: self.replica_timeout,
        };
        let redis = Redis::connect(url, &self.given, settings, ear).await?;
        Ok(self.assemble(checked, Store::Redis(redis), lines))
    }

    /// A client of an embedded store, which other clients may share.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`].
    pub fn connect_embedded(self, store: &Embedded) -> Result<Client> {
        let checked = self.check()?;
        Ok(self.attach(store, checked))
    }
}

/// TLS, for URLs that begin with `rediss`. The server's certificate is always checked, its name
/// included; there is no switch to leave that out.
#[cfg(feature = "tls")]
impl ClientBuilder {
    /// The CA whose certificates are accepted from servers, *instead* of those that the system
    /// trusts: whoever runs a CA of their own does not want a server that anybody in the world has
    /// vouched for. One or several certificates in PEM.
    pub fn tls_ca(mut self, pem: impl Into<Vec<u8>>) -> ClientBuilder {
        self.given.tls.ca = Some(Pem::Text(pem.into()));
        self
    }

    /// The same, out of a file, which is read again for every new connection: it may be replaced
    /// while the program runs.
    pub fn tls_ca_file(mut self, path: impl Into<PathBuf>) -> ClientBuilder {
        self.given.tls.ca = Some(Pem::File(path.into()));
        self
    }

    /// The certificate, with those between it and the CA if there are any, and the private key with
    /// which the client proves who it is (`tls-auth-clients`). Both in PEM, the key not encrypted.
    pub fn tls_client_cert(
        mut self,
        cert_pem: impl Into<Vec<u8>>,
        key_pem: impl Into<Vec<u8>>,
    ) -> ClientBuilder {
        let (cert, key) = (cert_pem.into(), key_pem.into());
        self.given.tls.client = Some((Pem::Text(cert), Pem::Text(key)));
        self
    }

    /// The same, out of files, which are read again for every new connection: they may be replaced
    /// while the program runs.
    pub fn tls_client_cert_files(
        mut self,
        cert: impl Into<PathBuf>,
        key: impl Into<PathBuf>,
    ) -> ClientBuilder {
        let (cert, key) = (cert.into(), key.into());
        self.given.tls.client = Some((Pem::File(cert), Pem::File(key)));
        self
    }
}

/// Settings that were looked through.
struct Checked {
    id: ClientId,
    lease: Lease,
}

impl ClientBuilder {
    fn check(&self) -> Result<Checked> {
        let invalid = |setting, reason: String| Err(Error::InvalidSetting { setting, reason });
        if self.watchdog < SHORTEST_WATCHDOG {
            return invalid(
                "watchdog",
                format!("{:?} is too short: take at least 100 ms", self.watchdog),
            );
        }
        if let Some(reason) = forbidden(&self.prefix) {
            return invalid("prefix", reason.into());
        }
        for (setting, timeout) in [
            ("connect_timeout", self.connect_timeout),
            ("response_timeout", self.response_timeout),
            ("replica_timeout", self.replica_timeout),
        ] {
            if timeout.is_zero() || timeout > crate::MAX_LEASE {
                return invalid(
                    setting,
                    "take more than nothing and less than ten years".into(),
                );
            }
        }
        if self.linger > crate::MAX_LEASE {
            return invalid("subscription_linger", "take less than ten years".into());
        }
        Ok(Checked {
            id: match &self.client_id {
                Some(id) => ClientId::chosen(id)?,
                None => ClientId::random(),
            },
            lease: Lease::new(self.watchdog).map_err(|error| Error::InvalidSetting {
                setting: "watchdog",
                reason: error.to_string(),
            })?,
        })
    }

    fn attach(self, store: &Embedded, checked: Checked) -> Client {
        let lines = Arc::new(Lines::default());
        let attached = store.attach(lines.clone());
        self.assemble(checked, Store::Embedded(attached), lines)
    }

    fn assemble(self, checked: Checked, store: Store, lines: Arc<Lines>) -> Client {
        let background = Background::default();
        // What fails here fails again, with an error, at the first acquisition.
        let _ = background.bind();
        let store = Arc::new(store);
        let waiting = WaitingRoom::new(lines, store.clone(), background.clone(), self.linger);
        let session = Session::new(
            checked.id,
            self.prefix,
            store,
            waiting,
            checked.lease,
            background,
            self.outage_limit,
        );
        Client {
            session: Arc::new(session),
        }
    }
}
