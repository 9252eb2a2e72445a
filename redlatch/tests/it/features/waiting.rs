//! Waiting on a real server: its cost, and that no wake-up is missed.

use std::collections::HashSet;
use std::io::{BufRead as _, BufReader, Write as _};

use crate::common::prelude::*;

/// Only the first waiter in the queue sends requests; a turn costs one release and one acquisition.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_waiter_per_name_asks_the_server() {
    const WAITERS: usize = 200;
    let server = Server::start();
    let holder = unregistered_client(&server).await;
    let crowd = unregistered_client(&server).await;
    let guard = held(&holder.lock("a")).await;
    let before = server.calls("eval");
    let begun = Arc::new(AtomicUsize::new(0));
    let waiters = spawn_each(0..WAITERS, |_| {
        let (lock, begun) = (crowd.lock("a"), begun.clone());
        async move {
            begun.fetch_add(1, Ordering::SeqCst);
            free(held(&lock).await).await;
        }
    });
    until("all have begun", async || {
        begun.load(Ordering::SeqCst) == WAITERS
    })
    .await;
    until("they wait", async || channels(&server) == 1).await;
    let asked = server.calls("eval") - before;
    // Each waiter that starts before the local queue exists sends one request; no waiter polls.
    assert!(asked <= WAITERS as u64 + 2, "{asked}");

    let before = server.calls("eval");
    free(guard).await;
    done_all("served", waiters).await;
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
    let waiting = spawn_each(0..NAMES, |n| {
        waiter.lock(&format!("name-{n}")).lock().into_future()
    });
    for some in (0..=NAMES).step_by(NAMES / 10) {
        until("more are subscribed", async || channels(&server) >= some).await;
    }
    assert_eq!(channels(&server), NAMES);
    until("one connection per client", async || server.clients() == 2).await;
    free_all(held).await;
    for one in waiting {
        free(joined("woken", one).await).await;
    }
    until("no channel is left", async || channels(&server) == 0).await;
    until_subscribed(&waiter, 0).await;
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
                let guard = held(&lock).await;
                if n % 7 == 0 {
                    tokio::task::yield_now().await;
                }
                free(guard).await;
                if n % 50 == 0 {
                    // Long enough for the local queue to close, so that closing and waiting
                    // overlap.
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
            }
        }));
    }
    done_all("no wake-up is missed", players).await;
}

/// F6, across a reconnection: a release while the waiter's connection is down is noticed after it
/// reconnects.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn release_during_disconnect_is_noticed_afterwards() {
    let (server, proxy) = proxied_server();
    let holder = client(&server).await;
    let waiter = Client::connect(&proxy.url()).await.unwrap();
    for round in 0..10 {
        let held = holder.lock("a").lock().lease(10 * LONG).await.unwrap();
        let waiting = tokio::spawn(waiter.lock("a").lock().into_future());
        until("it waits", async || channels(&server) == 1).await;
        if round % 2 == 0 {
            // No data gets through: neither the release's message nor the end of the connection.
            proxy.stall(true);
            free(held).await;
            proxy.stall(false);
            proxy.cut();
        } else {
            cut_off(&proxy);
            free(held).await;
            proxy.refuse(false);
        }
        free(joined("seen", waiting).await).await;
    }
}

/// A message comes once. What the waiter sends behind it is lost: its request, or behind a grant its release.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_behind_message_is_repeated_if_it_is_lost() {
    let (server, proxy) = proxied_server();
    let holder = client(&server).await;
    let waiter = client_at(&proxy.url()).await;
    let losing = async || {
        wait_until_discarded(&proxy).await;
        proxy.discard_requests(false);
        proxy.cut();
    };
    for _ in 0..5 {
        let held = holder.lock("a").lock().lease(10 * LONG).await.unwrap();
        let waiting = tokio::spawn(waiter.lock("a").lock().into_future());
        until("it waits", async || channels(&server) == 1).await;
        proxy.discard_requests(true);
        free(held).await;
        losing().await;
        free(joined("acquired", waiting).await).await;
        until("it waits no more", async || channels(&server) == 0).await;

        let (fair, theirs) = (waiter.fair_lock("b"), holder.fair_lock("b"));
        let held = theirs.lock().await.unwrap();
        let waiting = tokio::spawn(async move { fair.lock().await.unwrap().unlock().await });
        let is_queued = || async { theirs.queue().await.unwrap().len() == 1 };
        until("it is queued", is_queued).await;
        proxy.discard_requests(true);
        free(held).await;
        losing().await;
        joined("released", waiting).await;
        assert!(!theirs.is_locked().await.unwrap());
        until("it waits no more", async || channels(&server) == 0).await;
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
    until("all wait", async || channels(&server) == NAMES).await;
    for _ in 0..3 {
        server.cut_all();
        until("all wait again", async || channels(&server) == NAMES).await;
    }
    free_all(held).await;
    let mut served = HashSet::new();
    for one in waiting {
        let guard = joined("woken", one).await;
        served.insert(guard.name().to_owned());
        free(guard).await;
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
    drop(joined("the lease ends", waiting).await);
}

/// A task without any remaining budget polls its futures once without progress. The second poll
/// must not send the step before the subscription (F6).
#[tokio::test(flavor = "current_thread")]
async fn subscription_is_sent_first_for_any_task_budget() {
    let (server, client) = server_and_client().await;
    let other = Client::connect(&server.url()).await.unwrap();
    let seen = monitor(&server);
    until("the monitor is active", async || {
        let _: String = server.command(&["PING"]);
        !seen.lock().unwrap().is_empty()
    })
    .await;
    for left in 1..12 {
        let lock = client.lock(&format!("budget-{left}"));
        let theirs = other.lock(lock.name());
        let held = theirs.lock().lease(10 * LONG).await.unwrap();
        let of_holder = |line: &String| line.contains(lock.name());
        let is_seen = async || seen.lock().unwrap().iter().any(of_holder);
        until("the holder's step is seen", is_seen).await;
        seen.lock().unwrap().clear();
        let mut waiting = lock.lock().into_future();
        // Leaves this much of tokio's budget (128 per poll of a task) at each poll.
        let waiting = poll_fn(move |cx| {
            for _ in 0..(128 - left) {
                let mut spent = pin!(tokio::task::consume_budget());
                if spent.as_mut().poll(cx).is_pending() {
                    break;
                }
            }
            waiting.as_mut().poll(cx)
        });
        let waiting = tokio::spawn(waiting);
        let sent = |verb: &str| -> Vec<usize> {
            let seen = seen.lock().unwrap();
            let ours = |line: &str| line.contains(verb) && line.contains(lock.name());
            (0..seen.len()).filter(|&at| ours(&seen[at])).collect()
        };
        let retried = async || sent("SUBSCRIBE").len() == 1 && sent("EVALSHA").len() == 2;
        until("subscribed and retried", retried).await;
        // Not sent before the subscription.
        assert!(sent("SUBSCRIBE")[0] < sent("EVALSHA")[1]);
        free(held).await;
        free(joined("woken", waiting).await).await;
    }
}

/// Records the commands that a server receives, as they arrive.
pub(crate) fn monitor(server: &Server) -> Arc<Mutex<Vec<String>>> {
    let mut stream = std::net::TcpStream::connect(("127.0.0.1", server.port())).unwrap();
    stream.write_all(b"MONITOR\r\n").unwrap();
    let seen: Arc<Mutex<Vec<String>>> = Arc::default();
    let lines = BufReader::new(stream).lines();
    let write = seen.clone();
    std::thread::spawn(move || {
        for line in lines
            .map_while(Result::ok)
            .filter(|line| line.starts_with('+'))
        {
            // Skip commands that scripts call.
            if !line.contains(" lua]") && !line.contains("UNSUBSCRIBE") {
                write.lock().unwrap().push(line);
            }
        }
    });
    seen
}

/// A channel that the server refuses affects neither other names nor the next connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_channel_affects_only_its_own_name() {
    let server = Server::start();
    let rights = "on >pw ~* +@all resetchannels &redisson_lock__channel:{fine}";
    let rights: Vec<&str> = rights.split(' ').collect();
    let _: () = server.command(&[&["ACL", "SETUSER", "app"], &rights[..]].concat());
    let url = format!("redis://app:pw@127.0.0.1:{}", server.port());
    let client = connect(renewing(), &url).await;
    let admin = Client::connect(&server.url()).await.unwrap();
    let _bad = admin.lock("bad").lock().lease(10 * LONG).await.unwrap();
    let fine = admin.lock("fine").lock().lease(10 * LONG).await.unwrap();
    let waiter = waiter_of(&client, client.lock("fine").lock()).await;
    let refused = client.lock("bad").lock().await.unwrap_err();
    assert!(refused.to_string().contains("permissions"), "{refused}");
    server.cut_all();
    assert!(client.lock("other").try_lock().await.unwrap().is_some());
    free(fine).await;
    drop(joined("woken", waiter).await);
}
