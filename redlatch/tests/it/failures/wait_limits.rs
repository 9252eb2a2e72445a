//! Wait limits and outage limits: a call returns at its limit, with the error that explains it.

use std::time::Instant;

use redlatch::blocking;
use tokio::task::spawn_blocking;

use crate::common::prelude::*;

/// A wait limit that a busy machine overruns by far less than the response timeout, [`LONG`].
const LIMIT: Duration = Duration::from_millis(300);

/// Answered long before the response timeout.
const AT_THE_LIMIT: Duration = Duration::from_secs(20);

/// Runs every waiting request once with a limit. Returns whether each was granted.
async fn each_request(client: &Client, wait: Duration) -> Vec<(&'static str, Result<bool, Error>)> {
    let named = Owner::new();
    let (lock, other) = (client.lock("a"), client.lock("b"));
    let multi = MultiLock::new([&lock, &other]);
    let red = RedLock::new([&lock, &other, &client.lock("c")]);
    let rw = client.read_write_lock("rw");
    macro_rules! requests {
        ($($kind:literal: $request:expr,)*) => { vec![$({
            let begun = Instant::now();
            let answer = $request.await;
            let took = begun.elapsed();
            assert!(took < AT_THE_LIMIT, "{}: {took:?}", $kind);
            ($kind, answer.map(|guard| guard.is_some()))
        },)*] };
    }
    let mut answers = requests! {
        "lock": lock.try_lock().wait(wait),
        "lock of an owner": lock.try_lock().wait(wait).owner(named),
        "fair lock": client.fair_lock("f").try_lock().wait(wait),
        "spin lock": client.spin_lock("s").try_lock().wait(wait),
        "fenced lock": client.fenced_lock("n").try_lock().wait(wait),
        "read lock": rw.read().try_lock().wait(wait),
        "write lock": rw.write().try_lock().wait(wait),
        "multi-lock": multi.try_lock().wait(wait),
        "RedLock": red.try_lock().wait(wait),
        "RedLock of an owner": red.try_lock().wait(wait).owner(named),
        "semaphore": client.semaphore("p").try_acquire().wait(wait),
        "expirable semaphore": client.expirable_semaphore("e").try_acquire().wait(wait),
    };
    let begun = Instant::now();
    let open = client.count_down_latch("l").try_wait().wait(wait).await;
    assert!(begun.elapsed() < AT_THE_LIMIT, "latch");
    answers.push(("latch", open));
    answers
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_limit_holds_while_connections_are_refused() {
    let mut server = Server::start();
    let client = connect(long_timeout(), &server.url()).await;
    server.kill();
    for (kind, answer) in each_request(&client, LIMIT).await {
        let error = answer.unwrap_err();
        let is_refused = matches!(error, Error::Unavailable { .. });
        assert!(is_refused, "{kind}: {error}");
    }
    // The first request may have been sent before the client noticed the end of the connection.
    let left = client.status().background;
    assert!(left <= 1, "nothing was sent, and {left} are settled");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_limit_holds_while_the_server_is_frozen() {
    let server = Server::start();
    let client = connect(long_timeout(), &server.url()).await;
    server.freeze();
    for (kind, answer) in each_request(&client, LIMIT).await {
        let error = answer.unwrap_err();
        assert!(error.is_transient(), "{kind}: {error}");
    }
    server.thaw();
    within_limit("all steps are settled", client.flush()).await;
    let keys: Vec<String> = server.command(&["KEYS", "*"]);
    // The token and the reader's settings remain; no lock does.
    for name in ["a", "b", "c", "f", "s", "n", "rw"] {
        assert!(!keys.iter().any(|key| key == name), "{name} is still held");
    }
}

#[test]
fn blocking_wait_limit_holds_while_connections_are_refused() {
    let mut server = Server::start();
    let client = blocking::Client::with(long_timeout(), &server.url()).unwrap();
    server.kill();
    let (lock, other) = (client.lock("a"), client.lock("b"));
    let both = blocking::MultiLock::new([&lock, &other]);
    let begun = Instant::now();
    let outage = Duration::MAX;
    assert_transient(lock.try_lock().wait(LIMIT).block());
    let error = both.try_lock().wait(LIMIT).outage_limit(outage).block();
    assert_transient(error);
    let semaphore = client.semaphore("p");
    let error = semaphore.try_acquire().wait(LIMIT).outage_limit(outage);
    assert_transient(error.block());
    let latch = client.count_down_latch("l");
    let error = latch.try_wait().wait(LIMIT).outage_limit(outage).block();
    assert_transient(error);
    assert!(begun.elapsed() < AT_THE_LIMIT);
}

/// The second request waits for the first one's step, which is not answered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_limit_holds_behind_another_step_of_the_same_owner() {
    let server = Server::start();
    let client = connect(long_timeout(), &server.url()).await;
    let (lock, me) = (client.lock("a"), Owner::new());
    server.freeze();
    let first = tokio::spawn(lock.lock().owner(me).into_future());
    let begun = Instant::now();
    let second = lock.try_lock().wait(LIMIT).owner(me).await;
    assert_transient(second);
    assert!(begun.elapsed() < AT_THE_LIMIT);
    server.thaw();
    free(joined("answered", first).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_limit_returns_none_if_last_answer_was_held() {
    let server = Server::start();
    let client = connect(long_timeout(), &server.url()).await;
    let guard = held(&client.lock("a")).await;
    let lock = client.lock("a");
    let waits = |limit: Duration| tokio::spawn(lock.try_lock().wait(limit).into_future());
    let mut waiters = vec![waits(Duration::from_secs(8))];
    until("it waits", async || channels(&server) == 1).await;
    until_queue_knows(&lock, true).await;
    server.freeze();
    // These waiters send no request: they know the answer that the first waiter in the queue got.
    waiters.extend([LIMIT, 2 * LIMIT].map(waits));
    for waiter in waiters {
        assert!(done("at the limit", waiter).await.unwrap().is_none());
    }
    server.thaw();
    free(guard).await;
}

/// Waits until new waiters in this lock's local queue know that another owner holds the lock, or
/// until they do not know any more.
async fn until_queue_knows(lock: &Lock, known: bool) {
    until("new waiters of the queue know", async || {
        let wait = Duration::from_millis(1);
        lock.try_lock().wait(wait).await.is_ok() == known
    })
    .await;
}

/// Another owner held the lock when the queue formed. Since then the first waiter has retried,
/// and has got no answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_limit_returns_error_if_first_waiter_gets_no_answer() {
    let (server, proxy) = proxied_server();
    let client = connect(Client::builder().response_timeout(10 * LONG), &proxy.url()).await;
    let holder = connect(long_timeout(), &server.url()).await;
    let held = holder.lock("a").lock().await.unwrap();
    let lock = client.lock("a");
    let first = tokio::spawn(lock.lock().into_future());
    until("it waits", async || channels(&server) == 1).await;
    until_queue_knows(&lock, true).await;
    proxy.stall(true);
    proxy.cut();
    until_queue_knows(&lock, false).await;
    assert_transient(lock.try_lock().wait(LIMIT).await);
    proxy.stall(false);
    free(held).await;
    let guard = joined("served", first).await;
    free(guard).await;
}

/// If the process paused until the limit, the answer may be in flight.
#[tokio::test]
async fn answer_in_flight_at_the_limit_is_awaited_briefly() {
    let (_server, proxy) = proxied_server();
    let client = connect(long_timeout(), &proxy.url()).await;
    free(held(&client.lock("a")).await).await;
    proxy.delay(Duration::from_millis(10));
    let mut obtained = 0;
    // A busy machine is late with some of the answers.
    for n in 0..20 {
        let lock = client.lock(&format!("a-{n}"));
        if let Ok(guard) = lock.try_lock().wait(Duration::from_millis(1)).await {
            assert!(guard.is_some());
            obtained += 1;
        }
    }
    assert!(obtained > 0);
    proxy.delay(Duration::ZERO);
}

/// Without limits: if a request fails in an outage, the waiters queued behind it fail with it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_of_one_name_fail_together() {
    let mut server = Server::start();
    let holder = connect(long_timeout(), &server.url()).await;
    let timeout = Duration::from_secs(1);
    let client = connect(Client::builder().response_timeout(timeout), &server.url()).await;
    let guard = held(&holder.lock("a")).await;
    let waiters = spawn_each(0..60, |_| client.lock("a").lock());
    until("they wait", async || channels(&server) == 1).await;
    server.kill();
    let begun = Instant::now();
    for waiter in waiters {
        assert_transient(done("failed", waiter).await);
    }
    // One after the other, it would take a minute.
    assert!(begun.elapsed() < AT_THE_LIMIT, "{:?}", begun.elapsed());
    drop(guard);
}

/// A waiter of the queue has acquired the lock, so the next one sends no request: it knows that
/// another owner has the lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_behind_a_winner_of_its_queue_gets_none_at_its_limit() {
    let (server, client) = server_and_client().await;
    let lock = client.lock("a");
    let first = lock.lock().await.unwrap();
    let second = tokio::spawn(lock.lock().into_future());
    until("it waits", async || channels(&server) == 1).await;
    free(first).await;
    let held = joined("served", second).await;
    assert!(lock.try_lock().wait(LIMIT).await.unwrap().is_none());
    free(held).await;
}

/// Requests that were queued until an outage began reach their limits between two attempts, when
/// they are in no queue.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_left_their_queue_report_unreachable_store() {
    let mut server = Server::start();
    let holder = connect(long_timeout(), &server.url()).await;
    let settings = Client::builder().response_timeout(Duration::from_millis(200));
    let settings = settings.outage_limit(10 * LONG);
    let url = server.url();
    let client = retry_transient(|| settings.clone().connect(&url)).await;
    let held = holder.lock("a").lock().lease(10 * LONG).await.unwrap();
    let waiters = spawn_each(0..20, |i| {
        let limit = Duration::from_secs(10) + i * LIMIT / 3;
        client.lock("a").try_lock().wait(limit)
    });
    until("they wait", async || channels(&server) == 1).await;
    server.kill();
    for waiter in waiters {
        assert_transient(done("failed", waiter).await);
    }
    drop(held);
}

/// More requests inspect than may be in flight to one server at the same time, and none is
/// answered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unanswered_inspections_keep_no_turns() {
    let server = Server::start();
    let settings = Client::builder().response_timeout(Duration::from_secs(1));
    let settings = settings.outage_limit(10 * LONG);
    let url = server.url();
    let client = retry_transient(|| settings.clone().connect(&url)).await;
    server.freeze();
    let inspecting = spawn_each(0..700, |i| {
        let latch = client.count_down_latch(&format!("l{i}"));
        async move { latch.wait().await }
    });
    let latch = client.count_down_latch("once");
    // By the second failure, the others have failed at least once, too.
    for _ in 0..2 {
        let once = latch.wait().outage_limit(Duration::ZERO);
        assert_transient(once.await);
    }
    server.thaw();
    joined_all("answered", inspecting).await;
}

/// Without limits: requests and releases of one owner take turns, and fail together with the step
/// that is not answered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn steps_of_one_owner_fail_together() {
    let server = Server::start();
    let settings = Client::builder().response_timeout(Duration::from_secs(1));
    let client = connect(settings.watchdog_lease(LONG), &server.url()).await;
    let (lock, other, me) = (client.lock("a"), client.lock("b"), Owner::new());
    let both = MultiLock::new([&lock, &other]);
    let mut guards = Vec::new();
    for _ in 0..30 {
        guards.push(retry_transient(|| lock.lock().owner(me)).await);
    }
    server.freeze();
    let begun = Instant::now();
    let mut steps = Vec::new();
    for guard in guards {
        steps.push(tokio::spawn(guard.unlock()));
        let request = other.try_lock().owner(me).into_future();
        steps.push(tokio::spawn(async move { request.await.map(drop) }));
        let request = both.try_lock().owner(me).into_future();
        steps.push(tokio::spawn(async move { request.await.map(drop) }));
    }
    for step in steps {
        assert_transient(done("failed", step).await);
    }
    // One after the other, it would take at least half a minute.
    assert!(begun.elapsed() < AT_THE_LIMIT, "{:?}", begun.elapsed());
    server.thaw();
    within_limit("sent requests are settled", client.flush()).await;
    assert!(server.command::<Vec<String>>(&["KEYS", "*"]).is_empty());
}

/// The waiter was queued when the outage began, and retries faster than its queue ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queued_waiter_fails_at_the_outage_limit() {
    let (server, proxy) = proxied_server();
    let holder = connect(long_timeout(), &server.url()).await;
    let guard = held(&holder.lock("a")).await;
    for linger in [Duration::ZERO, Duration::from_secs(1), LIMIT * 60] {
        let settings = response_timeout(Duration::from_millis(100)).subscription_linger(linger);
        let settings = settings.outage_limit(Duration::from_millis(500));
        let client = connect(settings, &proxy.url()).await;
        let waiter = tokio::spawn(client.lock("a").lock().into_future());
        until("it waits", async || channels(&server) == 1).await;
        cut_off(&proxy);
        assert_transient(done("failed", waiter).await);
        proxy.refuse(false);
        until("nothing waits", async || channels(&server) == 0).await;
    }
    free(guard).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_wait_through_an_outage_up_to_the_outage_limit() {
    let (server, proxy) = proxied_server();
    let holder = connect(long_timeout(), &server.url()).await;
    let client = connect(response_timeout(Duration::from_millis(300)), &proxy.url()).await;
    let guard = held(&holder.lock("a")).await;
    let other = held(&holder.lock("b")).await;
    let unlimited = Duration::MAX;
    let (a, b) = (client.lock("a"), client.lock("b"));
    let both = MultiLock::new([&a, &b]);
    let (lock, multi) = (a.lock(), both.lock());
    // Each releases immediately what it acquires: either may be the first.
    let lock = tokio::spawn(async move { lock.outage_limit(unlimited).await.map(drop) });
    let multi = tokio::spawn(async move { multi.outage_limit(unlimited).await.map(drop) });
    let permits = client.semaphore("p").acquire().outage_limit(unlimited);
    let permits = tokio::spawn(permits.into_future());
    let latch = client.count_down_latch("l");
    assert!(holder.count_down_latch("l").try_set_count(1).await.unwrap());
    let opened = tokio::spawn(latch.wait().outage_limit(unlimited).into_future());
    // One of them is queued for the other lock, or for the same one.
    until("they wait", async || channels(&server) >= 3).await;
    cut_off(&proxy);
    // Longer than the response timeout: requests without an outage limit, and with a short one,
    // fail.
    for limit in [Duration::ZERO, Duration::from_millis(500)] {
        let request = client.lock("c").lock().outage_limit(limit);
        assert_transient(within_limit("failed", request).await);
    }
    // The wait limit takes precedence.
    let lock_c = client.lock("c");
    let limited = lock_c.try_lock().wait(LIMIT).outage_limit(unlimited);
    assert_transient(within_limit("at its limit", limited).await);
    let failed = [
        lock.is_finished(),
        multi.is_finished(),
        opened.is_finished(),
    ];
    assert_eq!(failed, [false; 3]);
    assert!(!permits.is_finished());
    proxy.refuse(false);
    free(guard).await;
    free(other).await;
    holder.count_down_latch("l").count_down().await.unwrap();
    assert!(holder.semaphore("p").try_set_permits(1).await.unwrap());
    // With such a short response timeout, a release may be answered too late; it then continues in
    // the background.
    joined("the lock", lock).await;
    joined("both locks", multi).await;
    drop(joined("the permit", permits).await);
    joined("the latch", opened).await;
}

/// Each attempt is answered, and then waits for replicas in vain, for longer than the shorter
/// limit.
#[tokio::test]
async fn attempts_that_wait_for_replicas_are_one_outage() {
    let server = Server::start();
    let settings = long_timeout().replica_sync(ReplicaSync::AtLeast(1));
    let client = connect(settings.replica_timeout(LIMIT), &server.url()).await;
    for limit in [LIMIT / 3, 3 * LIMIT] {
        let request = client.lock("a").lock().outage_limit(limit);
        let error = within_limit("failed", request).await.unwrap_err();
        assert_matches!(error, Error::NotReplicated { .. });
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_lifts_the_outage_limit_of_its_client() {
    let (_server, proxy) = proxied_server();
    let settings = response_timeout(LIMIT).outage_limit(LIMIT);
    let client = connect(settings, &proxy.url()).await;
    cut_off(&proxy);
    let lock = tokio::spawn(client.lock("a").lock().outage_limit(None).into_future());
    let latch = client.count_down_latch("l").wait().outage_limit(None);
    let latch = tokio::spawn(latch.into_future());
    let blocking = client.blocking().unwrap().lock("b").lock();
    let blocking = spawn_blocking(move || blocking.outage_limit(None).block().map(drop));
    for name in ["c", "d"] {
        let limited = client.lock(name).lock().into_future();
        let error = within_limit("at the client's limit", limited).await;
        assert_transient(error);
    }
    assert!(!lock.is_finished() && !latch.is_finished() && !blocking.is_finished());
    proxy.refuse(false);
    drop(joined("the lock", lock).await);
    joined("the latch", latch).await;
    let blocking = within_limit("the blocking lock", blocking).await;
    blocking.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn outage_limit_of_the_client_applies_to_every_request() {
    let (server, proxy) = proxied_server();
    let settings = response_timeout(LIMIT).outage_limit(None);
    let client = connect(settings, &proxy.url()).await;
    let impatient = connect(response_timeout(Duration::from_millis(300)), &proxy.url()).await;
    let _: i64 = server.command(&["SADD", "of another kind", "member"]);
    cut_off(&proxy);
    let waiter = tokio::spawn(client.fair_lock("a").lock().into_future());
    let error = within_limit("failed", impatient.fair_lock("b").lock()).await;
    assert_transient(error);
    let red = RedLock::new([impatient.lock("r")]);
    let red = red.lock().outage_limit(Duration::from_millis(400));
    assert_transient(within_limit("no majority", red).await);
    assert!(!waiter.is_finished());
    proxy.refuse(false);
    drop(joined("after the outage", waiter).await);
    // Permanent errors are returned immediately.
    let error = client.lock("of another kind").lock().await.unwrap_err();
    assert_matches!(error, Error::WrongKind { .. });
}

/// Returns the errors of a single lock and of a multi-lock when the server answers with an error.
async fn errors_of_both(client: &Client) -> (Error, Error) {
    let (a, b) = (client.lock("a"), client.lock("b"));
    let single = a.try_lock().await.unwrap_err();
    let multi = MultiLock::new([&a, &b]).try_lock().await.unwrap_err();
    (single, multi)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn multi_lock_maps_server_errors_like_a_single_lock() {
    let server = Server::start();
    let client = connect(response_timeout(Duration::from_millis(500)), &server.url()).await;
    let set = |name: &str, value: &str| {
        let _: String = server.command(&["CONFIG", "SET", name, value]);
    };
    let same = |what: &str, (single, multi): (Error, Error), transient: bool| {
        assert_eq!(single.is_transient(), transient, "{what}: {single}");
        assert_eq!(multi.is_transient(), transient, "{what}: {multi}");
        let kind = std::mem::discriminant(&single);
        assert_eq!(kind, std::mem::discriminant(&multi), "{single}; {multi}");
        for error in [single, multi] {
            assert!(error.to_string().contains(what), "{error}");
        }
    };
    set("min-replicas-to-write", "1");
    same("NOREPLICAS", errors_of_both(&client).await, true);
    set("min-replicas-to-write", "0");
    set("maxmemory", "1");
    same("OOM", errors_of_both(&client).await, false);
    set("maxmemory", "0");
    let _: String = server.command(&["REPLICAOF", "127.0.0.1", "1"]);
    same("READONLY", errors_of_both(&client).await, true);
    let _: String = server.command(&["REPLICAOF", "NO", "ONE"]);
    let (a, b) = (client.lock("a"), client.lock("b"));
    let both = MultiLock::new([&a, &b]);
    assert!(retry_transient(|| both.try_lock()).await.is_some());
}

/// It retries until the server accepts writes again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn multi_lock_retries_what_a_single_lock_retries() {
    let server = Server::start();
    let client = connect(long_timeout(), &server.url()).await;
    let _: String = server.command(&["CONFIG", "SET", "min-replicas-to-write", "1"]);
    let (a, b, c) = (client.lock("a"), client.lock("b"), client.lock("c"));
    let both = MultiLock::new([&a, &b]);
    let multi = tokio::spawn(both.try_lock().into_future());
    let single = tokio::spawn(c.try_lock().into_future());
    // Both of them more than once.
    until("refused", async || server.errors("NOREPLICAS") > 4).await;
    assert!(!multi.is_finished() && !single.is_finished());
    let _: String = server.command(&["CONFIG", "SET", "min-replicas-to-write", "0"]);
    drop(joined("retried", single).await.unwrap());
    drop(joined("retried", multi).await.unwrap());
}

/// Returns the clients that are waiting for replicas at this moment.
fn waiting_for_replicas(server: &Server) -> Vec<String> {
    let clients: String = server.command(&["CLIENT", "LIST"]);
    let waits = clients.lines().filter(|line| line.contains(" cmd=wait "));
    let blocked = waits.filter(|line| line.contains(" flags=b"));
    let id = |line: &str| Some(line.split(' ').next()?.strip_prefix("id=")?.to_owned());
    blocked.filter_map(id).collect()
}

/// A failover interrupts the WAIT of an acquisition with UNBLOCKED.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acquisition_whose_wait_is_interrupted_is_retried() {
    let server = Server::start();
    // To a server that does not know the script, the client would send two WAITs.
    let teacher = Client::builder().replica_sync(ReplicaSync::Off);
    let teacher = teacher.connect(&server.url()).await.unwrap();
    drop(held(&teacher.lock("first")).await);
    let settings = long_timeout().replica_sync(ReplicaSync::AtLeast(1));
    let client = connect(settings.replica_timeout(LONG), &server.url()).await;
    let interrupt = || async {
        let waits = async || !waiting_for_replicas(&server).is_empty();
        until("it waits for replicas", waits).await;
        for id in waiting_for_replicas(&server) {
            let _: i64 = server.command(&["CLIENT", "UNBLOCK", &id, "ERROR"]);
        }
    };
    let once = tokio::spawn(client.lock("a").try_lock().into_future());
    interrupt().await;
    assert_matches!(done("answered", once).await, Err(Error::Unavailable { .. }));
    let waiter = tokio::spawn(client.lock("b").lock().into_future());
    interrupt().await;
    // It retries.
    interrupt().await;
    assert!(!waiter.is_finished());
    waiter.abort();
}
