//! Grants: a release gives the lock to the next waiter, which learns it by the message.

use super::*;
use crate::common::prelude::*;

async fn client(url: &str) -> Client {
    connect(short_linger(), url).await
}

fn channel(owner: &OwnerId) -> String {
    format!("redisson_lock__channel:{{a}}:{owner}")
}

/// Waits until the waiter at this position is connected and its request has been answered. Returns its owner. `lock`: a
/// handle of the waiter's client, whose connection keeps order.
async fn until_ready(server: &Server, lock: &FairLock, position: usize) -> OwnerId {
    until_queued(lock, position + 1).await;
    let owner = queued_owners(lock).await.remove(position);
    let channel = channel(&owner);
    until("it is subscribed", async || {
        subscribers(server, &channel) == 1
    })
    .await;
    lock.queue().await.unwrap();
    owner
}

async fn holder(lock: &FairLock) -> Option<OwnerId> {
    lock.holder().await.unwrap().map(|holder| holder.owner)
}

/// One script for each turn with grants, three without. Waiters do not poll.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn turn_takes_one_script_with_grants_and_three_without() {
    const WAITERS: usize = 60;
    for (grants, first_turn, each_turn) in [(true, 1, 1.3), (false, 3, 3.3)] {
        let server = Server::start();
        let settings = || short_linger().fair_grants(grants).registry(false);
        let holder = settings().connect(&server.url()).await.unwrap();
        let crowd = settings().connect(&server.url()).await.unwrap();
        let lock = holder.fair_lock("a");
        let guard = held(&lock).await;
        let mut waiting = Vec::new();
        for n in 0..WAITERS {
            waiting.push(spawn_waiter(&crowd.fair_lock("a"), n).await);
        }
        until("all are subscribed", async || channels(&server) == WAITERS).await;
        // On the same connection, so after the requests that the waiters sent together with the
        // subscription.
        assert_eq!(crowd.fair_lock("a").queue().await.unwrap().len(), WAITERS);
        let quiet = server.calls("eval");
        let last = Vec::from_iter(waiting.split_off(1));
        free(guard).await;
        let first = await_turn(waiting.remove(0)).await;
        // The release. Without grants also the acquisition, and the request of the next waiter, which learns how
        // long the new hold lasts.
        let retried = async || server.calls("eval") >= quiet + first_turn;
        until("the next waiter has retried", retried).await;
        let sent = server.calls("eval") - quiet;
        assert!(sent <= first_turn + 1, "{sent} scripts for one turn");
        assert!(last.iter().all(|one| !one.is_finished()));
        free(first).await;
        for one in last {
            free(await_turn(one).await).await;
        }
        let per_turn = (server.calls("eval") - quiet) as f64 / WAITERS as f64;
        assert!(per_turn < each_turn, "{per_turn} scripts per turn");
        assert_no_keys_left(&[&holder, &crowd], &lock, &server).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grant_whose_message_is_lost_is_found_after_reconnection() {
    let (server, proxy) = proxied_server();
    let (near, far) = (client(&server.url()).await, client(&proxy.url()).await);
    let (lock, theirs) = (near.fair_lock("a"), far.fair_lock("a"));
    let held = lock.lock().await.unwrap();
    let waiting = spawn_waiter(&theirs, 0).await;
    let owner = until_ready(&server, &theirs, 0).await;
    proxy.discard_replies(true);
    free(held).await;
    proxy.wait_until_discarded();
    assert_eq!(holder(&lock).await, Some(owner));
    assert!(!waiting.is_finished());
    proxy.discard_replies(false);
    proxy.cut();
    let guard = await_turn(waiting).await;
    assert_eq!(theirs.hold_count(guard.owner()).await.unwrap(), 1);
    free(guard).await;
    assert_no_keys_left(&[&near, &far], &lock, &server).await;
}

/// It has an announcement, but no connection: it is woken when it is connected again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disconnected_waiter_is_not_granted_the_lock() {
    let (server, proxy) = proxied_server();
    let (near, far) = (client(&server.url()).await, client(&proxy.url()).await);
    let lock = near.fair_lock("a").grace_period(LONG);
    let guard = held(&lock).await;
    let waiting = spawn_waiter(&far.fair_lock("a").grace_period(LONG), 0).await;
    let owner = until_ready(&server, &far.fair_lock("a"), 0).await;
    cut_off(&proxy);
    let channel = channel(&owner);
    until("it is not subscribed", async || {
        subscribers(&server, &channel) == 0
    })
    .await;
    free(guard).await;
    assert!(!lock.is_locked().await.unwrap());
    assert_eq!(queued_owners(&lock).await, [owner]);
    proxy.refuse(false);
    free(await_turn(waiting).await).await;
}

/// Its connection is open, so it is granted the lock, and has it for one lease. Its message is out of date then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_that_hangs_keeps_granted_lock_for_one_lease() {
    let (server, proxy) = proxied_server();
    let near = client(&server.url()).await;
    let far = connect(short_linger().watchdog_lease(WATCHDOG), &proxy.url()).await;
    let lock = near.fair_lock("a");
    let held = lock.lock().await.unwrap();
    let hangs = spawn_waiter(&far.fair_lock("a"), 0).await;
    let owner = until_ready(&server, &far.fair_lock("a"), 0).await;
    let next = spawn_waiter(&lock, 1).await;
    until_ready(&server, &lock, 1).await;
    proxy.stall(true);
    let begun = std::time::Instant::now();
    free(held).await;
    assert_eq!(holder(&lock).await, Some(owner));
    let guard = await_turn(next).await;
    let took = begun.elapsed();
    assert!(took + SECOND >= WATCHDOG, "{took:?}");
    proxy.stall(false);
    until_queued(&lock, 1).await;
    assert!(guard.is_valid() && !hangs.is_finished());
    free(guard).await;
    free(await_turn(hangs).await).await;
    assert_no_keys_left(&[&near, &far], &lock, &server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_that_is_dropped_passes_granted_lock_on() {
    let server = Server::start();
    let (one, two) = (client(&server.url()).await, client(&server.url()).await);
    let (lock, other) = (one.fair_lock("a"), two.fair_lock("a"));
    let held = lock.lock().await.unwrap();
    let mut head = Box::pin(lock.lock().into_future());
    let owner = poll_until(&mut head, until_ready(&server, &lock, 0)).await;
    let next = spawn_waiter(&other, 1).await;
    let next_owner = until_ready(&server, &other, 1).await;
    free(held).await;
    assert_eq!(holder(&lock).await, Some(owner));
    drop(head);
    let guard = await_turn(next).await;
    assert_eq!(holder(&lock).await, Some(next_owner));
    free(guard).await;
    assert_no_keys_left(&[&one, &two], &lock, &server).await;
}

/// A message with the number of another request, as of an earlier one, is no grant: the waiter sends a request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn message_for_another_request_is_no_grant() {
    let server = Server::start();
    let (one, two) = (client(&server.url()).await, client(&server.url()).await);
    let guard = held(&one.fair_lock("a")).await;
    let lock = two.fair_lock("a");
    let waiting = spawn_waiter(&lock, 0).await;
    let owner = until_ready(&server, &lock, 0).await;
    let announced = || {
        let key = "redlatch_lock_announced:{a}";
        server.command::<String>(&["HGET", key, owner.as_ref()])
    };
    let before = announced();
    for message in ["7", "-7", "0", "text"] {
        let latest = announced();
        let _: i64 = server.command(&["PUBLISH", &channel(&owner), message]);
        until("it has sent a request", async || announced() != latest).await;
        assert!(guard.is_valid() && !waiting.is_finished());
    }
    // The number of its first request.
    let (_, number) = before.split_once(':').unwrap();
    let latest = announced();
    let _: i64 = server.command(&["PUBLISH", &channel(&owner), number]);
    until("it has sent a request", async || announced() != latest).await;
    assert!(guard.is_valid() && !waiting.is_finished());
    free(guard).await;
    free(await_turn(waiting).await).await;
}

/// A waiter in Java, which announces nothing, is woken as by Redisson.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_in_java_is_woken() {
    let server = Server::start();
    let client = client(&server.url()).await;
    let lock = client.fair_lock("a");
    let guard = held(&lock).await;
    let [_, queue, timeouts, _] = keys("a");
    let now: Vec<u64> = server.command(&["TIME"]);
    let _: i64 = server.command(&["RPUSH", &queue, "java:1"]);
    let timeout = (now[0] + 600) * 1000;
    let _: i64 = server.command(&["ZADD", &timeouts, &timeout.to_string(), "java:1"]);
    let messages = messages(&server, "redisson_lock__channel:{a}:java:1");
    let waiting = spawn_waiter(&lock, 1).await;
    until_ready(&server, &lock, 1).await;
    free(guard).await;
    assert_eq!(messages.recv_timeout(LONG).unwrap(), "0");
    assert!(!lock.is_locked().await.unwrap() && !waiting.is_finished());
    // It takes its turn as Redisson's script does, and releases.
    let _: String = server.command(&["LPOP", &queue]);
    let _: i64 = server.command(&["ZREM", &timeouts, "java:1"]);
    free(await_turn(waiting).await).await;
    assert_nothing_left(&[&client], &lock).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_requests_without_fixed_lease_accept_grants() {
    let server = Server::start();
    let one = client(&server.url()).await;
    let off = short_linger().fair_grants(false);
    let off = off.connect(&server.url()).await.unwrap();
    let lock = one.fair_lock("a");
    let guard = held(&lock).await;
    let fixed = tokio::spawn(lock.lock().lease(LONG).into_future());
    until_ready(&server, &lock, 0).await;
    let refuses = spawn_waiter(&off.fair_lock("a"), 1).await;
    until_ready(&server, &off.fair_lock("a"), 1).await;
    let accepts = spawn_waiter(&lock, 2).await;
    let owner = until_ready(&server, &lock, 2).await;
    let announced: Vec<String> = server.command(&["HKEYS", "redlatch_lock_announced:{a}"]);
    assert_eq!(announced, [owner.to_string()]);
    free(guard).await;
    for turn in [fixed, refuses, accepts] {
        free(await_turn(turn).await).await;
    }
    assert_no_keys_left(&[&one, &off], &lock, &server).await;
}

/// Redisson's scripts drop waiters from the queue, and do not know the announcements.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn announcement_of_dropped_waiter_is_removed_when_it_gives_up() {
    let server = Server::start();
    let client = client(&server.url()).await;
    let lock = client.fair_lock("a");
    let guard = held(&lock).await;
    let waiting = spawn_waiter(&lock, 0).await;
    until_ready(&server, &lock, 0).await;
    let [_, queue, timeouts, _] = keys("a");
    let _: i64 = server.command(&["DEL", &queue, &timeouts]);
    waiting.abort();
    assert!(waiting.await.is_err());
    client.flush().await;
    free(guard).await;
    assert_eq!(keys_left(&server, "a"), 0);
}
