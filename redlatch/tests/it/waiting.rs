//! Waiting on a real server: its cost, and that no wake-up is missed.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use redlatch::Client;
use redlatch_testkit::{Proxy, Server, unique};

use crate::common::{LONG, client, until, within_limit};

fn channels(server: &Server) -> usize {
    server.info("pubsub_channels").parse().unwrap()
}

/// Only the first waiter in the queue sends requests; a turn costs one release and one acquisition.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_waiter_per_name_asks_the_server() {
    const WAITERS: usize = 200;
    let server = Server::start();
    let (holder, crowd) = (client(&server).await, client(&server).await);
    let held = holder.lock("a").lock().await.unwrap();
    let before = server.calls("eval");
    let begun = Arc::new(AtomicUsize::new(0));
    let waiters: Vec<_> = (0..WAITERS)
        .map(|_| {
            let (lock, begun) = (crowd.lock("a"), begun.clone());
            tokio::spawn(async move {
                begun.fetch_add(1, Ordering::SeqCst);
                lock.lock().await.unwrap().unlock().await.unwrap();
            })
        })
        .collect();
    until("all have begun", || async {
        begun.load(Ordering::SeqCst) == WAITERS && channels(&server) == 1
    })
    .await;
    let asked = server.calls("eval") - before;
    // Each waiter that starts before the local queue exists sends one request; no waiter polls.
    assert!(asked <= WAITERS as u64 + 2, "{asked}");

    let before = server.calls("eval");
    held.unlock().await.unwrap();
    for waiter in waiters {
        within_limit("served", waiter).await.unwrap();
    }
    let per_turn = (server.calls("eval") - before) as f64 / WAITERS as f64;
    assert!(per_turn < 2.2, "{per_turn} scripts per turn");
    assert_eq!(channels(&server), 1, "one subscription for all");
}

/// F7: one client waits for ten thousand names at the same time with default settings. F8: the
/// subscriptions end with the waiting.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_waits_for_ten_thousand_names() {
    const NAMES: usize = 10_000;
    let server = Server::start();
    let (holder, waiter) = (client(&server).await, client(&server).await);
    let mut held = Vec::new();
    for n in 0..NAMES {
        let lock = holder.lock(&format!("name-{n}"));
        held.push(lock.lock().lease(10 * LONG).await.unwrap());
    }
    let waiting: Vec<_> = (0..NAMES)
        .map(|n| tokio::spawn(waiter.lock(&format!("name-{n}")).lock().into_future()))
        .collect();
    for some in (0..=NAMES).step_by(NAMES / 10) {
        until("more are subscribed", || async {
            channels(&server) >= some
        })
        .await;
    }
    assert_eq!(channels(&server), NAMES);
    until("one connection per client", || async {
        server.clients() == 2
    })
    .await;
    for guard in held {
        guard.unlock().await.unwrap();
    }
    for one in waiting {
        let guard = within_limit("woken", one).await.unwrap().unwrap();
        guard.unlock().await.unwrap();
    }
    until("no channel is left", || async { channels(&server) == 0 }).await;
    until("no subscription is counted", || async {
        waiter.status().subscriptions == 0
    })
    .await;
}

/// F6: two processes pass one lock back and forth; a single missed wake-up would take ten minutes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_wake_up_is_missed_between_clients() {
    let server = Server::start();
    let name = unique("handover");
    let mut players = Vec::new();
    for _ in 0..3 {
        let settings = Client::builder()
            .watchdog_lease(10 * LONG)
            .subscription_linger(Duration::from_millis(1));
        let client = settings.connect(&server.url()).await.unwrap();
        let lock = client.lock(&name);
        players.push(tokio::spawn(async move {
            for n in 0..300 {
                let guard = lock.lock().await.unwrap();
                if n % 7 == 0 {
                    tokio::task::yield_now().await;
                }
                guard.unlock().await.unwrap();
                if n % 50 == 0 {
                    // Long enough for the local queue to close, so that closing and waiting
                    // overlap.
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
            }
        }));
    }
    for player in players {
        within_limit("no wake-up is missed", player).await.unwrap();
    }
}

/// F6, across a reconnection: a release while the waiter's connection is down is noticed after it
/// reconnects.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn release_during_disconnect_is_noticed_afterwards() {
    let server = Server::start();
    let proxy = Proxy::to(server.port());
    let holder = client(&server).await;
    let waiter = Client::connect(&proxy.url()).await.unwrap();
    for round in 0..10 {
        let held = holder.lock("a").lock().lease(10 * LONG).await.unwrap();
        let waiting = tokio::spawn(waiter.lock("a").lock().into_future());
        until("it waits", || async { channels(&server) == 1 }).await;
        if round % 2 == 0 {
            // No data gets through: neither the release's message nor the end of the connection.
            proxy.stall(true);
            held.unlock().await.unwrap();
            proxy.stall(false);
            proxy.cut();
        } else {
            proxy.refuse(true);
            proxy.cut();
            held.unlock().await.unwrap();
            proxy.refuse(false);
        }
        let guard = within_limit("seen", waiting).await.unwrap().unwrap();
        guard.unlock().await.unwrap();
    }
}

/// Subscriptions are restored with the connection, including those of names whose waiters did not
/// notice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn subscriptions_are_restored() {
    const NAMES: usize = 1500;
    let server = Server::start();
    let (holder, waiter) = (client(&server).await, client(&server).await);
    let mut held = Vec::new();
    let mut waiting = Vec::new();
    for n in 0..NAMES {
        let name = format!("name-{n}");
        held.push(holder.lock(&name).lock().lease(10 * LONG).await.unwrap());
        waiting.push(tokio::spawn(waiter.lock(&name).lock().into_future()));
    }
    until("all wait", || async { channels(&server) == NAMES }).await;
    for _ in 0..3 {
        server.cut_all();
        until("all wait again", || async { channels(&server) == NAMES }).await;
    }
    for guard in held {
        guard.unlock().await.unwrap();
    }
    let mut served = HashSet::new();
    for one in waiting {
        let guard = within_limit("woken", one).await.unwrap().unwrap();
        served.insert(guard.name().to_owned());
        guard.unlock().await.unwrap();
    }
    assert_eq!(served.len(), NAMES);
}

/// The holder's lease is the fallback for messages that never arrive.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silently_deleted_lock_is_acquired_after_its_lease() {
    let server = Server::start();
    let (holder, waiter) = (client(&server).await, client(&server).await);
    let lease = Duration::from_millis(700);
    std::mem::forget(holder.lock("a").lock().lease(lease).await.unwrap());
    let waiting = tokio::spawn(waiter.lock("a").lock().into_future());
    drop(
        within_limit("the lease ends", waiting)
            .await
            .unwrap()
            .unwrap(),
    );
}
