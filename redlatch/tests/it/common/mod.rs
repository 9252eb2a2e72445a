//! Helpers that the integration tests share.

pub(crate) mod deployments;
pub(crate) mod imitations;
pub(crate) mod prelude;
pub(crate) mod secured;

use std::fmt::Debug;
use std::future::poll_fn;
use std::ops::RangeBounds;
use std::panic::Location;
use std::path::PathBuf;
use std::pin::pin;
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::task::Poll;
use std::thread;
use std::time::Duration;

use deployments::Deployment;
use redlatch::kind::{LockKind, OwnedKind};
use redlatch::{
    Acquire, Client, ClientBuilder, Embedded, Error, Expiry, Guard, HasLease, Lock, Loss,
    MultiLock, Owner, RedLock,
};
use redlatch_testkit::{
    Cluster, Proxy, Sentinels, Server, shared, shared_cluster, shared_sentinels, unique,
};
use secured::Secured;
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinHandle;

/// Longer than any successful operation takes, even on the slowest machine.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// A watchdog lease long enough to survive a pause of two or three seconds of the whole process on
/// a busy machine. It is short enough for tests to wait for a renewal (after a third of it).
pub(crate) const WATCHDOG: Duration = Duration::from_secs(6);

/// A short duration that, like [`WATCHDOG`], still leaves time for a few steps.
pub(crate) const SHORT: Duration = Duration::from_secs(5);

pub(crate) const SECOND: Duration = Duration::from_secs(1);

pub(crate) const HOUR: Duration = Duration::from_secs(3600);

/// Reproducible random numbers from a seed (SplitMix64).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub(crate) fn millis(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_millis(from + self.below(to - from))
    }
}

/// Returns the seed of a random test, `REDLATCH_SEED` or a new one, and prints it.
pub(crate) fn seed() -> u64 {
    let given = std::env::var("REDLATCH_SEED").ok();
    let seed = given.map_or_else(|| Owner::new().number(), |seed| seed.parse().unwrap());
    println!("REDLATCH_SEED={seed}");
    seed
}

/// Waits until a condition holds.
pub(crate) async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let begun = std::time::Instant::now();
    while !holds().await {
        assert!(begun.elapsed() < LONG, "never happened: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Waits until this many replicas of a master are connected and in sync.
pub(crate) async fn until_in_sync(master: &Server, replicas: usize) {
    until("in sync", async || master.replicas_in_sync() == replicas).await;
}

/// Fails instead of hanging.
pub(crate) async fn within_limit<T>(what: &str, work: impl IntoFuture<Output = T>) -> T {
    match tokio::time::timeout(LONG, work.into_future()).await {
        Ok(done) => done,
        Err(_) => panic!("never happened: {what}"),
    }
}

/// Polls a waiter while what it waits for is released. Returns what it acquires, unless it drops its request first.
pub(crate) async fn beside_release<T>(
    waiter: impl Future<Output = Option<T>>,
    release: impl IntoFuture<Output = redlatch::Result<()>>,
) -> Option<T> {
    let both = async { tokio::join!(waiter, release.into_future()) };
    let (acquired, released) = within_limit("both", both).await;
    released.unwrap();
    acquired
}

/// Returns what `work` returns within the limit, and panics if it fails.
#[track_caller]
pub(crate) fn done<T, E: Debug>(
    what: &str,
    work: impl IntoFuture<Output = Result<T, E>>,
) -> impl Future<Output = T> {
    let caller = Location::caller();
    async move { unwrapped(within_limit(what, work).await, caller) }
}

/// Returns what a task acquired or did within the limit, and panics if the task failed.
#[track_caller]
pub(crate) fn joined<T, E: Debug, J: Debug>(
    what: &str,
    task: impl IntoFuture<Output = Result<Result<T, E>, J>>,
) -> impl Future<Output = T> {
    let caller = Location::caller();
    async move { unwrapped(unwrapped(within_limit(what, task).await, caller), caller) }
}

/// The same for many tasks, which return nothing.
pub(crate) async fn done_all<E: Debug>(
    what: &str,
    tasks: impl IntoIterator<Item = impl Future<Output = Result<(), E>>>,
) {
    for task in tasks {
        done(what, task).await;
    }
}

/// The same for many tasks. Drops what they acquired, one after the other.
pub(crate) async fn joined_all<T, E: Debug, J: Debug>(
    what: &str,
    tasks: impl IntoIterator<Item = impl Future<Output = Result<Result<T, E>, J>>>,
) {
    for task in tasks {
        joined(what, task).await;
    }
}

/// Returns a runtime of one thread. When it is dropped, all that runs in it ends, as in a process that is killed.
pub(crate) fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

pub(crate) fn threaded_runtime() -> Runtime {
    let mut runtime = Builder::new_multi_thread();
    runtime.worker_threads(1).enable_all().build().unwrap()
}

pub(crate) fn runtime_without_sockets() -> Runtime {
    Builder::new_current_thread().enable_time().build().unwrap()
}

/// Starts a task for each number or other item.
pub(crate) fn spawn_each<N, F>(
    items: impl IntoIterator<Item = N>,
    mut task: impl FnMut(N) -> F,
) -> Vec<JoinHandle<F::Output>>
where
    F: IntoFuture<IntoFuture: Send + 'static, Output: Send + 'static>,
{
    let spawned = |item| tokio::spawn(task(item).into_future());
    items.into_iter().map(spawned).collect()
}

/// Starts a request in a task. Returns once the client has one subscription, so that a message wakes it.
pub(crate) async fn waiter_of<F>(client: &Client, request: F) -> JoinHandle<F::Output>
where
    F: IntoFuture<IntoFuture: Send + 'static, Output: Send + 'static>,
{
    let waiter = tokio::spawn(request.into_future());
    until_subscribed(client, 1).await;
    waiter
}

fn unwrapped<T, E: Debug>(result: Result<T, E>, caller: &Location<'_>) -> T {
    result.unwrap_or_else(|error| panic!("{error:?}, at {caller}"))
}

/// A lock of any kind, or several locks as one.
pub(crate) trait AnyLock {
    type Locked: HasLease;

    fn request(&self) -> Acquire<Self::Locked>;
}

impl<K: LockKind> AnyLock for Lock<K> {
    type Locked = Lock<K>;

    fn request(&self) -> Acquire<Lock<K>> {
        self.lock()
    }
}

impl AnyLock for MultiLock {
    type Locked = MultiLock;

    fn request(&self) -> Acquire<MultiLock> {
        self.lock()
    }
}

impl AnyLock for RedLock {
    type Locked = RedLock;

    fn request(&self) -> Acquire<RedLock> {
        self.lock()
    }
}

/// Acquires a lock, and panics if that fails.
#[track_caller]
pub(crate) fn held<L: AnyLock>(lock: &L) -> impl Future<Output = Guard<L::Locked>> + use<L> {
    let (request, caller) = (lock.request().into_future(), Location::caller());
    async move { unwrapped(request.await, caller) }
}

/// Releases a lock, and panics if that fails.
#[track_caller]
pub(crate) fn free<R: HasLease>(guard: Guard<R>) -> impl Future<Output = ()> {
    let caller = Location::caller();
    async move { unwrapped(guard.unlock().await, caller) }
}

/// Acquires locks one after the other.
pub(crate) async fn held_all<L: AnyLock>(
    locks: impl IntoIterator<Item = L>,
) -> Vec<Guard<L::Locked>> {
    let mut guards = Vec::new();
    for lock in locks {
        guards.push(held(&lock).await);
    }
    guards
}

/// Releases locks one after the other.
pub(crate) async fn free_all<R: HasLease>(guards: impl IntoIterator<Item = Guard<R>>) {
    for guard in guards {
        free(guard).await;
    }
}

/// Returns how long the lock stays locked without a renewal.
pub(crate) async fn lease_left<K: LockKind>(lock: &Lock<K>) -> Duration {
    let left = lock.remaining_lease().await.unwrap();
    left.and_then(Expiry::duration).expect("a lease")
}

/// Creates a user who may do anything but publish and subscribe. Returns the URL with which it logs in.
pub(crate) fn user_without_channels(server: &Server) -> String {
    let mut rules = vec!["ACL", "SETUSER", "restricted", "on", ">secret"];
    rules.extend(["~*", "resetchannels", "+@all"]);
    let () = server.command(&rules);
    format!("redis://restricted:secret@127.0.0.1:{}", server.port())
}

/// Returns the milliseconds until the key expires, or -1 without a limit, or -2 without the key.
pub(crate) fn pttl(server: &Server, key: &str) -> i64 {
    server.command(&["PTTL", key])
}

/// Returns how many connections of a server are subscribed to a channel.
pub(crate) fn subscribers(server: &Server, channel: &str) -> u32 {
    let (_, subscribers): (String, u32) = server.command(&["PUBSUB", "NUMSUB", channel]);
    subscribers
}

/// Waits until a channel has one subscriber, and never more.
pub(crate) async fn until_subscribed_once(server: &Server, channel: &str) {
    until("subscribed, once", async || {
        let subscribers = subscribers(server, channel);
        assert!(subscribers <= 1);
        subscribers == 1
    })
    .await;
}

/// Subscribes to a channel. Returns the messages from then on.
pub(crate) fn messages(server: &Server, channel: &str) -> Receiver<String> {
    let (mut connection, channel) = (server.connection(), channel.to_owned());
    let (subscribed, is_subscribed) = mpsc::channel();
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let mut pubsub = connection.as_pubsub();
        pubsub.subscribe(channel).unwrap();
        subscribed.send(()).unwrap();
        // Until the test or its server has ended.
        while let Ok(message) = pubsub.get_message()
            && sender.send(message.get_payload().unwrap()).is_ok()
        {}
    });
    is_subscribed.recv().unwrap();
    receiver
}

/// Returns how many channels of a server have subscribers.
pub(crate) fn channels(server: &Server) -> usize {
    let channels: Vec<String> = server.command(&["PUBSUB", "CHANNELS", "*"]);
    channels.len()
}

/// Asserts that the client has no holds and no background work.
#[track_caller]
pub(crate) fn assert_idle(client: &Client) {
    let status = client.status();
    assert_eq!((status.holds, status.background), (0, 0), "{status:?}");
}

/// Waits until the client has no holds, no subscriptions and no background work.
pub(crate) async fn until_idle(client: &Client) {
    until("all is empty", async || {
        let status = client.status();
        (status.holds, status.subscriptions, status.background) == (0, 0, 0)
    })
    .await;
}

/// Waits until the client has this many subscriptions, so that a message wakes its waiters.
pub(crate) async fn until_subscribed(client: &Client, subscriptions: usize) {
    until("subscribed", async || {
        client.status().subscriptions == subscriptions
    })
    .await;
}

/// Retries an operation whose time limit is so short that a pause of the process can exceed it: a
/// short lease that is not kept for long, or a short timeout or wait limit.
pub(crate) async fn retry_if_late<T, F>(ask: impl Fn() -> F) -> T
where
    F: IntoFuture<Output = redlatch::Result<T>>,
{
    let begun = std::time::Instant::now();
    loop {
        match ask().await {
            Err(Error::Lost { .. } | Error::ResponseTimeout { .. }) if begun.elapsed() < LONG => {}
            answer => return answer.unwrap(),
        }
    }
}

/// Same as [`retry_if_late`], for blocking calls.
pub(crate) fn retry_if_late_blocking<T>(ask: impl Fn() -> redlatch::Result<T>) -> T {
    let begun = std::time::Instant::now();
    loop {
        match ask() {
            Err(Error::Lost { .. } | Error::ResponseTimeout { .. }) if begun.elapsed() < LONG => {}
            answer => return answer.unwrap(),
        }
    }
}

/// Retries while the store, its sentinels or its replicas are not ready, or do not answer in time.
pub(crate) async fn retry_transient<T, F>(ask: impl Fn() -> F) -> T
where
    F: IntoFuture<Output = redlatch::Result<T>>,
{
    let begun = std::time::Instant::now();
    loop {
        match ask().await {
            Err(error) if error.is_transient() && begun.elapsed() < LONG => {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            answer => return answer.unwrap(),
        }
    }
}

/// Waits until a value rises between two observations, such as the remaining lease at a renewal.
pub(crate) async fn until_rises<T: PartialOrd>(what: &str, mut observe: impl AsyncFnMut() -> T) {
    let begun = std::time::Instant::now();
    let mut before = observe().await;
    loop {
        let now = observe().await;
        if now > before {
            return;
        }
        assert!(begun.elapsed() < LONG, "never rises: {what}");
        before = now;
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Polls up to `polls` times, each time when woken. Returns the output, or `None` if the future was
/// dropped first.
pub(crate) async fn poll_up_to<F: IntoFuture>(polls: usize, future: F) -> Option<F::Output> {
    let mut future = pin!(future.into_future());
    let mut polled = 0;
    poll_fn(|cx| {
        polled += 1;
        match future.as_mut().poll(cx) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if polled >= polls => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

/// Polls a request that waits until something else has happened, and not afterwards.
#[track_caller]
pub(crate) fn poll_until<T, W: Future + Unpin>(
    mut waiting: W,
    event: impl Future<Output = T>,
) -> impl Future<Output = T> {
    let caller = Location::caller();
    async move {
        tokio::select! {
            biased;
            _ = &mut waiting => panic!("it does not wait, at {caller}"),
            happened = event => happened,
        }
    }
}

/// Polls a waiter for a held lock until the store has refused its first attempt, so that it is in the queue of its client.
pub(crate) async fn poll_until_refused<K: OwnedKind>(lock: &Lock<K>, waiting: impl Future + Unpin) {
    let refused = async {
        // A connection keeps order for attempts: these follow the waiter's own and its subscription. What only reads, as
        // `is_locked`, has another connection if replicas confirm acquisitions.
        for _ in 0..3 {
            assert!(lock.try_lock().await.unwrap().is_none());
        }
    };
    poll_until(waiting, refused).await;
}

/// Polls a waiter this many times. Then keeps it without polling until the shared server reports a
/// subscription to its channel.
pub(crate) async fn poll_until_subscribed<F: IntoFuture>(polls: usize, waiter: F, channel: &str) {
    let mut few = pin!(poll_up_to(polls, waiter));
    let subscribed = until("subscribed", async || subscribers(shared(), channel) == 1);
    tokio::select! {
        biased;
        done = &mut few => assert!(done.is_none()),
        () = subscribed => {}
    }
}

/// Drops `work` after one poll, then after two polls, and so on until it completes, several times
/// over.
pub(crate) async fn drop_after_each_poll(mut work: impl AsyncFnMut(usize) -> bool) {
    for _ in 0..5 {
        let mut polls = 1;
        while !work(polls).await {
            polls += 1;
            assert!(polls < 1000, "never gets through");
        }
    }
}

/// Same as [`drop_after_each_poll`], with a check of what is left after each. What the request returns is dropped, too.
pub(crate) async fn drop_result_after_each_poll<T>(
    mut request: impl AsyncFnMut(usize) -> Option<T>,
    mut check: impl AsyncFnMut(),
) {
    drop_after_each_poll(async |polls| {
        let result = request(polls).await;
        let is_complete = result.is_some();
        drop(result);
        check().await;
        is_complete
    })
    .await;
}

/// Waits until the server has executed the script whose answer the proxy loses.
pub(crate) async fn wait_until_lost(proxy: &Arc<Proxy>) {
    let proxy = proxy.clone();
    let lost = tokio::task::spawn_blocking(move || proxy.wait_until_lost());
    lost.await.unwrap();
}

/// Runs `work`, loses the server's answer to its first script, and then cuts the connection. The script must be loaded before,
/// or the lost answer is that it is unknown.
pub(crate) async fn with_lost_answer<T>(proxy: &Arc<Proxy>, work: impl Future<Output = T>) -> T {
    with_lost_answer_after(proxy, work, std::future::ready(())).await
}

/// Same as [`with_lost_answer`], but runs `meanwhile` after the server has answered and before
/// the connection is cut.
pub(crate) async fn with_lost_answer_after<T>(
    proxy: &Arc<Proxy>,
    work: impl Future<Output = T>,
    meanwhile: impl Future<Output = ()>,
) -> T {
    proxy.lose_next_answer();
    let cutting = async {
        wait_until_lost(proxy).await;
        meanwhile.await;
        proxy.refuse(false);
        proxy.cut();
    };
    within_limit("answered", async { tokio::join!(work, cutting) })
        .await
        .0
}

/// Closes all connections through the proxy, which refuses new ones from now on.
pub(crate) fn cut_off(proxy: &Proxy) {
    proxy.refuse(true);
    proxy.cut();
}

/// Waits until the proxy has discarded an answer of the server.
pub(crate) async fn wait_until_discarded(proxy: &Arc<Proxy>) {
    let proxy = proxy.clone();
    let discarded = tokio::task::spawn_blocking(move || proxy.wait_until_discarded());
    discarded.await.unwrap();
}

/// Asserts how long something took.
#[track_caller]
pub(crate) fn assert_took(took: Duration, expected: impl RangeBounds<Duration>) {
    assert!(expected.contains(&took), "{took:?}");
}

/// Asserts that an operation failed, and may succeed if it is repeated.
#[track_caller]
pub(crate) fn assert_transient<T: Debug>(result: Result<T, Error>) {
    match result {
        Err(error) => assert!(error.is_transient(), "{error}"),
        done => panic!("{done:?}"),
    }
}

/// Asserts that an operation failed because its hold was lost, with this cause.
#[track_caller]
pub(crate) fn assert_lost<T: Debug>(result: Result<T, Error>, why: Loss) {
    match result {
        Err(Error::Lost { reason, .. }) => assert_eq!(reason, why),
        other => panic!("not lost: {other:?}"),
    }
}

/// Returns the command that runs an example, without environment variables of the tests. Cargo
/// builds the examples before it runs all tests, but not before it runs only some.
pub(crate) fn example(name: &str) -> Command {
    let own = std::env::current_exe().unwrap();
    let built = own.parent().and_then(|deps| deps.parent()).unwrap();
    let file = format!("{name}{}", std::env::consts::EXE_SUFFIX);
    let example: PathBuf = built.join("examples").join(file);
    if !example.exists() {
        let profile = match built.file_name().unwrap().to_str().unwrap() {
            "debug" => "dev",
            other => other,
        };
        let status = Command::new(env!("CARGO"))
            // The features of the tests, so that nothing else is built.
            .args(["build", "--quiet", "--all-features"])
            .args(["--package", "redlatch", "--package", "redlatch-examples"])
            .args(["--example", name, "--profile", profile])
            .arg("--target-dir")
            .arg(built.parent().unwrap())
            .status()
            .unwrap();
        assert!(status.success(), "the example does not build");
    }
    let mut example = Command::new(example);
    example.env_remove("REDLATCH_URL");
    example
}

/// Asserts that a value matches a pattern; otherwise prints the value.
#[macro_export]
macro_rules! assert_matches {
    ($value:expr, $($pattern:tt)+) => {
        match $value {
            $($pattern)+ => {}
            ref other => panic!("{other:?}"),
        }
    };
}

/// A store on which tests run. The same tests run on every kind of store.
pub(crate) enum TestStore {
    Embedded(Embedded),
    Server(&'static Server),
    Sentinel(&'static Sentinels),
    Cluster(&'static Cluster),
    Secured(&'static Secured),
    Deployment(Deployment),
}

impl TestStore {
    pub(crate) fn embedded() -> TestStore {
        TestStore::Embedded(Embedded::new())
    }

    /// A server, or what `REDLATCH_TEST_DEPLOYMENT` names in its place.
    pub(crate) fn server() -> TestStore {
        match std::env::var("REDLATCH_TEST_DEPLOYMENT").as_deref() {
            Err(_) => TestStore::Server(shared()),
            Ok("moved_endpoint") => TestStore::moved_endpoint(),
            Ok("sharded_endpoint") => TestStore::sharded_endpoint(),
            Ok("restricted") => TestStore::restricted(),
            Ok("rotating") => TestStore::rotating(),
            Ok("resp2") => TestStore::resp2(),
            Ok(other) => panic!("no deployment {other}"),
        }
    }

    pub(crate) fn moved_endpoint() -> TestStore {
        TestStore::Deployment(Deployment::moved_endpoint())
    }

    pub(crate) fn sharded_endpoint() -> TestStore {
        TestStore::Deployment(Deployment::sharded_endpoint())
    }

    pub(crate) fn restricted() -> TestStore {
        TestStore::Deployment(Deployment::restricted())
    }

    pub(crate) fn rotating() -> TestStore {
        TestStore::Deployment(Deployment::rotating())
    }

    pub(crate) fn resp2() -> TestStore {
        TestStore::Deployment(Deployment::resp2())
    }

    pub(crate) fn sentinel() -> TestStore {
        TestStore::Sentinel(shared_sentinels())
    }

    pub(crate) fn cluster() -> TestStore {
        TestStore::Cluster(shared_cluster())
    }

    /// TLS with client certificates, and a user with minimal permissions.
    pub(crate) fn secured() -> TestStore {
        TestStore::Secured(Secured::shared())
    }

    pub(crate) async fn client(&self) -> Client {
        self.client_with(Client::builder()).await
    }

    /// Creates a client, and its handle of a new object, such as a [`Client::lock`].
    pub(crate) async fn object<H>(
        &self,
        handle: impl Fn(&Client, &str) -> H,
        name: &str,
    ) -> (Client, H) {
        let client = self.client().await;
        let handle = handle(&client, &unique(name));
        (client, handle)
    }

    /// Creates a client whose waiters must be woken by messages: their periodic retry would come
    /// far too late.
    pub(crate) async fn client_without_retries(&self) -> Client {
        self.client_with(Client::builder().watchdog_lease(10 * LONG))
            .await
    }

    pub(crate) async fn clients_without_retries<const N: usize>(&self) -> [Client; N] {
        self.clients_with(Client::builder().watchdog_lease(10 * LONG))
            .await
    }

    /// Creates as many clients as the caller takes.
    pub(crate) async fn clients<const N: usize>(&self) -> [Client; N] {
        self.clients_with(Client::builder()).await
    }

    pub(crate) async fn clients_with<const N: usize>(
        &self,
        settings: ClientBuilder,
    ) -> [Client; N] {
        let mut clients = Vec::new();
        while clients.len() < N {
            clients.push(self.client_with(settings.clone()).await);
        }
        clients.try_into().unwrap_or_else(|_| unreachable!())
    }

    /// Returns the prefix of all names on this store.
    pub(crate) fn prefix(&self) -> &'static str {
        match self {
            TestStore::Secured(_) => secured::PREFIX,
            _ => "",
        }
    }

    /// Creates a client with an additional prefix after that of the store.
    pub(crate) async fn client_with_prefix(&self, prefix: &str) -> Client {
        match self {
            TestStore::Secured(secured) => secured.client(Client::builder(), prefix).await,
            _ => self.client_with(Client::builder().prefix(prefix)).await,
        }
    }

    pub(crate) async fn client_with(&self, settings: ClientBuilder) -> Client {
        let settings = patient(settings);
        let url = match self {
            TestStore::Embedded(store) => return settings.connect_embedded(store).unwrap(),
            TestStore::Server(server) => server.url(),
            TestStore::Sentinel(sentinels) => sentinels.url(),
            TestStore::Cluster(cluster) => cluster.url(),
            TestStore::Secured(secured) => return secured.client(settings, "").await,
            TestStore::Deployment(deployment) => return deployment.client(settings).await,
        };
        settings.connect(&url).await.unwrap()
    }
}

/// Creates clients of one new embedded store.
pub(crate) fn embedded_clients<const N: usize>() -> [Client; N] {
    let store = Embedded::new();
    [(); N].map(|()| Client::builder().connect_embedded(&store).unwrap())
}

/// Runs a test of the blocking API on every store.
pub(crate) fn on_every_store(test: impl Fn(&dyn Fn() -> redlatch::blocking::Client)) {
    use redlatch::blocking::Client;
    let store = Embedded::new();
    test(&|| Client::with_embedded(redlatch::Client::builder(), &store).unwrap());
    for url in [
        shared().url(),
        shared_sentinels().url(),
        shared_cluster().url(),
    ] {
        test(&|| Client::with(patient(redlatch::Client::builder()), &url).unwrap());
    }
    let secured = Secured::shared();
    let settings = || secured.settings(patient(redlatch::Client::builder()), "");
    test(&|| Client::with(settings(), &secured.server.url()).unwrap());
}

/// Raises the limits of a client, for tests that do not depend on them: beside busy processes the defaults are short.
pub(crate) fn patient(settings: ClientBuilder) -> ClientBuilder {
    let settings = settings.connect_timeout(LONG).response_timeout(LONG);
    settings.replica_timeout(LONG)
}

/// Settings of clients whose holds are renewed soon enough for a test to wait for it.
pub(crate) fn renewing() -> ClientBuilder {
    Client::builder().watchdog_lease(WATCHDOG)
}

/// Settings of clients whose subscriptions end soon after their last waiter.
pub(crate) fn short_linger() -> ClientBuilder {
    long_timeout().subscription_linger(Duration::from_millis(10))
}

/// Settings of clients that wait this long for an answer.
pub(crate) fn response_timeout(timeout: Duration) -> ClientBuilder {
    Client::builder().response_timeout(timeout)
}

/// Settings of clients that wait for an answer longer than any pause of a test.
pub(crate) fn long_timeout() -> ClientBuilder {
    response_timeout(LONG)
}

pub(crate) async fn connect(settings: ClientBuilder, url: &str) -> Client {
    settings.connect(url).await.unwrap()
}

/// Creates a client of one server, for tests that do not depend on its limits.
pub(crate) async fn client(server: &Server) -> Client {
    client_at(&server.url()).await
}

/// The same with the URL, such as that of a proxy.
pub(crate) async fn client_at(url: &str) -> Client {
    patient(Client::builder()).connect(url).await.unwrap()
}

/// Starts a server for one test, with a client.
pub(crate) async fn server_and_client() -> (Server, Client) {
    let server = Server::start();
    let client = client(&server).await;
    (server, client)
}

/// Starts a server for one test, behind a proxy that can break its connections.
pub(crate) fn proxied_server() -> (Server, Arc<Proxy>) {
    let server = Server::start();
    let proxy = Arc::new(Proxy::to(server.port()));
    (server, proxy)
}

/// The same, with a client that is connected through the proxy.
pub(crate) async fn proxied_client() -> (Server, Arc<Proxy>, Client) {
    let (server, proxy) = proxied_server();
    let client = client_at(&proxy.url()).await;
    (server, proxy, client)
}

/// Creates a client of one server, for tests that count requests: without the registry of clients, which a client writes in the background if a hold or
/// a wait has lasted for a second.
pub(crate) async fn unregistered_client(server: &Server) -> Client {
    let settings = patient(Client::builder()).registry(false);
    settings.connect(&server.url()).await.unwrap()
}

/// Calls a macro for each store, with the store's name before the other arguments.
#[macro_export]
macro_rules! for_each_store {
    ($macro:ident! $($rest:tt)*) => {
        $macro! { embedded $($rest)* }
        $macro! { server $($rest)* }
        $macro! { sentinel $($rest)* }
        $macro! { cluster $($rest)* }
        $macro! { secured $($rest)* }
    };
}

/// Turns each of the named async functions into one test per store.
#[macro_export]
macro_rules! on_every_store {
    ($($name:ident,)*) => {
        for_each_store! { on_store! $($name,)* }
    };
}

/// The same, and one test per deployment of `common/deployments.rs`. (With `REDLATCH_TEST_DEPLOYMENT`, all tests on a server
/// run on a deployment.)
#[macro_export]
macro_rules! on_every_store_and_deployment {
    ($($name:ident,)*) => {
        on_every_store! { $($name,)* }
        on_store! { moved_endpoint $($name,)* }
        on_store! { sharded_endpoint $($name,)* }
        on_store! { restricted $($name,)* }
        on_store! { rotating $($name,)* }
        on_store! { resp2 $($name,)* }
    };
}

/// Turns each of the named async functions into a test on one store.
#[macro_export]
macro_rules! on_store {
    ($store:ident $($name:ident,)*) => {
        mod $store {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                super::$name($crate::common::TestStore::$store()).await;
            })*
        }
    };
}
