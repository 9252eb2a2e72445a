//! Dead waiters of a fair lock delay live waiters by one grace period, not by one wait time each.

use tokio::time::Instant;

use super::{await_turn, spawn_waiter};
use crate::common::prelude::*;

/// Adds a client with `waiters` waiters to the queue behind `ahead` others, and kills it: its
/// runtime and its connections end, but its waiters stay in the queue.
fn kill_waiters(store: &Embedded, name: &str, ahead: usize, waiters: usize) {
    let (store, name) = (store.clone(), name.to_owned());
    let dying = std::thread::spawn(move || {
        runtime().block_on(async {
            let client = Client::builder().connect_embedded(&store).unwrap();
            let lock = client.fair_lock(&name);
            for n in 0..waiters {
                drop(spawn_waiter(&lock, ahead + n).await);
            }
        });
    });
    dying.join().unwrap();
}

/// The exact times: one grace period after the release, wherever the dead waiters stand in the
/// queue.
#[tokio::test(start_paused = true)]
async fn all_dead_waiters_together_cost_one_grace_period() {
    let store = Embedded::new();
    let client = || Client::builder().connect_embedded(&store).unwrap();
    let (one, two) = (client(), client());
    let (lock, other) = (one.fair_lock("a"), two.fair_lock("a"));
    let held = lock.lock().await.unwrap();
    kill_waiters(&store, "a", 0, 20);
    let first = spawn_waiter(&lock, 20).await;
    kill_waiters(&store, "a", 21, 20);
    let second = spawn_waiter(&other, 41).await;
    let third = spawn_waiter(&lock, 42).await;
    let released = Instant::now();
    free(held).await;
    let guard = await_turn(first).await;
    let took = released.elapsed();
    let grace = 5 * SECOND;
    assert!(took >= grace && took < grace + SECOND / 10, "{took:?}");
    assert!(!second.is_finished() && !third.is_finished());
    free(guard).await;
    let guard = await_turn(second).await;
    assert!(!third.is_finished(), "living waiters keep their order");
    free(guard).await;
    free(await_turn(third).await).await;
    let took = released.elapsed();
    assert!(took < grace + SECOND / 4, "{took:?} for all");
    assert!(lock.queue().await.unwrap().is_empty());
}

/// The holder died too: the grace period begins when its lease has ended, although no client
/// released.
#[tokio::test(start_paused = true)]
async fn dead_waiters_of_a_dead_holder_cost_one_grace_period() {
    let store = Embedded::new();
    let client = Client::builder().connect_embedded(&store).unwrap();
    let grace = 2 * SECOND;
    let lock = client.fair_lock("a").grace_period(grace);
    std::mem::forget(lock.lock().lease(20 * SECOND).await.unwrap());
    let begun = Instant::now();
    kill_waiters(&store, "a", 0, 30);
    let guard = await_turn(spawn_waiter(&lock, 30).await).await;
    let (took, due) = (begun.elapsed(), 20 * SECOND + grace);
    assert!(took + SECOND >= due && took < due + SECOND, "{took:?}");
    free(guard).await;
}

fn keys(name: &str) -> [String; 3] {
    [
        "redisson_lock_queue",
        "redisson_lock_timeout",
        "redlatch_lock_absent",
    ]
    .map(|prefix| format!("{prefix}:{{{name}}}"))
}

/// Adds an owner to the end of the queue with a timeout hours ahead.
fn enqueue_dead_waiter(server: &Server, name: &str, owner: &str) {
    let [queue, timeouts, _] = keys(name);
    let now: Vec<u64> = server.command(&["TIME"]);
    let behind: i64 = server.command(&["RPUSH", &queue, owner]);
    let until = (now[0] + 3600 * behind.unsigned_abs()) * 1000;
    let _: i64 = server.command(&["ZADD", &timeouts, &until.to_string(), owner]);
}

/// Adds 40 dead waiters with hours of wait time between live ones.
async fn dead_among_the_living(server: &Server, client: &Client, name: &str) {
    let grace = SECOND;
    let lock = client.fair_lock(name).grace_period(grace);
    let held = lock.lock().await.unwrap();
    let mut waiting = Vec::new();
    for n in 0..3 {
        for m in 0..20 {
            enqueue_dead_waiter(server, name, &format!("dead:{n}{m}"));
        }
        waiting.push(spawn_waiter(&lock, n * 21 + 20).await);
    }
    let released = std::time::Instant::now();
    free(held).await;
    let mut first = true;
    let mut waiting = waiting.into_iter();
    while let Some(next) = waiting.next() {
        let guard = await_turn(next).await;
        assert!(!std::mem::take(&mut first) || released.elapsed() >= grace);
        assert!(waiting.as_slice().iter().all(|one| !one.is_finished()));
        free(guard).await;
    }
    let took = released.elapsed();
    assert!(took < LONG / 2, "{took:?}");
    until("nothing is left", async || {
        let [queue, timeouts, absent] = keys(name);
        server.command::<i64>(&["EXISTS", name, &queue, &timeouts, &absent]) == 0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_waiters_on_a_server_cost_one_grace_period() {
    let (server, client) = server_and_client().await;
    dead_among_the_living(&server, &client, "a").await;
}

/// In a cluster the subscribers of sharded channels count.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_waiters_in_a_cluster_cost_one_grace_period() {
    let cluster = shared_cluster();
    let client = Client::connect(&cluster.url()).await.unwrap();
    let name = unique("dead");
    let home = &cluster.nodes()[cluster.master_of_key(&name)];
    dead_among_the_living(home, &client, &name).await;
}

/// A killed holder leaves a lease and dead waiters behind; no client notifies the live waiter.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_of_killed_clients_on_a_server_are_skipped() {
    let (server, client) = server_and_client().await;
    let lock = client.fair_lock("a").grace_period(SECOND);
    let _: i64 = server.command(&["HSET", "a", "dead:1", "1"]);
    let _: i64 = server.command(&["PEXPIRE", "a", "1000"]);
    for n in 0..50 {
        enqueue_dead_waiter(&server, "a", &format!("dead:{n}"));
    }
    let begun = std::time::Instant::now();
    let guard = done("the dead are passed over", lock.lock()).await;
    let took = begun.elapsed();
    assert!(took < LONG / 2, "{took:?}");
    free(guard).await;
    // A plain `try_lock` removes dead waiters as well, though it does not wait.
    enqueue_dead_waiter(&server, "a", "dead:51");
    let passed_over = async || lock.try_lock().await.unwrap().is_some();
    until("it is passed over", passed_over).await;
}

/// A waiter that is cut off when its turn comes, and reconnects within the grace period, is served first.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_that_reconnects_within_the_grace_period_keeps_its_place() {
    let (server, proxy) = proxied_server();
    let near = Client::connect(&server.url()).await.unwrap();
    let settings = Client::builder().response_timeout(2 * LONG);
    let far = connect(settings.connect_timeout(2 * LONG), &proxy.url()).await;
    // So long that the test fails if it has to wait for the end of the grace period.
    let lock = near.fair_lock("a").grace_period(LONG / 2);
    let held = lock.lock().await.unwrap();
    let cut_off = spawn_waiter(&far.fair_lock("a"), 0).await;
    let behind = spawn_waiter(&lock, 1).await;
    let owner = lock.queue().await.unwrap()[0].owner.to_string();
    let channel = format!("redisson_lock__channel:{{a}}:{owner}");
    until("it is subscribed", async || {
        subscribers(&server, &channel) == 1
    })
    .await;
    proxy.stall(true);
    proxy.cut();
    until("it is not subscribed", async || {
        subscribers(&server, &channel) == 0
    })
    .await;
    free(held).await;
    let [_, _, absent] = keys("a");
    let noted: Vec<String> = server.command(&["ZRANGE", &absent, "0", "-1"]);
    assert_eq!(noted, [owner]);
    assert!(!behind.is_finished());
    proxy.stall(false);
    let guard = await_turn(cut_off).await;
    assert!(!behind.is_finished());
    free(guard).await;
    free(await_turn(behind).await).await;
}

/// A waiter in Java subscribes and does not poll. It was absent when the grace period began, and keeps
/// its position and its timeout because it is subscribed when its turn comes; it is notified again then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_in_java_that_listens_again_keeps_its_place() {
    let server = Server::start();
    let client = Client::connect(&server.url()).await.unwrap();
    let lock = client.fair_lock("a").grace_period(SECOND);
    let guard = held(&lock).await;
    enqueue_dead_waiter(&server, "a", "dead:1");
    enqueue_dead_waiter(&server, "a", "java:7");
    let waiting = spawn_waiter(&lock, 2).await;
    let [queue, timeouts, absent] = keys("a");
    let timeout = || server.command::<Option<f64>>(&["ZSCORE", &timeouts, "java:7"]);
    free(guard).await;
    let noted: Option<f64> = server.command(&["ZSCORE", &absent, "java:7"]);
    assert!(noted.is_some() && timeout().is_some());
    let messages = messages(&server, "redisson_lock__channel:{a}:java:7");
    let first = || server.command::<Vec<String>>(&["LRANGE", &queue, "0", "0"]);
    until("the dead one is dropped", async || first() == ["java:7"]).await;
    assert_eq!(messages.recv_timeout(LONG).unwrap(), "0");
    // Notified again, in case it missed that: its process may have been reconnecting.
    assert_eq!(messages.recv_timeout(LONG).unwrap(), "0");
    assert!(!waiting.is_finished() && timeout().is_some());
    // It takes its turn as Redisson's script does, and releases.
    let _: String = server.command(&["LPOP", &queue]);
    let _: i64 = server.command(&["ZREM", &timeouts, "java:7"]);
    free(await_turn(waiting).await).await;
}

/// A waiter that hangs, but stays connected, delays the others until its wait time has passed, unless it accepts
/// grants.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_that_hangs_costs_its_wait_time() {
    let (server, proxy) = proxied_server();
    let near = Client::connect(&server.url()).await.unwrap();
    let far = Client::builder().fair_grants(false);
    let far = far.connect(&proxy.url()).await.unwrap();
    let lock = near.fair_lock("a").grace_period(Duration::from_millis(1));
    let begun = std::time::Instant::now();
    let lease = 2 * SHORT;
    let held = lock.lock().lease(lease).await.unwrap();
    let hangs = spawn_waiter(&far.fair_lock("a").wait_time(SHORT), 0).await;
    until_subscribed(&far, 1).await;
    let waiting = spawn_waiter(&lock, 1).await;
    proxy.stall(true);
    free(held).await;
    let guard = await_turn(waiting).await;
    // Its wait time counts from the end of the lease. Waiters check earlier than that.
    let took = begun.elapsed();
    assert!(
        took >= lease + SHORT - SECOND,
        "{took:?}: kept its position"
    );
    free(guard).await;
    hangs.abort();
}
