//! The failure catalogue on real servers: what must not happen when servers and connections fail.

use crate::common::prelude::*;

/// Waits until the key's time to live is seen to rise.
async fn until_renewed(server: &Server, key: &str) {
    until_rises(key, || async {
        let left = pttl(server, key);
        assert!(left > -2, "{key} is gone");
        left
    })
    .await;
}

fn with_watchdog(watchdog: Duration) -> redlatch::ClientBuilder {
    Client::builder()
        .watchdog_lease(watchdog)
        .response_timeout(SHORT)
}

/// For requests that are not answered. With this timeout, a paused process may miss answers, too.
fn short_timeout() -> redlatch::ClientBuilder {
    Client::builder().response_timeout(Duration::from_millis(300))
}

/// F1: after a release, drop or cancellation no renewal is sent. A key with the same name and owner
/// keeps the expiry that another client set, while other locks of the client are renewed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn released_lock_is_not_renewed() {
    let server = Server::start();
    let client = connect(with_watchdog(WATCHDOG), &server.url()).await;
    let sentinel = held(&client.lock("sentinel")).await;
    let me = Owner::new();
    let owner = String::from(client.owner_id(me));
    let names = ["unlocked", "dropped", "cancelled"];
    free(client.lock(names[0]).lock().owner(me).await.unwrap()).await;
    drop(client.lock(names[1]).lock().owner(me).await.unwrap());
    let cancelled = client.lock(names[2]).lock().owner(me).into_future();
    drop(tokio::time::timeout(Duration::ZERO, cancelled).await);
    client.flush().await;
    assert_eq!(client.status().holds, 1);
    for name in names {
        assert_eq!(pttl(&server, name), -2, "{name}");
        let _: i64 = server.command(&["HSET", name, &owner, "1"]);
        let _: i64 = server.command(&["PEXPIRE", name, "600000"]);
    }
    let mut low = [600_000; 3];
    for _ in 0..3 {
        until_renewed(&server, "sentinel").await;
        for (name, low) in names.iter().zip(&mut low) {
            let left = pttl(&server, name);
            assert!(left > 500_000 && left <= *low, "{name}: renewed to {left}");
            *low = left;
        }
    }
    assert!(sentinel.is_valid());
    free(sentinel).await;
}

/// F2: when renewal fails, the holder knows before the server expires the lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holder_learns_of_loss_before_lease_ends() {
    let (server, proxy) = proxied_server();
    let watchdog = Duration::from_secs(2);
    let client = connect(with_watchdog(watchdog), &proxy.url()).await;
    let lock = client.lock("a");
    for hard in [false, true] {
        let guard = retry_if_late(|| lock.lock()).await;
        if hard {
            cut_off(&proxy);
        } else {
            proxy.stall(true);
        }
        // Whenever the server reports that the key is gone, the guard must already have known.
        let mut connection = server.connection();
        let mut exists = redis::cmd("EXISTS");
        exists.arg("a");
        while exists.query::<bool>(&mut connection).unwrap() {
            tokio::task::yield_now().await;
        }
        assert!(!guard.is_valid(), "still valid after its lease had ended");
        within_limit("the loss is reported", guard.lost()).await;
        assert_lost(guard.unlock().await, Loss::LeaseEnded);
        proxy.stall(false);
        proxy.refuse(false);
        until("nothing is left", async || client.status().holds == 0).await;
    }
}

/// F3: failed renewals are retried; after the connection is restored, the lock stays held.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn renewal_survives_a_broken_connection() {
    let (server, proxy) = proxied_server();
    let client = connect(with_watchdog(WATCHDOG), &proxy.url()).await;
    let guard = held(&client.lock("a")).await;
    for way in ["refused", "cut", "stalled"] {
        match way {
            "refused" => {
                cut_off(&proxy);
            }
            "cut" => proxy.cut(),
            _ => proxy.stall(true),
        }
        if way != "cut" {
            // Past the time of the next renewal.
            until("a renewal was missed", async || pttl(&server, "a") < 3700).await;
        }
        proxy.stall(false);
        proxy.refuse(false);
        until("renewed again", async || pttl(&server, "a") > 5500).await;
        assert!(guard.is_valid(), "{way}");
    }
    free(guard).await;
}

/// F3: a server that restarts without its data has lost the lock, and the holder learns it. The
/// client of a killed server recovers by itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_reconnects_to_restarted_server_and_reports_lost_lock() {
    let mut server = Server::start();
    let client = connect(renewing(), &server.url()).await;
    let guard = held(&client.lock("a")).await;
    server.restart();
    within_limit("the loss is reported", guard.lost()).await;
    assert!(guard.unlock().await.is_err());
    free(held(&client.lock("a")).await).await;
}

/// A server that does not answer causes a response timeout; one to which no connection can be
/// set up causes a connection error.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connection_failure_differs_from_response_timeout() {
    let proxy = Proxy::to(shared().port());
    let client = connect(short_timeout(), &proxy.url()).await;
    let name = unique("unreachable");
    let lock = client.lock(&name);
    proxy.stall(true);
    assert_matches!(lock.try_lock().await, Err(Error::ResponseTimeout { .. }));
    // From now on connections are accepted, but no data is sent on them.
    proxy.cut();
    let said = "no connection within";
    until("that is what it is", async || {
        let error = lock.try_lock().await.unwrap_err();
        matches!(&error, Error::Unavailable { reason, .. } if reason.starts_with(said))
    })
    .await;
    proxy.stall(false);
    within_limit("settled", client.flush()).await;
    retry_if_late(|| lock.run(async {})).await;
}

/// F4: an acquisition that timed out (CLIENT PAUSE, or a stopped server) is undone, and never
/// renewed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acquisition_without_answer_is_undone() {
    let server = Server::start();
    let client = connect(short_timeout(), &server.url()).await;
    let lock = client.lock("a");
    retry_if_late(|| lock.run(async {})).await;
    for paused in [false, true] {
        if paused {
            let _: () = server.command(&["CLIENT", "PAUSE", "4000", "ALL"]);
        } else {
            server.freeze();
        }
        let error = lock.lock().await.unwrap_err();
        assert_matches!(error, Error::ResponseTimeout { .. });
        assert!(error.is_transient());
        server.thaw();
        within_limit("undone", client.flush()).await;
        assert_eq!(pttl(&server, "a"), -2);
        assert_eq!(client.status().holds, 0);
    }
    retry_if_late(|| lock.run(async {})).await;
}

/// F6/F25: the acquisition's answer is lost with the connection; the repeated request returns the
/// same acquisition.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acquisition_with_lost_answer_is_acquired_once() {
    let (server, proxy, client) = proxied_client().await;
    let lock = client.lock("a");
    lock.run(async {}).await.unwrap();
    for _ in 0..10 {
        let guard = with_lost_answer(&proxy, lock.lock().into_future()).await;
        let guard = guard.unwrap();
        let holds = || server.command::<u32>(&["HGET", "a", guard.owner_id().as_str()]);
        assert_eq!(holds(), 1);
        let inner = with_lost_answer(&proxy, guard.reenter().into_future()).await;
        assert_eq!(holds(), 2);
        free(inner.unwrap()).await;
        free(guard).await;
        assert_eq!(pttl(&server, "a"), -2);
    }
}

/// F25: a release whose answer is lost is repeated and succeeds exactly once: it does not release a
/// hold that another owner acquired in between.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn release_with_lost_answer_succeeds_once() {
    let (server, proxy, client) = proxied_client().await;
    let other = Client::connect(&server.url()).await.unwrap();
    for _ in 0..10 {
        let guard = held(&client.lock("a")).await;
        let next = tokio::spawn(other.lock("a").lock().into_future());
        with_lost_answer(&proxy, guard.unlock()).await.unwrap();
        let next = joined("released", next).await;
        assert!(other.lock("a").is_held_by(next.owner()).await.unwrap());
        free(next).await;
    }
}

/// Scripts may be flushed at any time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flushed_scripts_are_loaded_again() {
    let server = Server::start();
    let client = connect(with_watchdog(WATCHDOG), &server.url()).await;
    let kept = held(&client.lock("kept")).await;
    for n in 0..20 {
        let lock = client.lock(&format!("flushed-{n}"));
        let _: () = server.command(&["SCRIPT", "FLUSH"]);
        let guard = held(&lock).await;
        let _: () = server.command(&["SCRIPT", "FLUSH"]);
        assert!(lock.try_lock().await.unwrap().is_none());
        let _: () = server.command(&["SCRIPT", "FLUSH"]);
        free(guard).await;
    }
    let _: () = server.command(&["SCRIPT", "FLUSH"]);
    until_renewed(&server, "kept").await;
    free(kept).await;
}

/// The same for objects with scripts of their own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flushed_scripts_of_other_objects_are_loaded_again() {
    let (server, client) = server_and_client().await;
    let semaphore = client.semaphore("semaphore");
    let expirable = client.expirable_semaphore("expirable");
    let latch = client.count_down_latch("latch");
    let multi = MultiLock::new([client.lock("a"), client.lock("b")]);
    assert!(semaphore.try_set_permits(3).await.unwrap());
    assert!(expirable.try_set_permits(1).await.unwrap());
    let flush = || server.command::<()>(&["SCRIPT", "FLUSH"]);
    for _ in 0..10 {
        flush();
        let permits = semaphore.acquire_many(3).await.unwrap();
        flush();
        assert!(semaphore.try_acquire().await.unwrap().is_none());
        flush();
        permits.release().await.unwrap();
        assert_eq!(semaphore.available().await.unwrap(), 3);

        flush();
        let permit = expirable.acquire().await.unwrap();
        flush();
        permit.release().await.unwrap();
        assert_eq!(expirable.available().await.unwrap(), 1);
        assert_eq!(expirable.acquired().await.unwrap(), 0);
        assert_eq!(expirable.total().await.unwrap(), 1);

        flush();
        assert!(latch.try_set_count(2).await.unwrap());
        flush();
        assert_eq!(latch.count_down().await.unwrap(), 1);
        flush();
        let wait = Duration::from_millis(5);
        assert!(!retry_if_late(|| latch.try_wait().wait(wait).into_future()).await);
        flush();
        assert!(latch.delete().await.unwrap());

        flush();
        let guard = held(&multi).await;
        flush();
        free(guard).await;
    }
    within_limit("settled", client.flush()).await;
    assert_idle(&client);
    assert!(!client.lock("a").is_locked().await.unwrap());
    assert!(!client.lock("b").is_locked().await.unwrap());
}

/// Flushed data is reported as a loss, and another owner can acquire the lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flushed_data_is_reported_as_loss() {
    let server = Server::start();
    let client = connect(with_watchdog(WATCHDOG), &server.url()).await;
    let guard = held(&client.lock("a")).await;
    let _: () = server.command(&["FLUSHALL"]);
    let other = held(&client.lock("a")).await;
    within_limit("the loss is reported", guard.lost()).await;
    assert_lost(guard.unlock().await, Loss::NotHeld);
    assert!(other.is_valid());
    free(other).await;
}

/// A key of another type in a batch of renewals fails only its own lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_bad_key_does_not_fail_the_renewal_batch() {
    let server = Server::start();
    let client = connect(with_watchdog(WATCHDOG), &server.url()).await;
    let mut guards = held_all((0..150).map(|n| client.lock(&format!("batch-{n}")))).await;
    let _: () = server.command(&["SET", "batch-70", "precious"]);
    within_limit("the loss is reported", guards[70].lost()).await;
    let bad = guards.remove(70);
    assert!(bad.unlock().await.is_err());
    until_renewed(&server, "batch-149").await;
    assert!(guards.iter().all(redlatch::Guard::is_valid));
    assert_eq!(server.command::<String>(&["GET", "batch-70"]), "precious");
}

/// F27: contention alone loses no lease. Holders keep their locks while thousands of attempts per
/// second go through the same client.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contention_loses_no_lease() {
    // A separate server: other tests would wait behind the crowd.
    let server = Server::start();
    let client = connect(renewing(), &server.url()).await;
    let family = unique("crowded");
    let locks = (0..50).map(|n| client.lock(&format!("{family}:{n}")));
    let held = held_all(locks).await;
    let over = Arc::new(AtomicBool::new(false));
    let attempts = Arc::new(AtomicU64::new(0));
    let crowd = spawn_each(0..1000, |n| {
        let lock = client.lock(&format!("{family}:{}", n % 50));
        let (over, attempts) = (over.clone(), attempts.clone());
        async move {
            while !over.load(Ordering::Relaxed) {
                assert!(lock.try_lock().await.unwrap().is_none());
                attempts.fetch_add(1, Ordering::Relaxed);
            }
        }
    });
    let mut seen: Vec<_> = held.iter().map(|guard| (guard.valid_for(), 0)).collect();
    until("each is renewed twice", || {
        for (guard, (before, renewals)) in held.iter().zip(&mut seen) {
            let left = guard.valid_for();
            assert!(!left.is_zero(), "a lease was lost");
            *renewals += u32::from(left > std::mem::replace(before, left));
        }
        let done = seen.iter().all(|&(_, renewals)| renewals >= 2);
        async move { done }
    })
    .await;
    over.store(true, Ordering::Relaxed);
    done_all("over", crowd).await;
    assert!(attempts.load(Ordering::Relaxed) > 1000);
    free_all(held).await;
}

/// A client whose reconnection is refused for a while (too many clients) works again afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_recovers_from_refused_reconnection() {
    let server = Server::start();
    let client = connect(short_timeout(), &server.url()).await;
    let lock = client.lock("a");
    retry_if_late(|| lock.run(async {})).await;
    let mut admin = server.connection();
    let mut admin = |command: &str, arguments: &[&str]| {
        let mut command = redis::cmd(command);
        command.arg(arguments).exec(&mut admin).unwrap();
    };
    admin("CONFIG", &["SET", "maxclients", "1"]);
    admin("CLIENT", &["KILL", "TYPE", "normal", "SKIPME", "yes"]);
    assert_matches!(lock.lock().await, Err(Error::Unavailable { .. }));
    admin("CONFIG", &["SET", "maxclients", "1000"]);
    retry_if_late(|| lock.run(async {})).await;
}

/// Dropped clients leave no connection open.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_client_closes_its_connection() {
    let server = Server::start();
    let before = server.clients();
    let client = Client::connect(&server.url()).await.unwrap();
    let guard = held(&client.lock("a")).await;
    let lock = client.lock("a");
    let waiting = retry_if_late(|| lock.try_lock().wait(Duration::from_millis(5))).await;
    assert!(waiting.is_none());
    drop(lock);
    drop(client);
    // The guard keeps the connection that it needs.
    assert!(guard.is_valid());
    free(guard).await;
    until("closed", async || server.clients() == before).await;
}

/// The result of the work is not discarded because the release was not answered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_returns_the_result_if_the_release_is_not_answered() {
    let (_server, proxy) = proxied_server();
    let client = connect(response_timeout(Duration::from_millis(300)), &proxy.url()).await;
    let lock = client.lock("a");
    let work = || async {
        proxy.stall(true);
        42
    };
    assert_eq!(retry_if_late(|| lock.run(work())).await, 42);
    proxy.stall(false);
    within_limit("released in the background", client.flush()).await;
    assert!(!retry_if_late(|| lock.is_locked()).await);
}

/// Creates a client that logs in as the user `app`, who may do everything.
async fn client_of_user(server: &Server) -> Client {
    let () = server.command(&["ACL", "SETUSER", "app", "on", ">pw", "~*", "&*", "+@all"]);
    let url = format!("redis://app:pw@127.0.0.1:{}", server.port());
    Client::connect(&url).await.unwrap()
}

/// A release is retried even if the server refuses the client for a while.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn release_is_retried_after_refusal() {
    let server = Server::start();
    let client = client_of_user(&server).await;
    let guard = client.lock("a").lock().lease(10 * LONG).await.unwrap();
    let _: () = server.command(&["ACL", "SETUSER", "app", "off"]);
    server.cut_all();
    let refused = guard.unlock().await.unwrap_err();
    assert_matches!(refused, Error::AuthenticationFailed { .. });
    assert_eq!(client.status().background, 1);
    let _: () = server.command(&["ACL", "SETUSER", "app", "on"]);
    within_limit("released", client.flush()).await;
    assert!(!client.lock("a").is_locked().await.unwrap());
}

/// The server refuses the release for much longer than a flush waits, although the lease is long.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flush_ends_after_a_few_refusals() {
    let server = Server::start();
    let client = client_of_user(&server).await;
    let lock = client.lock("a");
    let guard = lock.lock().lease(10 * LONG).await.unwrap();
    let _: () = server.command(&["ACL", "SETUSER", "app", "resetkeys"]);
    drop(guard);
    within_limit("not awaited any more", client.flush()).await;
    let unsettled = client.flush_within(Duration::ZERO).await;
    assert_eq!(Vec::from_iter(unsettled.names()), ["a"]);
    let _: () = server.command(&["ACL", "SETUSER", "app", "~*"]);
    let settled = async || client.flush_within(Duration::ZERO).await.is_empty();
    until("tried again", settled).await;
    assert!(!lock.is_locked().await.unwrap());
}

/// A service that is asked to end while the store is down needs no more than the rest of the lease, and as little as it wants.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flush_in_outage_ends_with_lease() {
    let mut server = Server::start();
    let client = Client::connect(&server.url()).await.unwrap();
    let guard = client.lock("a").lock().lease(SHORT).await.unwrap();
    server.kill();
    drop(guard);
    let unsettled = client.flush_within(Duration::from_millis(10)).await;
    assert_eq!(Vec::from_iter(unsettled.names()), ["a"]);
    within_limit("the lease has ended", client.flush()).await;
    assert!(client.flush_within(Duration::ZERO).await.is_empty());
}

/// Attempts that were never sent leave nothing to settle.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unsent_attempts_need_no_settling() {
    let mut server = Server::start();
    // Long enough for each request to get the reason for the failed connection, which is not
    // retried all the time.
    let client = connect(response_timeout(Duration::from_secs(1)), &server.url()).await;
    server.kill();
    // It may be sent before the client finds the connection broken. Then its release is tried until
    // some seconds after the end of its lease.
    assert_transient(client.lock("a").try_lock().lease(SHORT).await);
    let given_up = async || client.status().background == 0;
    until("the first is given up", given_up).await;
    let tries = spawn_each(0..500, |n| {
        client.lock(&format!("n-{n}")).try_lock().into_future()
    });
    for one in tries {
        assert_matches!(done("refused", one).await, Err(Error::Unavailable { .. }));
    }
    assert_eq!(client.status().background, 0);
}
