//! What must not happen although things break: the failure catalogue, on real servers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use redlatch::{Client, Error, Loss, Owner};
use redlatch_testkit::{Proxy, Server, shared, unique};

use crate::common::{
    SHORT, WATCHDOG, assert_lost, in_time, risen, soon, until, without_the_answer,
};

async fn pttl(server: &Server, key: &str) -> i64 {
    server.ask(&["PTTL", key])
}

/// Waits until the key's lease is seen to rise.
async fn renewal(server: &Server, key: &str) {
    risen(key, || async {
        let left = pttl(server, key).await;
        assert!(left > -2, "{key} is gone");
        left
    })
    .await;
}

fn quick(watchdog: Duration) -> redlatch::ClientBuilder {
    Client::builder().watchdog(watchdog).response_timeout(SHORT)
}

/// For what is not answered. What is answered it may miss, if it has to stand still.
fn hasty() -> redlatch::ClientBuilder {
    Client::builder().response_timeout(Duration::from_millis(300))
}

/// F1: after release, drop or cancellation no renewal is sent: a key under the same name and owner
/// keeps the expiry that somebody else gave it, while other locks of the client are renewed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_renewed_after_it_was_given_back() {
    let server = Server::start();
    let client = quick(WATCHDOG).connect(&server.url()).await.unwrap();
    let sentinel = client.lock("sentinel").lock().await.unwrap();
    let me = Owner::new();
    let owner = client.owner_id(me);
    let names = ["unlocked", "dropped", "cancelled"];
    client
        .lock(names[0])
        .lock()
        .owner(me)
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
    drop(client.lock(names[1]).lock().owner(me).await.unwrap());
    let cancelled = client.lock(names[2]).lock().owner(me).into_future();
    drop(tokio::time::timeout(Duration::ZERO, cancelled).await);
    client.settled().await;
    assert_eq!(client.status().holds, 1);
    for name in names {
        assert_eq!(pttl(&server, name).await, -2, "{name}");
        let _: i64 = server.ask(&["HSET", name, &owner, "1"]);
        let _: i64 = server.ask(&["PEXPIRE", name, "600000"]);
    }
    let mut low = [600_000; 3];
    for _ in 0..3 {
        renewal(&server, "sentinel").await;
        for (name, low) in names.iter().zip(&mut low) {
            let left = pttl(&server, name).await;
            assert!(left > 500_000 && left <= *low, "{name}: renewed to {left}");
            *low = left;
        }
    }
    assert!(sentinel.is_valid());
    sentinel.unlock().await.unwrap();
}

/// F2: when renewal fails, the holder knows before the server has given the lock away.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_holder_is_told_before_its_lease_has_ended() {
    let server = Server::start();
    let proxy = Proxy::to(server.port());
    let watchdog = Duration::from_secs(2);
    let client = quick(watchdog).connect(&proxy.url()).await.unwrap();
    let lock = client.lock("a");
    for hard in [false, true] {
        let guard = in_time(|| lock.lock()).await;
        if hard {
            proxy.refuse(true);
            proxy.cut();
        } else {
            proxy.stall(true);
        }
        // Whenever the server says that it is gone, the guard must have known.
        let mut connection = server.connection();
        loop {
            let there: bool = redis::cmd("EXISTS")
                .arg("a")
                .query(&mut connection)
                .unwrap();
            let valid = guard.is_valid();
            if !there {
                assert!(!valid, "believed in a lease that had ended");
                break;
            }
            tokio::task::yield_now().await;
        }
        soon("told", guard.lost()).await;
        let lost = guard.unlock().await.unwrap_err();
        assert_lost(&lost, Loss::LeaseEnded);
        proxy.stall(false);
        proxy.refuse(false);
        until("nothing is left", || async { client.status().holds == 0 }).await;
    }
}

/// F3: renewals that fail are tried again; after the connection is back the lock lives on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn renewal_survives_a_broken_connection() {
    let server = Server::start();
    let proxy = Proxy::to(server.port());
    let client = quick(WATCHDOG).connect(&proxy.url()).await.unwrap();
    let guard = client.lock("a").lock().await.unwrap();
    for way in ["refused", "cut", "stalled"] {
        match way {
            "refused" => {
                proxy.refuse(true);
                proxy.cut();
            }
            "cut" => proxy.cut(),
            _ => proxy.stall(true),
        }
        if way != "cut" {
            // Past the time at which it would have been renewed.
            until("a renewal was missed", || async {
                pttl(&server, "a").await < 3700
            })
            .await;
        }
        proxy.stall(false);
        proxy.refuse(false);
        until("renewed again", || async {
            pttl(&server, "a").await > 5500
        })
        .await;
        assert!(guard.is_valid(), "{way}");
    }
    guard.unlock().await.unwrap();
}

/// F3: a server that comes back with its data gone has lost the lock, and the holder learns it; a
/// killed server's client works on by itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_server_is_found_and_a_forgotten_lock_is_told() {
    let mut server = Server::start();
    let settings = Client::builder().watchdog(WATCHDOG);
    let client = settings.connect(&server.url()).await.unwrap();
    let guard = client.lock("a").lock().await.unwrap();
    server.restart();
    soon("told", guard.lost()).await;
    assert!(guard.unlock().await.is_err());
    let guard = client.lock("a").lock().await.unwrap();
    guard.unlock().await.unwrap();
}

/// A server that says nothing is too slow; one that there is not even a connection to cannot be reached.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_connection_is_told_from_no_answer() {
    let proxy = Proxy::to(shared().port());
    let client = hasty().connect(&proxy.url()).await.unwrap();
    let name = unique("unreachable");
    let lock = client.lock(&name);
    proxy.stall(true);
    let error = lock.try_lock().await.unwrap_err();
    assert!(matches!(error, Error::ResponseTimeout { .. }), "{error}");
    // From now on connections are made and nothing is ever said on them.
    proxy.cut();
    let said = "no connection within";
    until("that is what it is", || async {
        let error = lock.try_lock().await.unwrap_err();
        matches!(&error, Error::Unavailable { reason, .. } if reason.starts_with(said))
    })
    .await;
    proxy.stall(false);
    soon("settled", client.settled()).await;
    in_time(|| lock.run(async {})).await;
}

/// F4: an acquisition that timed out (CLIENT PAUSE, or a server that was stopped) is undone, and
/// never renewed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_acquisition_without_an_answer_is_undone() {
    let server = Server::start();
    let client = hasty().connect(&server.url()).await.unwrap();
    let lock = client.lock("a");
    in_time(|| lock.run(async {})).await;
    for paused in [false, true] {
        if paused {
            let _: () = server.ask(&["CLIENT", "PAUSE", "4000", "ALL"]);
        } else {
            server.freeze();
        }
        let error = lock.lock().await.unwrap_err();
        assert!(matches!(error, Error::ResponseTimeout { .. }), "{error}");
        assert!(error.is_transient());
        server.thaw();
        soon("undone", client.settled()).await;
        assert_eq!(pttl(&server, "a").await, -2);
        assert_eq!(client.status().holds, 0);
    }
    in_time(|| lock.run(async {})).await;
}

/// F6/F25: the acquisition's answer is lost with the connection; sent again, it is the same one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_acquisition_whose_answer_is_lost_is_acquired_once() {
    let server = Server::start();
    let proxy = Arc::new(Proxy::to(server.port()));
    let client = Client::connect(&proxy.url()).await.unwrap();
    let lock = client.lock("a");
    lock.run(async {}).await.unwrap();
    for _ in 0..10 {
        let guard = without_the_answer(&proxy, lock.lock().into_future())
            .await
            .unwrap();
        assert_eq!(server.ask::<String>(&["HGET", "a", guard.owner_id()]), "1");
        let inner = without_the_answer(&proxy, guard.reenter().into_future())
            .await
            .unwrap();
        assert_eq!(server.ask::<String>(&["HGET", "a", guard.owner_id()]), "2");
        inner.unlock().await.unwrap();
        guard.unlock().await.unwrap();
        assert_eq!(pttl(&server, "a").await, -2);
    }
}

/// F25: a release whose answer is lost is sent again and succeeds, once and only once: it takes
/// nothing from whoever got the lock in between.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_whose_answer_is_lost_succeeds_once() {
    let server = Server::start();
    let proxy = Arc::new(Proxy::to(server.port()));
    let client = Client::connect(&proxy.url()).await.unwrap();
    let other = Client::connect(&server.url()).await.unwrap();
    for _ in 0..10 {
        let guard = client.lock("a").lock().await.unwrap();
        let next = tokio::spawn(other.lock("a").lock().into_future());
        without_the_answer(&proxy, guard.unlock()).await.unwrap();
        let next = soon("released", next).await.unwrap().unwrap();
        assert!(other.lock("a").is_held_by(next.owner()).await.unwrap());
        next.unlock().await.unwrap();
    }
}

/// Scripts may be flushed at any time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flushed_scripts_are_taught_again() {
    let server = Server::start();
    let client = quick(WATCHDOG).connect(&server.url()).await.unwrap();
    let kept = client.lock("kept").lock().await.unwrap();
    for n in 0..20 {
        let lock = client.lock(&format!("flushed-{n}"));
        let _: () = server.ask(&["SCRIPT", "FLUSH"]);
        let guard = lock.lock().await.unwrap();
        let _: () = server.ask(&["SCRIPT", "FLUSH"]);
        assert!(lock.try_lock().await.unwrap().is_none());
        let _: () = server.ask(&["SCRIPT", "FLUSH"]);
        guard.unlock().await.unwrap();
    }
    let _: () = server.ask(&["SCRIPT", "FLUSH"]);
    renewal(&server, "kept").await;
    kept.unlock().await.unwrap();
}

/// Data that is flushed away is told as a loss, and another may have the lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flushed_data_is_told() {
    let server = Server::start();
    let client = quick(WATCHDOG).connect(&server.url()).await.unwrap();
    let guard = client.lock("a").lock().await.unwrap();
    let _: () = server.ask(&["FLUSHALL"]);
    let other = client.lock("a").lock().await.unwrap();
    soon("told", guard.lost()).await;
    let lost = guard.unlock().await.unwrap_err();
    assert_lost(&lost, Loss::NotHeld);
    assert!(other.is_valid());
    other.unlock().await.unwrap();
}

/// A key of another type among a batch of renewals costs its own lock and no other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_bad_key_does_not_keep_the_batch_from_being_renewed() {
    let server = Server::start();
    let client = quick(WATCHDOG).connect(&server.url()).await.unwrap();
    let mut guards = Vec::new();
    for n in 0..150 {
        guards.push(client.lock(&format!("batch-{n}")).lock().await.unwrap());
    }
    let _: () = server.ask(&["SET", "batch-70", "precious"]);
    soon("told", guards[70].lost()).await;
    let bad = guards.remove(70);
    assert!(bad.unlock().await.is_err());
    renewal(&server, "batch-149").await;
    assert!(guards.iter().all(redlatch::Guard::is_valid));
    assert_eq!(server.ask::<String>(&["GET", "batch-70"]), "precious");
}

/// F27: contention alone loses no lease. Holders keep their locks while thousands of attempts a
/// second go through the same client.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contention_loses_no_lease() {
    // Of its own: other tests would wait behind the crowd.
    let server = Server::start();
    let client = Client::builder()
        .watchdog(WATCHDOG)
        .connect(&server.url())
        .await
        .unwrap();
    let family = unique("crowded");
    let mut held = Vec::new();
    for n in 0..50 {
        held.push(client.lock(&format!("{family}:{n}")).lock().await.unwrap());
    }
    let over = Arc::new(AtomicBool::new(false));
    let attempts = Arc::new(AtomicU64::new(0));
    let crowd: Vec<_> = (0..1000)
        .map(|n| {
            let lock = client.lock(&format!("{family}:{}", n % 50));
            let (over, attempts) = (over.clone(), attempts.clone());
            tokio::spawn(async move {
                while !over.load(Ordering::Relaxed) {
                    assert!(lock.try_lock().await.unwrap().is_none());
                    attempts.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
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
    for one in crowd {
        soon("over", one).await.unwrap();
    }
    assert!(attempts.load(Ordering::Relaxed) > 1000);
    for guard in held {
        guard.unlock().await.unwrap();
    }
}

/// A client whose reconnection is refused for a while (too many clients) works again afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_reconnection_is_not_for_good() {
    let server = Server::start();
    let client = hasty().connect(&server.url()).await.unwrap();
    let lock = client.lock("a");
    in_time(|| lock.run(async {})).await;
    let mut admin = server.connection();
    let config = |value: &str, admin: &mut redis::Connection| {
        let set = redis::cmd("CONFIG")
            .arg(&["SET", "maxclients", value])
            .query::<()>(admin);
        set.unwrap();
    };
    config("1", &mut admin);
    let _: i64 = redis::cmd("CLIENT")
        .arg(&["KILL", "TYPE", "normal", "SKIPME", "yes"])
        .query(&mut admin)
        .unwrap();
    let error = lock.lock().await.unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error}");
    config("1000", &mut admin);
    in_time(|| lock.run(async {})).await;
}

/// Clients that are gone leave no connection behind.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_client_closes_its_connection() {
    let server = Server::start();
    let before = server.clients();
    let client = Client::connect(&server.url()).await.unwrap();
    let guard = client.lock("a").lock().await.unwrap();
    let lock = client.lock("a");
    let waiting = in_time(|| lock.try_lock().wait(Duration::from_millis(5))).await;
    assert!(waiting.is_none());
    drop(lock);
    drop(client);
    // The guard keeps what it needs.
    assert!(guard.is_valid());
    guard.unlock().await.unwrap();
    until("closed", || async { server.clients() == before }).await;
}
