//! Every bug that was found in redlatch itself, with a regression test (`docs/robustness.md`,
//! "found here").

use std::future::{Future, IntoFuture, poll_fn};
use std::io::{BufRead as _, BufReader, Write as _};
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use redlatch::{Client, Embedded, Error, Guard, Loss, Owner, RedLock};
use redlatch_testkit::{Proxy, Server, shared, unique};

use crate::common::{
    LONG, SHORT, TestStore, WATCHDOG, assert_lost, client, retry_if_late, until, until_rises,
    within_limit,
};

on_every_store! {
    reentering_does_not_revive_a_lost_hold,
    dropped_inner_guard_does_not_make_unlock_report_loss,
    canceled_reentry_does_not_make_unlock_report_loss,
    concurrent_acquisitions_of_one_owner_do_not_wait_for_each_other,
    queued_owner_starts_over_when_its_other_hold_was_lost,
    loss_during_reentry_is_removed_from_hold_count,
}

async fn reentering_does_not_revive_a_lost_hold(store: TestStore) {
    let (client, other) = (store.client().await, store.client().await);
    let name = unique("revive");
    let outer = client.lock(&name).lock().await.unwrap();
    assert!(other.lock(&name).force_unlock().await.unwrap());
    // Another owner held it in between; now it is free again.
    other.lock(&name).run(async {}).await.unwrap();
    let again = outer.reenter().await;
    assert_lost(&again.unwrap_err(), Loss::NotHeld);
    assert!(!outer.is_valid());
    assert!(!client.lock(&name).is_locked().await.unwrap());
}

async fn dropped_inner_guard_does_not_make_unlock_report_loss(store: TestStore) {
    let client = store.client().await;
    let lock = client.lock(&unique("inner"));
    for _ in 0..300 {
        let outer = lock.lock().await.unwrap();
        let (one, two) = (
            outer.reenter().await.unwrap(),
            outer.reenter().await.unwrap(),
        );
        drop(one);
        drop(two);
        outer.unlock().await.unwrap();
        client.flush().await;
        assert!(!lock.is_locked().await.unwrap());
    }
}

async fn canceled_reentry_does_not_make_unlock_report_loss(store: TestStore) {
    let client = store.client().await;
    let lock = client.lock(&unique("cancelled"));
    for _ in 0..300 {
        let outer = lock.lock().await.unwrap();
        let mut again = outer.reenter().into_future();
        poll_fn(|cx| {
            let _ = again.as_mut().poll(cx);
            Poll::Ready(())
        })
        .await;
        drop(again);
        outer.unlock().await.unwrap();
        client.flush().await;
        assert!(!lock.is_locked().await.unwrap());
    }
}

async fn concurrent_acquisitions_of_one_owner_do_not_wait_for_each_other(store: TestStore) {
    let (client, other) = (
        store
            .client_with(Client::builder().watchdog_lease(10 * LONG))
            .await,
        store.client().await,
    );
    let name = unique("siblings");
    let held = other.lock(&name).lock().await.unwrap();
    let (lock, me) = (client.lock(&name), Owner::new());
    let both =
        me.scope(async { tokio::join!(lock.lock().into_future(), lock.lock().into_future()) });
    let release = async {
        until("they wait", || async { client.status().subscriptions == 1 }).await;
        held.unlock().await.unwrap();
    };
    let ((one, two), ()) =
        within_limit("both have it", async { tokio::join!(both, release) }).await;
    let (one, two) = (one.unwrap(), two.unwrap());
    assert_eq!(lock.hold_count(me).await.unwrap(), 2);
    one.unlock().await.unwrap();
    two.unlock().await.unwrap();
    assert!(!lock.is_locked().await.unwrap());
}

async fn queued_owner_starts_over_when_its_other_hold_was_lost(store: TestStore) {
    let (client, other) = (store.client().await, store.client().await);
    let (name, me) = (unique("sibling-lost"), Owner::new());
    let lock = client.lock(&name);
    let held = other.lock(&name).lock().await.unwrap();
    let brief = lock.lock().owner(me).lease(SHORT).into_future();
    let brief = tokio::spawn(brief);
    until("it waits", || async { client.status().subscriptions == 1 }).await;
    let second = lock.lock().owner(me).lease(SHORT).into_future();
    let second = tokio::spawn(second);
    held.unlock().await.unwrap();
    let brief = within_limit("acquired", brief).await.unwrap().unwrap();
    within_limit("lost", brief.lost()).await;
    // Whether it re-entered before the loss or requested it afterwards: it gets no error, and never
    // blocks forever.
    let second = within_limit("not a dead end", second)
        .await
        .unwrap()
        .unwrap();
    drop(brief);
    drop(second);
    client.flush().await;
    assert!(!lock.is_locked().await.unwrap());
}

async fn loss_during_reentry_is_removed_from_hold_count(store: TestStore) {
    let (client, other) = (store.client().await, store.client().await);
    let name = unique("off-account");
    let outer = client.lock(&name).lock().lease(10 * LONG).await.unwrap();
    assert!(other.lock(&name).force_unlock().await.unwrap());
    let next = other.lock(&name).lock().await.unwrap();
    assert!(matches!(outer.reenter().await, Err(Error::Lost { .. })));
    assert_eq!(client.status().holds, 0);
    drop(outer);
    client.flush().await;
    assert!(next.is_valid() && other.lock(&name).is_held_by(next.owner()).await.unwrap());
}

/// A renewal that is chosen before a re-entry with a longer lease, and sent after it.
#[tokio::test(start_paused = true)]
async fn renewal_never_shortens_a_longer_lease() {
    let second = Duration::from_secs(1);
    for yields in 0..8 {
        let store = Embedded::new();
        let client = Client::builder().connect_embedded(&store).unwrap();
        let due = tokio::time::Instant::now() + 10 * second;
        let outer = client.lock("a").lock().await.unwrap();
        for _ in 0..yields {
            // When both timers are due, the one that was registered first fires first: the
            // watchdog's or that of the re-entry.
            tokio::task::yield_now().await;
        }
        let entering = tokio::spawn(async move {
            tokio::time::sleep_until(due).await;
            let inner = outer.reenter().lease(600 * second).await.unwrap();
            (outer, inner)
        });
        let (outer, inner) = entering.await.unwrap();
        tokio::time::sleep(60 * second).await;
        assert!(inner.is_valid() && outer.is_valid());
        let left = client.lock("a").remaining_lease().await.unwrap();
        assert!(left > Some(500 * second), "{left:?} left in the store");
    }
}

/// A task without any remaining budget polls its futures once without progress. The second poll
/// must not send the step before the subscription (F6).
#[tokio::test(flavor = "current_thread")]
async fn subscription_is_sent_first_for_any_task_budget() {
    let server = Server::start();
    let client = Client::connect(&server.url()).await.unwrap();
    let other = Client::connect(&server.url()).await.unwrap();
    let seen = monitor(&server);
    until("the monitor is active", || async {
        let _: String = server.ask(&["PING"]);
        !seen.lock().unwrap().is_empty()
    })
    .await;
    for left in 1..12 {
        let lock = client.lock(&format!("budget-{left}"));
        let held = other
            .lock(lock.name())
            .lock()
            .lease(10 * LONG)
            .await
            .unwrap();
        until("the holder's step is seen", || async {
            let seen = seen.lock().unwrap();
            seen.iter().any(|line| line.contains(lock.name()))
        })
        .await;
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
        until("subscribed and retried", || async {
            sent("SUBSCRIBE").len() == 1 && sent("EVALSHA").len() == 2
        })
        .await;
        assert!(
            sent("SUBSCRIBE")[0] < sent("EVALSHA")[1],
            "sent before the subscription"
        );
        held.unlock().await.unwrap();
        let guard = within_limit("woken", waiting).await.unwrap().unwrap();
        guard.unlock().await.unwrap();
    }
}

/// Records the commands that a server receives, as they arrive.
fn monitor(server: &Server) -> Arc<Mutex<Vec<String>>> {
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

/// Failed renewals are retried after a pause, not as fast as the machine can.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failing_renewals_are_retried_with_pauses() {
    let mut server = Server::start();
    let watchdog = Duration::from_secs(3);
    let client = Client::builder()
        .watchdog_lease(watchdog)
        .connect(&server.url())
        .await
        .unwrap();
    let lock = client.lock("a");
    let guard = retry_if_late(|| lock.lock()).await;
    server.kill();
    // Counts the connections at the address where the server was.
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", server.port()))
        .await
        .unwrap();
    let counting = async {
        let mut tries = 0;
        loop {
            drop(listener.accept().await.unwrap());
            tries += 1;
            // Two seconds of retries, one every tenth of a second.
            assert!(tries < 200, "renewed without a pause");
        }
    };
    tokio::select! {
        () = guard.lost() => {}
        never = counting => never,
    }
}

/// The answer to a re-entry arrives when the hold is already lost; what it left in the store is
/// released, instead of lasting for its lease of an hour.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_answer_to_reentry_leaves_nothing_behind() {
    let server = Server::start();
    let client = Client::connect(&server.url()).await.unwrap();
    let lock = client.lock("a");
    let outer = loop {
        let outer = retry_if_late(|| lock.lock().lease(Duration::from_millis(700))).await;
        // So that the re-entry finds the hold, however slow this machine is.
        if server.ask::<bool>(&["PERSIST", "a"]) {
            break outer;
        }
    };
    server.freeze();
    let thaw = async {
        within_limit("lost", outer.lost()).await;
        server.thaw();
    };
    let again = outer
        .reenter()
        .lease(Duration::from_secs(3600))
        .into_future();
    let (again, ()) = tokio::join!(again, thaw);
    assert!(matches!(again, Err(Error::Lost { .. })), "{again:?}");
    drop(outer);
    within_limit("settled", client.flush()).await;
    assert!(!client.lock("a").is_locked().await.unwrap());
}

/// The same owner has released the lock before; its next acquisition is not answered. That one is
/// undone nevertheless.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unanswered_acquisition_of_known_owner_is_undone() {
    let server = Server::start();
    let settings = Client::builder().response_timeout(Duration::from_millis(300));
    let client = settings.connect(&server.url()).await.unwrap();
    let (lock, me) = (client.lock("a"), Owner::new());
    // This request waits in vain, so that the owner stays known while it acquires the lock
    // elsewhere.
    let kept = retry_if_late(|| async {
        let outer = lock.lock().owner(me).await?;
        let kept = outer.reenter();
        outer.unlock().await?;
        Ok(kept)
    })
    .await;
    server.freeze();
    let error = lock.lock().owner(me).await.unwrap_err();
    assert!(matches!(error, Error::ResponseTimeout { .. }), "{error}");
    server.thaw();
    within_limit("undone", client.flush()).await;
    assert!(!retry_if_late(|| lock.is_locked()).await);
    drop(kept);
}

/// The owner of a lost guard has acquired and released the lock since. Dropping that guard never
/// affects the owner's next hold, whenever it is dropped.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_guard_never_affects_later_holds_of_its_owner() {
    let server = Server::start();
    let client = Client::connect(&server.url()).await.unwrap();
    let (lock, me) = (client.lock("a"), Owner::new());
    for _ in 0..20 {
        let brief = || lock.lock().owner(me).lease(Duration::from_millis(200));
        let Ok(lost) = brief().await else {
            // The lease had ended before the answer: a busy machine.
            continue;
        };
        within_limit("lost", lost.lost()).await;
        lock.lock().owner(me).await.unwrap().unlock().await.unwrap();
        // A release whose script must be loaded first arrives one round trip later.
        let _: () = server.ask(&["SCRIPT", "FLUSH"]);
        drop(client.lock("teach").try_lock().await.unwrap());
        let again = lock.lock().owner(me);
        let (again, ()) = tokio::join!(again.into_future(), async { drop(lost) });
        let again = again.unwrap();
        client.flush().await;
        assert!(
            lock.is_held_by(me).await.unwrap(),
            "deleted by the release of the lost guard"
        );
        again.unlock().await.unwrap();
    }
}

/// The result of the work is not discarded because the release was not answered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_returns_the_result_if_the_release_is_not_answered() {
    let server = Server::start();
    let proxy = Proxy::to(server.port());
    let settings = Client::builder().response_timeout(Duration::from_millis(300));
    let client = settings.connect(&proxy.url()).await.unwrap();
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

/// Read-only calls also return an error outside a runtime, and do not panic.
#[test]
fn calls_without_runtime_fail_and_do_not_panic() {
    fn refused<T>(what: &str, call: impl IntoFuture<Output = redlatch::Result<T>>) {
        let mut context = Context::from_waker(Waker::noop());
        match pin!(call.into_future()).poll(&mut context) {
            Poll::Ready(Err(Error::NoRuntime)) => {}
            Poll::Ready(Ok(_)) => panic!("{what}: done"),
            Poll::Ready(Err(error)) => panic!("{what}: {error}"),
            Poll::Pending => panic!("{what}: pending"),
        }
    }
    let runtime = runtime();
    let client = runtime.block_on(Client::connect(&shared().url())).unwrap();
    let name = unique("no-runtime");
    let (lock, me) = (client.lock(&name), Owner::new());
    refused("lock", lock.lock());
    refused("try_lock", lock.try_lock());
    refused("is_locked", lock.is_locked());
    refused("holder", lock.holder());
    refused("force_unlock", lock.force_unlock());
    refused("inspect", client.inspect(&name));
    refused("red lock", RedLock::new([lock.clone()]).is_held_by(me));
    let semaphore = client.semaphore(&name);
    refused("acquire", semaphore.acquire());
    refused("available", semaphore.available());
    refused("try_set_permits", semaphore.try_set_permits(1));
    refused("add_permits", semaphore.add_permits(1));
    refused("delete", semaphore.delete());
    let expirable = client.expirable_semaphore(&name);
    refused("expirable acquire", expirable.acquire());
    refused("expirable available", expirable.available());
    refused("expirable set_permits", expirable.set_permits(1));
    let latch = client.count_down_latch(&name);
    refused("count", latch.count());
    refused("count_down", latch.count_down());
    refused("try_set_count", latch.try_set_count(1));
    refused("wait", latch.wait());
    refused("latch delete", latch.delete());
}

fn runtime() -> tokio::runtime::Runtime {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    runtime.worker_threads(1).enable_all().build().unwrap()
}

/// A client is used from two runtimes. When the runtime that drives its connection and its watchdog
/// ends, waiters and holders in the other one do not notice.
#[test]
fn end_of_one_runtime_does_not_affect_another() {
    let server = Server::start();
    let (ending, staying) = (runtime(), runtime());
    let settings = Client::builder().watchdog_lease(WATCHDOG);
    let client = ending.block_on(settings.connect(&server.url())).unwrap();
    let other = staying.block_on(Client::connect(&server.url())).unwrap();
    // The watchdog starts in the runtime that ends.
    let first = ending
        .block_on(client.lock("first").lock().into_future())
        .unwrap();
    let held = staying
        .block_on(client.lock("held").lock().into_future())
        .unwrap();
    let blocker = other.lock("waited").lock().lease(10 * LONG).into_future();
    let blocker = staying.block_on(blocker).unwrap();
    let waiter = staying.spawn(client.lock("waited").lock().into_future());
    staying.block_on(until("it waits", || async {
        client.status().subscriptions == 1
    }));
    drop(ending);
    staying.block_on(async {
        blocker.unlock().await.unwrap();
        drop(within_limit("woken", waiter).await.unwrap().unwrap());
        renewed_again([&held, &first]).await;
        held.unlock().await.unwrap();
        first.unlock().await.unwrap();
    });
}

/// The same, without any request in the meantime.
#[test]
fn watchdog_continues_in_another_runtime() {
    let server = Server::start();
    let (ending, staying) = (runtime(), runtime());
    let settings = Client::builder().watchdog_lease(WATCHDOG);
    let client = ending.block_on(settings.connect(&server.url())).unwrap();
    let first = ending
        .block_on(client.lock("first").lock().into_future())
        .unwrap();
    let held = staying
        .block_on(client.lock("held").lock().into_future())
        .unwrap();
    drop(ending);
    // Observes from a separate runtime.
    runtime().block_on(renewed_again([&held, &first]));
}

/// Waits for two renewals of each guard: the first may have been in flight before.
async fn renewed_again(guards: [&Guard; 2]) {
    let [one, two] = guards.map(|guard| async move {
        for _ in 0..2 {
            until_rises("the lease", || async { guard.valid_for() }).await;
        }
        assert!(guard.is_valid());
    });
    tokio::join!(one, two);
}

/// A local queue whose closing was interrupted does not rely on a subscription that has ended.
#[test]
fn interrupted_queue_closing_loses_no_wake_up() {
    let server = Server::start();
    let (ending, staying) = (runtime(), runtime());
    let settings = Client::builder()
        .subscription_linger(Duration::from_millis(1))
        .response_timeout(LONG);
    let client = staying.block_on(settings.connect(&server.url())).unwrap();
    let other = staying.block_on(Client::connect(&server.url())).unwrap();
    let held = other.lock("a").lock().lease(10 * LONG).into_future();
    let held = staying.block_on(held).unwrap();
    let lock = client.lock("a");
    let brief = retry_if_late(|| lock.try_lock().wait(Duration::from_millis(50)));
    let gave_up = ending.block_on(async {
        let gave_up = brief.await;
        // The queue is about to be closed; the server does not answer.
        server.freeze();
        gave_up
    });
    assert!(gave_up.is_none());
    std::thread::sleep(Duration::from_millis(50));
    drop(ending);
    server.thaw();
    let waiter = staying.spawn(client.lock("a").lock().into_future());
    staying.block_on(async {
        until("it is subscribed", || async {
            server
                .ask::<Vec<String>>(&["PUBSUB", "CHANNELS", "*"])
                .len()
                == 1
        })
        .await;
        held.unlock().await.unwrap();
        drop(within_limit("woken", waiter).await.unwrap().unwrap());
    });
}

/// A channel that the server refuses affects neither other names nor the next connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_channel_affects_only_its_own_name() {
    let server = Server::start();
    let rights = "on >pw ~* +@all resetchannels &redisson_lock__channel:{fine}";
    let rights: Vec<&str> = rights.split(' ').collect();
    let _: () = server.ask(&[&["ACL", "SETUSER", "app"], &rights[..]].concat());
    let url = format!("redis://app:pw@127.0.0.1:{}", server.port());
    let client = Client::builder()
        .watchdog_lease(WATCHDOG)
        .connect(&url)
        .await
        .unwrap();
    let admin = Client::connect(&server.url()).await.unwrap();
    let _bad = admin.lock("bad").lock().lease(10 * LONG).await.unwrap();
    let fine = admin.lock("fine").lock().lease(10 * LONG).await.unwrap();
    let waiter = tokio::spawn(client.lock("fine").lock().into_future());
    until("it waits", || async { client.status().subscriptions == 1 }).await;
    let refused = client.lock("bad").lock().await.unwrap_err();
    assert!(refused.to_string().contains("permissions"), "{refused}");
    server.cut_all();
    let still = client.lock("other").try_lock().await.unwrap();
    assert!(still.is_some());
    fine.unlock().await.unwrap();
    drop(within_limit("woken", waiter).await.unwrap().unwrap());
}

/// A release is retried even if the server refuses the client for a while.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn release_is_retried_after_refusal() {
    let server = Server::start();
    let _: () = server.ask(&["ACL", "SETUSER", "app", "on", ">pw", "~*", "&*", "+@all"]);
    let url = format!("redis://app:pw@127.0.0.1:{}", server.port());
    let client = Client::connect(&url).await.unwrap();
    let guard = client.lock("a").lock().lease(10 * LONG).await.unwrap();
    let _: () = server.ask(&["ACL", "SETUSER", "app", "off"]);
    server.cut_all();
    let refused = guard.unlock().await.unwrap_err();
    assert!(
        matches!(refused, Error::AuthenticationFailed { .. }),
        "{refused}"
    );
    assert_eq!(client.status().background, 1);
    let _: () = server.ask(&["ACL", "SETUSER", "app", "on"]);
    within_limit("released", client.flush()).await;
    assert!(!client.lock("a").is_locked().await.unwrap());
}

/// Attempts that were never sent leave nothing to settle.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unsent_attempts_need_no_settling() {
    let mut server = Server::start();
    // Long enough for each request to get the reason for the failed connection, which is not
    // retried all the time.
    let settings = Client::builder().response_timeout(Duration::from_secs(1));
    let client = settings.connect(&server.url()).await.unwrap();
    server.kill();
    let error = client.lock("a").try_lock().await.unwrap_err();
    assert!(error.is_transient(), "{error}");
    within_limit(
        "the first, which found the connection broken",
        client.flush(),
    )
    .await;
    let tries: Vec<_> = (0..500)
        .map(|n| tokio::spawn(client.lock(&format!("n-{n}")).try_lock().into_future()))
        .collect();
    for one in tries {
        let error = within_limit("refused", one).await.unwrap().unwrap_err();
        assert!(matches!(error, Error::Unavailable { .. }), "{error}");
    }
    assert_eq!(client.status().background, 0);
}

/// Releasing one of several holds must not delete a lock that has lost its expiry.
#[tokio::test]
async fn inner_release_keeps_a_lock_without_expiry() {
    let server = Server::start();
    let client = Client::connect(&server.url()).await.unwrap();
    let lock = client.lock("a");
    let outer = lock.lock().lease(LONG).await.unwrap();
    let inner = outer.reenter().lease(LONG).await.unwrap();
    assert_eq!(server.ask::<i64>(&["PERSIST", "a"]), 1);
    inner.unlock().await.unwrap();
    assert!(lock.is_held_by(outer.owner()).await.unwrap());
    outer.unlock().await.unwrap();
}

/// The number of permits in a batch is limited, so that no renewal script blocks the server for
/// long.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_permits_are_renewed_in_small_batches() {
    let server = Server::start();
    let client = Client::builder().watchdog_lease(WATCHDOG);
    let client = client.connect(&server.url()).await.unwrap();
    let semaphore = client.expirable_semaphore("a");
    semaphore.set_permits(5000).await.unwrap();
    let mut guards = Vec::new();
    for _ in 0..5 {
        guards.push(semaphore.acquire_many(500).await.unwrap());
    }
    let commands = monitor(&server);
    let scripts = || {
        let commands = commands.lock().unwrap();
        let renewals = commands.iter().filter(|line| line.contains("\"EVALSHA\""));
        renewals.cloned().collect::<Vec<_>>()
    };
    for guard in &guards {
        let id = guard.ids()[0].to_string();
        until("it is renewed", || async {
            scripts().iter().any(|line| line.contains(&id))
        })
        .await;
    }
    // At most two guards in one script: 1000 ids of 32 digits.
    let longest = scripts().iter().map(String::len).max();
    assert!(longest < Some(40_000), "{longest:?}");
}

/// A server that is out of memory keeps all holds, and an inner guard can still be released.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn inner_guard_can_be_released_on_a_full_server() {
    let server = Server::start();
    let client = Client::connect(&server.url()).await.unwrap();
    let lock = client.lock("a");
    let outer = lock.lock().await.unwrap();
    let inner = outer.reenter().await.unwrap();
    let () = server.ask(&["CONFIG", "SET", "maxmemory", "1"]);
    assert!(client.lock("b").try_lock().await.is_err(), "it is not full");
    within_limit("released", inner.unlock()).await.unwrap();
    assert_eq!(lock.hold_count(outer.owner()).await.unwrap(), 1);
    outer.unlock().await.unwrap();
    assert!(!lock.is_locked().await.unwrap());
}

/// A thousand waiters that are dropped at the same time leave the queue without delaying the
/// holder's renewal. (Their cost on the server is quadratic in their number.)
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_leaving_waiters_do_not_delay_renewal() {
    const CROWD: usize = 1000;
    let server = Server::start();
    let client = client(&server).await;
    let lock = client.fair_lock("a");
    let guard = lock.lock().lease(10 * LONG).await.unwrap();
    let crowd: Vec<_> = (0..CROWD)
        .map(|_| tokio::spawn(lock.lock().into_future()))
        .collect();
    let queue = "redisson_lock_queue:{a}";
    until("all wait", || async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        server.ask::<i64>(&["LLEN", queue]) == CROWD as i64
    })
    .await;
    let scripts = || server.calls("evalsha:");
    let before = scripts();
    for waiter in &crowd {
        waiter.abort();
    }
    for waiter in crowd {
        let _ = waiter.await;
    }
    // Stands for a renewal: counts how often another request gets through while they leave.
    let other = client.lock("b");
    let inspections = AtomicUsize::new(0);
    let inspecting = async {
        loop {
            other.is_locked().await.unwrap();
            inspections.fetch_add(1, Ordering::SeqCst);
        }
    };
    tokio::select! {
        biased;
        () = within_limit("settled", client.flush()) => {}
        () = inspecting => {}
    }
    assert_eq!(server.ask::<i64>(&["EXISTS", queue]), 0);
    // Counted here: a monitor would have to receive all commands that the scripts call, millions of
    // them.
    let inspections = inspections.into_inner();
    let left = scripts() - before - inspections as u64;
    // Some waiters were just asking.
    assert!(left >= CROWD as u64, "only {left} have left");
    // The last one may have been answered after all waiters had left.
    let between = inspections.saturating_sub(1);
    assert!(between >= 5, "only {between} times: they leave all at once");
    guard.unlock().await.unwrap();
}
