//! Tests of the fair lock on a server, with faults.

use super::*;

async fn client(server: &Server) -> Client {
    connect(short_linger(), &server.url()).await
}

/// F10: processes are gone: a holder and some waiters, as `kill -9` leaves them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leftovers_of_killed_processes_do_not_block() {
    let (server, alive) = server_and_client().await;
    let lock = alive.fair_lock("a");
    let [hash, queue, timeouts, ..] = keys("a");
    let _: i64 = server.command(&["HSET", &hash, "dead:1", "1"]);
    let _: i64 = server.command(&["PEXPIRE", &hash, "300"]);
    let now: Vec<u64> = server.command(&["TIME"]);
    for (n, owner) in ["dead:2", "dead:3", "dead:4"].into_iter().enumerate() {
        let until = now[0] * 1000 + 500 + 200 * n as u64;
        let _: i64 = server.command(&["RPUSH", &queue, owner]);
        // The last waiter has no timeout at all.
        if n < 2 {
            let _: i64 = server.command(&["ZADD", &timeouts, &until.to_string(), owner]);
        }
    }
    let begun = std::time::Instant::now();
    let guard = done("the dead are not waited for", lock.lock()).await;
    assert!(begun.elapsed() < 20 * SECOND, "long after their time");
    assert!(lock.queue().await.unwrap().is_empty());
    free(guard).await;
    assert_no_keys_left(&[&alive], &lock, &server).await;
}

/// F10: a waiter dies, so the release goes to the next live waiter. The queue waits for a dead
/// waiter no longer than its wait time, if that is shorter than the grace period.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_waiter_is_skipped_after_its_wait_time() {
    let server = Server::start();
    let (alive, holder) = (client(&server).await, client(&server).await);
    let lock = holder.fair_lock("a");
    // Ten hours: waiting for the end of this lease would time out the test.
    let held = lock.lock().lease(600 * LONG).await.unwrap();
    let dead = std::thread::spawn({
        let url = server.url();
        move || {
            // The runtime ends, and with it everything that could give up, as after a kill.
            let runtime = tokio::runtime::Runtime::new().unwrap();
            runtime.block_on(async {
                let client = Client::connect(&url).await.unwrap();
                let lock = client.fair_lock("a").wait_time(Duration::from_millis(1500));
                let mut waiting = lock.lock().into_future();
                poll_until(&mut waiting, until_queued(&lock, 1)).await;
                std::mem::forget(waiting);
            });
        }
    });
    dead.join().unwrap();
    let waiting = spawn_waiter(&alive.fair_lock("a"), 1).await;
    until("the dead one is closed", async || server.clients() <= 2).await;
    let begun = std::time::Instant::now();
    free(held).await;
    let guard = await_turn(waiting).await;
    let waited = begun.elapsed();
    assert!(waited >= Duration::from_millis(900), "{waited:?}");
    free(guard).await;
    assert_no_keys_left(&[&alive, &holder], &lock, &server).await;
}

/// F11: the server does not answer while a waiter gives up; the waiter leaves the queue afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_leaves_queue_of_unreachable_server_later() {
    let ways = ["stalled", "refused", "dropped while stalled"];
    let [one, two, three] = ways.map(giving_up_reaches_it);
    tokio::join!(one, two, three);
}

async fn giving_up_reaches_it(way: &str) {
    let (server, proxy) = proxied_server();
    let holder = client(&server).await;
    let settings = short_linger().response_timeout(SHORT);
    let lock = holder.fair_lock("a");
    let away = settings.connect(&proxy.url()).await.unwrap();
    let guard = held(&lock).await;
    let theirs = away.fair_lock("a");
    let waiting = match way {
        "dropped while stalled" => tokio::spawn(theirs.try_lock().wait(LONG).into_future()),
        _ => tokio::spawn(theirs.try_lock().wait(SHORT).into_future()),
    };
    until_queued(&lock, 1).await;
    match way {
        "refused" => {
            cut_off(&proxy);
        }
        _ => proxy.stall(true),
    }
    if way == "dropped while stalled" {
        waiting.abort();
        let _ = waiting.await;
    } else {
        // The waiter gives up either because its limit is over, or because the server was
        // unreachable for too long.
        match done("gives up", waiting).await {
            Ok(None) => {}
            Ok(Some(_)) => panic!("it is held"),
            Err(error) => assert!(error.is_transient(), "{error}"),
        }
    }
    assert!(away.status().background > 0, "{way}");
    let queued = lock.queue().await.unwrap().len();
    assert_eq!(queued, 1, "{way}: still in the queue, for now");
    proxy.refuse(false);
    proxy.stall(false);
    within_limit("settled", away.flush()).await;
    assert!(lock.queue().await.unwrap().is_empty(), "{way}");
    free(guard).await;
    assert_no_keys_left(&[&holder, &away], &lock, &server).await;
}

/// Redisson's way to provoke it: the server accepts no writes for a while.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn paused_server_only_delays_leaving_the_queue() {
    let server = Server::start();
    let waiter = connect(short_linger().response_timeout(SHORT), &server.url()).await;
    let holder = client(&server).await;
    let lock = holder.fair_lock("a");
    let held = lock.lock().lease(LONG).await.unwrap();
    let theirs = waiter.fair_lock("a");
    let waiting = tokio::spawn(theirs.try_lock().wait(SHORT).into_future());
    until_queued(&lock, 1).await;
    let _: () = server.command(&["CLIENT", "PAUSE", "60000", "WRITE"]);
    let gave_up = done("gives up", waiting).await;
    assert!(!matches!(gave_up, Ok(Some(_))));
    let _: () = server.command(&["CLIENT", "UNPAUSE"]);
    within_limit("settled", waiter.flush()).await;
    assert!(lock.queue().await.unwrap().is_empty());
    free(held).await;
    assert_nothing_left(&[&holder, &waiter], &lock).await;
}

/// Answers are lost on the network: a repeated step joins, acquires or leaves only once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repeated_steps_count_once() {
    let (server, proxy) = proxied_server();
    let holder = client(&server).await;
    let shaky = short_linger().connect(&proxy.url()).await.unwrap();
    let (lock, theirs) = (holder.fair_lock("a"), shaky.fair_lock("a"));
    // So that the scripts are loaded, and the lost answers are not that they are unknown.
    free(theirs.lock().await.unwrap()).await;
    let held = lock.lock().await.unwrap();

    proxy.lose_next_answer();
    let joining = tokio::spawn(theirs.lock().into_future());
    until_queued(&lock, 1).await;
    let behind = spawn_waiter(&lock, 1).await;
    proxy.wait_until_lost();
    proxy.cut();
    until_subscribed(&shaky, 1).await;
    assert_eq!(lock.queue().await.unwrap().len(), 2, "joined once");
    let timeouts = timeouts(&server);
    let distance = timeouts[1].1 - timeouts[0].1;
    assert!((distance - 300_000.0).abs() < 1000.0, "{timeouts:?}");

    // The waiter is woken and acquires; the answer is lost, and then once more.
    proxy.stall(true);
    free(held).await;
    proxy.stall(false);
    let guard = await_turn(joining).await;
    // It is an owner of the other client.
    assert_eq!(lock.hold_count(guard.owner()).await.unwrap(), 0);
    assert_eq!(theirs.hold_count(guard.owner()).await.unwrap(), 1);
    assert_eq!(lock.queue().await.unwrap().len(), 1);

    proxy.lose_next_answer();
    let unlocking = tokio::spawn(guard.unlock());
    let next = await_turn(behind).await;
    proxy.wait_until_lost();
    proxy.cut();
    joined("unlocked", unlocking).await;
    assert!(lock.is_held_by(next.owner()).await.unwrap());
    free(next).await;
    assert_no_keys_left(&[&holder, &shaky], &lock, &server).await;
}

/// Returns the waiters with their timeouts, in milliseconds.
fn timeouts(server: &Server) -> Vec<(String, f64)> {
    let [_, _, timeouts, _] = keys("a");
    server.command(&["ZRANGE", &timeouts, "0", "-1", "WITHSCORES"])
}

/// F9: waiters that join, time out and leave repeatedly do not shift the timeouts of the others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_timeouts_do_not_drift() {
    let (server, client) = server_and_client().await;
    let lock = client.fair_lock("a").wait_time(Duration::from_secs(100));
    let mut held = lock.lock().lease(LONG).await.unwrap();
    let mut waiting = Vec::new();
    for n in 0..3 {
        let waiter = lock.lock().lease(LONG).into_future();
        waiting.push(tokio::spawn(waiter));
        until_queued(&lock, n + 1).await;
    }
    for round in 0..40 {
        // Four waiters that give up at the same time, among waiters that stay.
        let brief = Duration::from_millis(2);
        for one in spawn_each(0..4, |_| lock.try_lock().wait(brief)) {
            // With such a short limit, there may be no answer yet.
            assert!(!matches!(one.await.unwrap(), Ok(Some(_))));
        }
        if round % 10 == 0 {
            // One turn: the next waiter acquires, and the last holder queues again.
            within_limit("settled", client.flush()).await;
            free(held).await;
            held = await_turn(waiting.remove(0)).await;
            // Behind some waiters that leave once it has its position.
            let leave = spawn_each(0..4, |_| lock.lock());
            until_queued(&lock, 6).await;
            let again = tokio::spawn(lock.lock().lease(LONG).into_future());
            waiting.push(again);
            until_queued(&lock, 7).await;
            for one in leave {
                one.abort();
            }
            until_queued(&lock, 3).await;
        }
    }
    within_limit("settled", client.flush()).await;
    until_queued(&lock, 3).await;
    let now: Vec<f64> = server.command(&["TIME"]);
    for (position, (_, until)) in timeouts(&server).iter().enumerate() {
        let left = until / 1000.0 - now[0];
        let most = 60.0 + 100.0 * (position + 1) as f64;
        let is_near = left <= most + 1.0 && left > most - 70.0;
        assert!(is_near, "{position}: {left} s");
    }
    free(held).await;
    for one in waiting {
        free(await_turn(one).await).await;
    }
    assert_no_keys_left(&[&client], &lock, &server).await;
}

/// The server loses all data (FLUSHALL, a restart): waiters queue again and acquire the lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_queue_again_after_data_loss() {
    let mut server = Server::start();
    let (one, two) = (client(&server).await, client(&server).await);
    let lock = one.fair_lock("a").wait_time(Duration::from_secs(2));
    for restarted in [false, true] {
        let held = lock.lock().lease(SHORT).await.unwrap();
        let mut waiting = Vec::new();
        for n in 0..6 {
            let client = if n % 2 == 0 { &one } else { &two };
            let lock = client.fair_lock("a").wait_time(Duration::from_secs(2));
            waiting.push(spawn_waiter(&lock, n).await);
        }
        if restarted {
            server.restart();
        } else {
            let _: () = server.command(&["FLUSHALL"]);
            let _: () = server.command(&["SCRIPT", "FLUSH"]);
        }
        drop(held);
        // The order is new, so each waiter unlocks in its own task.
        let unlocking = spawn_each(waiting, async |one| free(await_turn(one).await).await);
        done_all("served", unlocking).await;
        assert_nothing_left(&[&one, &two], &lock).await;
    }
}

/// The connection is cut while all waiters wait: they keep their positions.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_keep_their_places_across_reconnection() {
    let server = Server::start();
    let (holder, crowd) = (client(&server).await, client(&server).await);
    let lock = holder.fair_lock("a");
    let held = lock.lock().lease(10 * LONG).await.unwrap();
    let mut waiting = Vec::new();
    for n in 0..20 {
        waiting.push(spawn_waiter(&crowd.fair_lock("a"), n).await);
    }
    let queue = queued_owners(&lock).await;
    for _ in 0..3 {
        until_subscribed(&crowd, 20).await;
        server.cut_all();
    }
    assert_eq!(queued_owners(&lock).await, queue);
    // Released while the waiters may not be connected again yet.
    free(held).await;
    for (one, owner) in waiting.into_iter().zip(queue) {
        let guard = await_turn(one).await;
        assert_eq!(guard.owner_id(), owner);
        free(guard).await;
    }
    assert_nothing_left(&[&holder, &crowd], &lock).await;
}

/// Keys of other types cause an error and stay unchanged.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn foreign_keys_are_rejected_and_stay_unchanged() {
    let server = shared();
    let client = client(server).await;
    for foreign in 0..3 {
        let name = unique("foreign");
        let lock = client.fair_lock(&name);
        let key = &keys(&name)[foreign];
        let _: () = server.command(&["SET", key, "mine"]);
        if foreign > 0 {
            // Another owner holds the lock, so that queueing is the step that fails.
            let _: i64 = server.command(&["HSET", &name, "other:1", "1"]);
            let _: i64 = server.command(&["PEXPIRE", &name, "600000"]);
        }
        let refused = lock.try_lock().wait(LONG).await.unwrap_err();
        let is_other_kind = matches!(refused, Error::WrongKind { .. });
        assert!(is_other_kind, "{foreign}: {refused}");
        within_limit("settled", client.flush()).await;
        assert_eq!(server.command::<String>(&["GET", key]), "mine");
    }
    let name = unique("foreign-hash");
    let lock = client.fair_lock(&name);
    let _: i64 = server.command(&["HSET", &name, "field", "x"]);
    for refused in [lock.lock().await.err(), lock.force_unlock().await.err()] {
        assert_matches!(refused, Some(Error::WrongKind { .. }));
    }
    let name = unique("read-write");
    let _: i64 = server.command(&["HSET", &name, "mode", "read", "other:1", "1"]);
    let refused = client.fair_lock(&name).lock().await.unwrap_err();
    assert_matches!(refused, Error::WrongKind { .. });
}

/// Entries that Redisson left in the queue are respected, and redlatch writes its entries as
/// Redisson does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_matches_redisson() {
    let server = Server::start();
    let client = connect(Client::builder().client_id("rust"), &server.url()).await;
    let lock = client.fair_lock("a").wait_time(Duration::from_secs(50));
    let [hash, queue, timeouts, ..] = keys("a");
    let held = lock.lock().lease(LONG).await.unwrap();
    let now: Vec<i64> = server.command(&["TIME"]);
    let until = (now[0] + 500) * 1000;
    let _: i64 = server.command(&["RPUSH", &queue, "java:7"]);
    let _: i64 = server.command(&["ZADD", &timeouts, &until.to_string(), "java:7"]);
    let waiting = spawn_waiter(&lock, 1).await;
    let owner = queued_owners(&lock).await[1].to_string();
    let queued: Vec<String> = server.command(&["LRANGE", &queue, "0", "-1"]);
    assert_eq!(queued, ["java:7", &owner]);
    // Its own wait time behind the last one.
    let score: f64 = server.command(&["ZSCORE", &timeouts, &owner]);
    assert_eq!(score as i64, until + 50_000);
    // A release notifies the head of the queue, on its own channel.
    let messages = messages(&server, "redisson_lock__channel:{a}:java:7");
    free(held).await;
    assert_eq!(messages.recv_timeout(LONG).unwrap(), "0");
    let is_held: bool = server.command(&["EXISTS", &hash]);
    assert!(!is_held, "left to the head");
    assert!(!waiting.is_finished());
    // Java takes its turn as its script does, and releases: the next waiter is notified.
    assert_eq!(server.command::<String>(&["LPOP", &queue]), "java:7");
    let _: i64 = server.command(&["ZREM", &timeouts, "java:7"]);
    let channel = format!("redisson_lock__channel:{{a}}:{owner}");
    let receivers: i64 = server.command(&["PUBLISH", &channel, "0"]);
    assert_eq!(receivers, 1, "it is subscribed");
    free(await_turn(waiting).await).await;
    assert_nothing_left(&[&client], &lock).await;
}

/// Redisson: testNameMapper. The auxiliary keys have the same prefix as the lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_keys_have_the_prefix() {
    let server = Server::start();
    let client = connect(short_linger().prefix("test::"), &server.url()).await;
    let lock = client.fair_lock("a");
    let guard = held(&lock).await;
    let waiting = spawn_waiter(&lock, 0).await;
    let mut present: Vec<String> = server.command(&["KEYS", "*"]);
    present.sort();
    let mut expected = keys("test::a");
    expected.sort();
    assert_eq!(present, expected);
    let owner = &queued_owners(&lock).await[0];
    let channel = format!("redisson_lock__channel:{{test::a}}:{owner}");
    until("it is subscribed", async || {
        subscribers(&server, &channel) == 1
    })
    .await;
    assert_eq!(channels(&server), 1);
    free(guard).await;
    free(await_turn(waiting).await).await;
    assert_nothing_left(&[&client], &lock).await;
    assert_eq!(keys_left(&server, "test::a"), 0);
}
