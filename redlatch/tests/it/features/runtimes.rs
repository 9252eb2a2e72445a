//! Clients that are used outside of a runtime, in several runtimes, or in one without timers or sockets.

use std::task::{Context, Waker};

use redlatch::TryLockError;
use redlatch::job::Cron;
use redlatch_testkit::shared_sentinels;

use crate::common::prelude::*;

fn refused<T>(what: &str, call: impl IntoFuture<Output = redlatch::Result<T>>) {
    match poll_once(call) {
        Poll::Ready(Err(Error::NoRuntime)) => {}
        Poll::Ready(Ok(_)) => panic!("{what}: done"),
        Poll::Ready(Err(error)) => panic!("{what}: {error}"),
        Poll::Pending => panic!("{what}: pending"),
    }
}

fn poll_once<F: IntoFuture>(call: F) -> Poll<F::Output> {
    let mut context = Context::from_waker(Waker::noop());
    pin!(call.into_future()).poll(&mut context)
}

/// Also in one without timers. Read-only calls return an error, too.
#[test]
fn calls_without_runtime_fail_and_do_not_panic() {
    let whole = threaded_runtime();
    let bare = tokio::runtime::Builder::new_current_thread().build();
    let bare = bare.unwrap();
    let url = shared().url();
    let client = whole.block_on(Client::connect(&url)).unwrap();
    for inside in [false, true] {
        let _inside = inside.then(|| bare.enter());
        refused("connect", Client::connect(&url));
        refused("ping", client.ping());
        calls_of_client(&client);
        calls_of_locks(&client);
        calls_of_counters(&client);
        for client in [&client, &Client::embedded()] {
            assert_eq!(poll_once(client.flush()), Poll::Ready(()));
            let unsettled = poll_once(client.flush_within(LONG));
            assert_matches!(unsettled, Poll::Ready(none) if none.is_empty());
            refused("lock", client.lock("a").lock());
            refused("acquire", client.semaphore("a").acquire());
            refused("release", client.semaphore("a").release(1));
            let job = client.job("a");
            let scheduled = job.schedule(Cron::parse("* * * * *").unwrap());
            refused("scheduled", scheduled.run(async |_| {}));
        }
    }
}

fn calls_of_client(client: &Client) {
    let name = unique("no-runtime");
    refused("inspect", client.inspect(&name));
    refused("waiters", client.waiters(&name));
    refused("wait_graph", client.wait_graph());
    refused("list", client.list("*").next());
    refused("watch", client.watch("*").next());
    refused("jobs", client.jobs("*"));
    refused("job", client.job(&name).history());
    let once = client.once(&name, "slot");
    refused("begin", once.begin());
    refused("run", once.run(async {}));
    let election = client.election(&name);
    refused("campaign", election.campaign("me"));
    refused("leader", election.leader());
    refused("observe", election.observe().next());
    refused("advance_epoch", election.advance_epoch(7));
}

fn calls_of_locks(client: &Client) {
    let name = unique("no-runtime");
    let (lock, me) = (client.lock(&name), Owner::new());
    refused("lock", lock.lock());
    refused("run", lock.lock().run(async {}));
    refused("try_lock", lock.try_lock());
    refused("wait", lock.try_lock().wait(LONG));
    let or_busy = poll_once(lock.try_lock().or_busy());
    assert_matches!(
        or_busy,
        Poll::Ready(Err(TryLockError::Failed(Error::NoRuntime)))
    );
    refused("is_locked", lock.is_locked());
    refused("holder", lock.holder());
    refused("force_unlock", lock.force_unlock());
    refused("revoke", lock.revoke(LONG));
    refused("fenced", client.fenced_lock(&name).lock());
    refused("advance_token", client.fenced_lock(&name).advance_token(7));
    refused("fair", client.fair_lock(&name).lock());
    refused("queue", client.fair_lock(&name).queue());
    refused("spin", client.spin_lock(&name).lock());
    refused("read", client.read_write_lock(&name).read().lock());
    let fair = client.fair_read_write_lock(&name);
    refused("fair write", fair.write().lock());
    refused("group", client.group_lock(&name, "value").lock());
    let both = MultiLock::new([&lock]);
    refused("multi-lock", both.lock());
    let red = RedLock::new([&lock]);
    refused("red lock", red.lock());
    refused("red lock is_held_by", red.is_held_by(me));
}

fn calls_of_counters(client: &Client) {
    let name = unique("no-runtime");
    let semaphore = client.semaphore(&name);
    refused("acquire", semaphore.acquire());
    refused("available", semaphore.available());
    refused("try_set_permits", semaphore.try_set_permits(1));
    refused("add_permits", semaphore.add_permits(1));
    refused("release", semaphore.release(1));
    refused("drain", semaphore.drain());
    refused("delete", semaphore.delete());
    let expirable = client.expirable_semaphore(&name);
    refused("expirable acquire", expirable.acquire());
    refused("expirable available", expirable.available());
    refused("expirable set_permits", expirable.set_permits(1));
    refused("fair semaphore", client.fair_semaphore(&name, 1).acquire());
    let latch = client.count_down_latch(&name);
    refused("count", latch.count());
    refused("count_down", latch.count_down());
    refused("try_set_count", latch.try_set_count(1));
    refused("latch", latch.wait().into_future());
    refused("latch with limit", latch.try_wait().wait(LONG));
    refused("latch delete", latch.delete());
}

fn held_in(runtime: &tokio::runtime::Runtime, lock: Lock) -> Guard {
    runtime.block_on(held(&lock))
}

/// A client is used from two runtimes. When the runtime that drives its connection and its watchdog
/// ends, waiters and holders in the other one do not notice.
#[test]
fn end_of_one_runtime_does_not_affect_another() {
    let server = Server::start();
    let (ending, staying) = (threaded_runtime(), threaded_runtime());
    let settings = renewing();
    let client = ending.block_on(settings.connect(&server.url())).unwrap();
    let other = staying.block_on(Client::connect(&server.url())).unwrap();
    // The watchdog starts in the runtime that ends.
    let first = held_in(&ending, client.lock("first"));
    let held = held_in(&staying, client.lock("held"));
    let blocker = other.lock("waited").lock().lease(10 * LONG).into_future();
    let blocker = staying.block_on(blocker).unwrap();
    let waiter = staying.spawn(client.lock("waited").lock().into_future());
    staying.block_on(until_subscribed(&client, 1));
    drop(ending);
    staying.block_on(async {
        free(blocker).await;
        drop(joined("woken", waiter).await);
        renewed_again([&held, &first]).await;
        free(held).await;
        free(first).await;
    });
}

/// The same, without any request in the meantime.
#[test]
fn watchdog_continues_in_another_runtime() {
    let server = Server::start();
    let (ending, staying) = (threaded_runtime(), threaded_runtime());
    let settings = renewing();
    let client = ending.block_on(settings.connect(&server.url())).unwrap();
    let first = held_in(&ending, client.lock("first"));
    let held = held_in(&staying, client.lock("held"));
    drop(ending);
    // Observes from a separate runtime.
    threaded_runtime().block_on(renewed_again([&held, &first]));
}

/// The connection ends with its runtime. The client sends nothing, and only a check of what it holds connects again.
#[test]
fn holder_whose_connection_ended_with_another_runtime_learns_of_losses() {
    let mut server = Server::start();
    let (ending, staying) = (threaded_runtime(), threaded_runtime());
    let settings = long_timeout().client_tracking(false).registry(false);
    let client = ending.block_on(settings.connect(&server.url())).unwrap();
    drop(ending.block_on(held(&client.lock("connects"))));
    ending.block_on(client.flush());
    let fixed = client
        .lock("held")
        .lock()
        .lease(Duration::from_secs(20_000));
    let guard = staying.block_on(fixed.into_future()).unwrap();
    drop(ending);
    server.restart();
    staying.block_on(within_limit("it learns of its loss", guard.lost()));
}

/// A request that was dropped in the other runtime has timers there, so it is repeated.
#[test]
fn listing_continues_in_another_runtime() {
    let server = Server::start();
    let (ending, staying) = (threaded_runtime(), threaded_runtime());
    let client = ending.block_on(Client::connect(&server.url())).unwrap();
    let held = ending.block_on(client.lock("a").lock().into_future());
    let mut listing = client.list("*");
    server.freeze();
    ending.block_on(async {
        let mut next = pin!(listing.next());
        let begun = poll_fn(|cx| Poll::Ready(next.as_mut().poll(cx)));
        assert!(begun.await.is_pending());
    });
    drop(ending);
    server.thaw();
    let next = staying.block_on(listing.next()).unwrap();
    assert_eq!(next.map(|found| found.name).as_deref(), Some("a"));
    assert_eq!(staying.block_on(listing.next()).unwrap(), None);
    drop(held);
}

/// Waits for two renewals of each guard: the first may have been in flight before.
async fn renewed_again(guards: [&Guard; 2]) {
    let [one, two] = guards.map(|guard| async move {
        for _ in 0..2 {
            until_rises("the lease", async || guard.valid_for()).await;
        }
        assert!(guard.is_valid());
    });
    tokio::join!(one, two);
}

/// A local queue whose closing was interrupted does not rely on a subscription that has ended.
#[test]
fn interrupted_queue_closing_loses_no_wake_up() {
    let server = Server::start();
    let (ending, staying) = (threaded_runtime(), threaded_runtime());
    let settings = long_timeout().subscription_linger(Duration::from_millis(1));
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
        until("it is subscribed", async || channels(&server) == 1).await;
        free(held).await;
        drop(joined("woken", waiter).await);
    });
}

#[test]
fn guard_can_outlive_its_runtime() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let client = runtime.block_on(Client::connect(&shared().url())).unwrap();
    let lock = client.lock(&unique("outlives"));
    let short = || lock.lock().lease(Duration::from_millis(500));
    let one = runtime.block_on(retry_if_late(short));
    let two = held_in(&runtime, client.lock(&unique("outlives")));
    drop(runtime);
    drop(one);
    let rest = tokio::runtime::Runtime::new().unwrap();
    // Outside any runtime, every call fails immediately or has no effect.
    let _ = two.is_valid();
    drop(two.lost());
    drop(two);
    // The client continues to work in another runtime, on a new connection.
    let guard = rest.block_on(done("in another runtime", lock.lock()));
    rest.block_on(free(guard));
}

/// The client releases a guard that a plain thread drops in a runtime that is alive, although it used another one later.
#[test]
fn guard_dropped_on_a_thread_is_released_in_a_living_runtime() {
    let (living, other) = (threaded_runtime(), threaded_runtime());
    let client = Client::embedded();
    let guard = held_in(&living, client.lock("a"));
    let last = held_in(&other, client.lock("b"));
    other.block_on(free(last));
    drop(other);
    drop(guard);
    living.block_on(within_limit("released", client.flush()));
    assert!(!living.block_on(client.lock("a").is_locked()).unwrap());
}

/// The runtime that acquired it ends. A lost member is acquired again in another one.
#[test]
fn red_lock_regains_members_in_a_living_runtime() {
    let (living, ending) = (threaded_runtime(), threaded_runtime());
    let stores = [(); 3].map(|()| redlatch::Embedded::new());
    let clients = stores.map(|store| renewing().connect_embedded(&store).unwrap());
    let members = clients.each_ref().map(|client| client.lock("a"));
    let lock = RedLock::new(&members);
    let guard = ending.block_on(held(&lock));
    let regains = async || {
        assert!(members[1].force_unlock().await.unwrap());
        for member in &members {
            until("it is held again", async || {
                member.is_held_by(guard.owner()).await.unwrap() && guard.held_members() == 3
            })
            .await;
        }
    };
    ending.block_on(regains());
    living.block_on(async {
        for client in &clients {
            free(held(&client.lock("used")).await).await;
        }
    });
    drop(ending);
    living.block_on(regains());
    living.block_on(free(guard));
}

/// Nothing panics in a runtime without timers, regardless of where the client was created.
#[test]
fn runtime_without_timers_causes_error() {
    let whole = tokio::runtime::Runtime::new().unwrap();
    let bare = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build();
    let bare = bare.unwrap();
    let url = shared().url();
    let error = bare.block_on(Client::connect(&url)).unwrap_err();
    assert_eq!(error, Error::NoRuntime);
    let store = redlatch::Embedded::new();
    for made in [
        whole.block_on(Client::connect(&url)).unwrap(),
        Client::builder().connect_embedded(&store).unwrap(),
    ] {
        let lock = made.lock(&unique("timers"));
        let latch = made.count_down_latch(&unique("timers-latch"));
        let permits = made.semaphore(&unique("timers-permits"));
        let both = MultiLock::new([&lock]);
        let red = RedLock::new([&lock]);
        let me = Owner::new();
        let hold = || whole.block_on(lock.lock().owner(me).into_future());
        let (held, more) = (hold().unwrap(), hold().unwrap());
        bare.block_on(async {
            let second = Duration::from_secs(1);
            for error in [
                lock.lock().await.err(),
                lock.try_lock().await.err(),
                lock.try_lock().wait(second).await.err(),
                both.lock().await.err(),
                both.try_lock().wait(second).await.err(),
                red.try_lock().wait(second).await.err(),
                red.is_held_by(held.owner()).await.err(),
                latch.try_wait().wait(second).await.err(),
                permits.acquire().await.err(),
            ] {
                assert_eq!(error, Some(Error::NoRuntime));
            }
            // Must succeed or return an error, but not panic.
            let _ = lock.is_locked().await;
            let _ = both.is_held_by(held.owner()).await;
            poll_until(pin!(held.lost()), tokio::task::yield_now()).await;
            assert_eq!(held.run(async { 7 }).await.unwrap(), 7);
            poll_until(pin!(held.asked()), tokio::task::yield_now()).await;
            let work = tokio::task::yield_now();
            assert_eq!(held.run_until_asked(work).await.unwrap(), Some(()));
            // Whatever cannot be released in this runtime is released in the other one.
            let _ = more.unlock().await;
            drop(held);
        });
        whole.block_on(async {
            free(done("released", lock.lock()).await).await;
        });
    }
}

/// A section is so long that its release asks the store before the lock passes on, which needs a timer. Without one, the lock is
/// released.
#[test]
fn long_section_is_released_in_runtime_without_timers() {
    let whole = threaded_runtime();
    let bare = tokio::runtime::Builder::new_current_thread().build();
    let bare = bare.unwrap();
    let client = Client::embedded();
    let lock = client.lock("a");
    let guard = held_in(&whole, lock.clone());
    let waiter = whole.block_on(waiter_of(&client, lock.lock()));
    std::thread::sleep(Duration::from_millis(20));
    let _ = bare.block_on(guard.unlock());
    whole.block_on(async {
        free(joined("acquired", waiter).await).await;
    });
}

/// Nothing panics in a runtime without sockets.
#[test]
fn runtime_without_sockets_causes_error() {
    let whole = tokio::runtime::Runtime::new().unwrap();
    let bare = runtime_without_sockets();
    let server = Server::start();
    let error = bare.block_on(Client::connect(&server.url())).unwrap_err();
    assert_eq!(error, Error::NoRuntime);
    let client = whole.block_on(Client::connect(&server.url())).unwrap();
    let lock = client.lock("sockets");
    drop(whole);
    // The connection ended with its runtime, and this runtime cannot open a new one.
    let error = bare.block_on(lock.try_lock().into_future()).unwrap_err();
    assert_eq!(error, Error::NoRuntime);
    // The embedded store needs no sockets.
    let lock = Client::embedded().lock("sockets");
    let guard = bare.block_on(lock.lock().into_future()).unwrap();
    bare.block_on(guard.unlock()).unwrap();
}

/// Feared: the task that watches a deployment runs where it reaches no server, and no other one is started.
#[test]
fn deployment_is_watched_from_a_runtime_with_sockets() {
    let (bare, whole) = (runtime_without_sockets(), threaded_runtime());
    for url in [shared_sentinels().url(), shared_cluster().url()] {
        let client = whole.block_on(async { Client::builder().connect_lazy(&url) });
        let client = client.unwrap();
        let lock = client.lock(&unique("sockets"));
        let error = bare.block_on(lock.try_lock().into_future()).err();
        assert_eq!(error, Some(Error::NoRuntime));
        assert_eq!(bare.block_on(client.ping()).err(), Some(Error::NoRuntime));
        whole.block_on(async { free(held(&lock).await).await });
    }
}
