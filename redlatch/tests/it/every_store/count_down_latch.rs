//! Tests of the count-down latch, on every store and under faults.

use std::sync::atomic::Ordering::SeqCst;

use redlatch::CountDownLatch;

use crate::common::prelude::*;

async fn set(client: &Client, what: &str, count: u32) -> CountDownLatch {
    let latch = client.count_down_latch(&unique(what));
    assert!(latch.try_set_count(count).await.unwrap());
    latch
}

/// The same for a test on a store, whose waiters must be woken by messages.
async fn set_on(store: &TestStore, what: &str, count: u32) -> (Client, CountDownLatch) {
    let client = store.client_without_retries().await;
    let latch = set(&client, what, count).await;
    (client, latch)
}

fn waiting(latch: &CountDownLatch) -> tokio::task::JoinHandle<redlatch::Result<()>> {
    let latch = latch.clone();
    tokio::spawn(async move { latch.wait().await })
}

/// Returns whether the latch opens within a short wait.
async fn opens_soon(latch: &CountDownLatch) -> bool {
    let wait = Duration::from_millis(30);
    retry_if_late(|| latch.try_wait().wait(wait).into_future()).await
}

/// Runs each request once. Returns their errors.
async fn errors_of_each_request(latch: &CountDownLatch) -> [Option<Error>; 7] {
    [
        latch.try_set_count(1).await.err(),
        latch.count_down().await.err(),
        latch.count_down_by(0).await.err(),
        latch.count().await.err(),
        latch.wait().await.err(),
        latch.try_wait().wait(LONG).await.err(),
        latch.delete().await.err(),
    ]
}

fn channel(latch: &CountDownLatch) -> String {
    format!("redisson_countdownlatch__channel__{{{}}}", latch.name())
}

on_every_store! {
    a_latch_is_set_once,
    counting_down,
    counting_down_an_open_latch_leaves_nothing_behind,
    counting_by_many,
    waiting_until_zero,
    waiting_with_a_limit,
    deleting_a_latch_wakes_all_waiters,
    a_latch_can_be_used_again,
    setting_a_latch_again_blocks_later_waiters,
    a_thousand_waiters_of_one_latch,
    counted_from_many_clients,
    invalid_counts_and_names_are_rejected,
    dropped_everywhere,
    dropped_count_down_completes,
}

async fn a_latch_is_set_once(store: TestStore) {
    let client = store.client_without_retries().await;
    let latch = client.count_down_latch(&unique("set"));
    assert_eq!(latch.count().await.unwrap(), 0);
    assert!(latch.try_set_count(1).await.unwrap());
    assert!(!latch.try_set_count(2).await.unwrap());
    assert_eq!(latch.count().await.unwrap(), 1);
    assert!(latch.delete().await.unwrap());
    assert!(!latch.delete().await.unwrap());
    assert!(latch.try_set_count(u32::MAX).await.unwrap());
    assert_eq!(latch.count().await.unwrap(), u64::from(u32::MAX));
}

async fn counting_down(store: TestStore) {
    let (client, latch) = set_on(&store, "counting", 2).await;
    assert_eq!(latch.count_down().await.unwrap(), 1);
    assert_eq!(latch.count().await.unwrap(), 1);
    for _ in 0..3 {
        assert_eq!(latch.count_down().await.unwrap(), 0);
        assert_eq!(latch.count().await.unwrap(), 0);
        done("open", latch.wait()).await;
    }
    // A latch that was never set is open.
    let never = client.count_down_latch(&unique("never"));
    done("open", never.wait()).await;
    assert!(never.try_wait().await.unwrap());
    assert_eq!(client.status().subscriptions, 0);
}

async fn counting_down_an_open_latch_leaves_nothing_behind(store: TestStore) {
    let client = store.client_without_retries().await;
    let latch = client.count_down_latch(&unique("open"));
    assert_eq!(latch.count_down().await.unwrap(), 0);
    assert_eq!(latch.count_down_by(7).await.unwrap(), 0);
    assert!(!latch.delete().await.unwrap(), "a key was created");
    assert!(latch.try_set_count(1).await.unwrap());
    assert_eq!(latch.count().await.unwrap(), 1);
}

async fn counting_by_many(store: TestStore) {
    let (client, latch) = set_on(&store, "by-many", 10).await;
    let waiter = waiting(&latch);
    until_subscribed(&client, 1).await;
    assert_eq!(latch.count_down_by(0).await.unwrap(), 10);
    assert_eq!(latch.count_down_by(4).await.unwrap(), 6);
    assert!(!waiter.is_finished());
    // Counts down by more than the remaining count: the latch opens, and the waiter is notified.
    assert_eq!(latch.count_down_by(u32::MAX).await.unwrap(), 0);
    joined("open", waiter).await;
    assert!(latch.try_set_count(1).await.unwrap(), "nothing was left");
}

async fn waiting_until_zero(store: TestStore) {
    let [client, other] = store.clients_without_retries().await;
    let latch = set(&client, "waits", 5).await;
    let waited = other.count_down_latch(latch.name());
    let waiters = [(); 5].map(|()| waiting(&waited));
    until_subscribed(&other, 1).await;
    for left in (1..5).rev() {
        assert_eq!(latch.count_down().await.unwrap(), left);
        assert!(waiters.iter().all(|waiter| !waiter.is_finished()));
    }
    assert_eq!(latch.count_down().await.unwrap(), 0);
    joined_all("woken", waiters).await;
    until_subscribed(&other, 0).await;
}

async fn waiting_with_a_limit(store: TestStore) {
    let (client, latch) = set_on(&store, "limit", 1).await;
    assert!(!latch.try_wait().await.unwrap());
    assert!(!opens_soon(&latch).await);
    let limited = latch.clone();
    let limited = tokio::spawn(async move { limited.try_wait().wait(LONG).await });
    until_subscribed(&client, 1).await;
    latch.count_down().await.unwrap();
    assert!(joined("woken", limited).await);
    assert!(latch.try_wait().wait(Duration::MAX).await.unwrap());
}

async fn deleting_a_latch_wakes_all_waiters(store: TestStore) {
    let [client, other] = store.clients_without_retries().await;
    let latch = set(&client, "deleted", 5).await;
    let waiter = waiting(&other.count_down_latch(latch.name()));
    until_subscribed(&other, 1).await;
    assert!(latch.delete().await.unwrap());
    joined("woken", waiter).await;
}

async fn a_latch_can_be_used_again(store: TestStore) {
    let [client, other] = store.clients_without_retries().await;
    let latch = client.count_down_latch(&unique("again"));
    for _ in 0..20 {
        assert!(latch.try_set_count(2).await.unwrap());
        let waiter = waiting(&other.count_down_latch(latch.name()));
        latch.count_down().await.unwrap();
        latch.count_down().await.unwrap();
        joined("open", waiter).await;
    }
}

async fn setting_a_latch_again_blocks_later_waiters(store: TestStore) {
    let (client, latch) = set_on(&store, "later", 1).await;
    let first = waiting(&latch);
    until_subscribed(&client, 1).await;
    latch.count_down().await.unwrap();
    joined("open", first).await;
    assert!(latch.try_set_count(1).await.unwrap());
    assert!(!opens_soon(&latch).await);
    latch.count_down().await.unwrap();
    assert!(latch.try_wait().wait(LONG).await.unwrap());
}

async fn a_thousand_waiters_of_one_latch(store: TestStore) {
    const WAITERS: usize = 1000;
    let [client, other] = store.clients_without_retries().await;
    let latch = set(&client, "thousand", 1).await;
    let begun = Arc::new(AtomicUsize::new(0));
    let waiters = spawn_each(0..WAITERS, |_| {
        let (latch, begun) = (other.count_down_latch(latch.name()), begun.clone());
        async move {
            begun.fetch_add(1, SeqCst);
            latch.wait().await
        }
    });
    until("all have begun", async || {
        begun.load(SeqCst) == WAITERS && other.status().subscriptions == 1
    })
    .await;
    if let TestStore::Server(server) = &store {
        until_subscribed_once(server, &channel(&latch)).await;
    }
    latch.count_down().await.unwrap();
    joined_all("woken", waiters).await;
    until_subscribed(&other, 0).await;
}

async fn counted_from_many_clients(store: TestStore) {
    const TASKS: u32 = 60;
    let clients: [Client; 3] = store.clients_without_retries().await;
    let latch = set(&clients[0], "many", TASKS).await;
    let (through, counted) = <(Arc<AtomicUsize>, Arc<AtomicUsize>)>::default();
    let tasks = spawn_each(0..TASKS as usize, |n| {
        let latch = clients[n % 3].count_down_latch(latch.name());
        let (through, counted) = (through.clone(), counted.clone());
        async move {
            counted.fetch_add(1, SeqCst);
            latch.count_down().await.unwrap();
            latch.wait().await.unwrap();
            assert_eq!(counted.load(SeqCst), TASKS as usize, "opened too early");
            through.fetch_add(1, SeqCst);
        }
    });
    done_all("through", tasks).await;
    assert_eq!(through.load(SeqCst), TASKS as usize);
    assert!(!latch.delete().await.unwrap());
}

async fn invalid_counts_and_names_are_rejected(store: TestStore) {
    let client = store.client_without_retries().await;
    let latch = client.count_down_latch(&unique("zero"));
    let error = latch.try_set_count(0).await.unwrap_err();
    assert_matches!(error, Error::InvalidCount { .. });
    assert!(!latch.delete().await.unwrap(), "created by an error");
    for name in ["", "a\nb", &"x".repeat(513)] {
        let latch = client.count_down_latch(name);
        for error in errors_of_each_request(&latch).await {
            assert!(matches!(error, Some(Error::InvalidName { .. })), "{name:?}");
        }
    }
}

/// A waiter may be dropped at every await point; the waiters behind it are woken nevertheless.
async fn dropped_everywhere(store: TestStore) {
    let settings = Client::builder()
        .watchdog_lease(10 * LONG)
        .subscription_linger(Duration::from_millis(1));
    let client = store.client_with(settings).await;
    let latch = client.count_down_latch(&unique("dropped"));
    for polls in 1..20 {
        assert!(latch.try_set_count(1).await.unwrap());
        let after = {
            let mut gone = pin!(poll_up_to(polls, latch.wait()));
            let queued = until("it is queued", async || client.status().subscriptions == 1);
            tokio::select! {
                biased;
                gone = &mut gone => assert!(gone.is_none(), "closed"),
                () = queued => {}
            }
            waiting(&latch)
        };
        latch.count_down().await.unwrap();
        joined("woken", after).await;
        until_subscribed(&client, 0).await;
        assert_eq!(client.status().background, 0);
    }
}

async fn dropped_count_down_completes(store: TestStore) {
    let (client, latch) = set_on(&store, "dropped-count", 1000).await;
    let mut expected = 1000;
    for polls in 1.. {
        let counted = poll_up_to(polls, latch.count_down()).await;
        expected -= 1;
        within_limit("settled", client.flush()).await;
        assert_eq!(latch.count().await.unwrap(), expected);
        if counted.is_some() {
            break;
        }
    }
}

/// Failure catalogue F6: the last count-down comes after each await point of the waiter in turn; in
/// every state, the waiter is woken. Its periodic check comes only after the watchdog lease, which
/// would be too late.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn count_down_between_any_two_polls_wakes_waiter() {
    let store = TestStore::server();
    let [client, other] = store.clients_without_retries().await;
    for polls in 1..30 {
        // Uses a new channel each time, which is not subscribed to yet.
        let latch = client.count_down_latch(&unique("heard"));
        let same = other.count_down_latch(latch.name());
        assert!(same.try_set_count(1).await.unwrap());
        let mut waiter = latch.wait().into_future();
        poll_until_subscribed(polls, &mut waiter, &channel(&latch)).await;
        // The connection keeps order: everything that the waiter has sent so far has been answered.
        assert_eq!(latch.count().await.unwrap(), 1);
        assert_eq!(same.count_down().await.unwrap(), 0);
        done("woken, not slept through", waiter).await;
    }
}

/// F6, across a reconnection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn count_down_during_disconnect_is_noticed() {
    let (server, proxy) = proxied_server();
    let counter = Client::connect(&server.url()).await.unwrap();
    let client = connect(Client::builder().watchdog_lease(10 * LONG), &proxy.url()).await;
    let latch = counter.count_down_latch("a");
    for round in 0..10 {
        assert!(latch.try_set_count(1).await.unwrap());
        let waiter = waiting(&client.count_down_latch("a"));
        until("it waits", async || channels(&server) > 0).await;
        if round % 2 == 0 {
            proxy.stall(true);
            latch.count_down().await.unwrap();
            proxy.stall(false);
            proxy.cut();
        } else {
            cut_off(&proxy);
            latch.count_down().await.unwrap();
            proxy.refuse(false);
        }
        joined("seen", waiter).await;
    }
}

/// A request that was sent but not answered is reported, and never counted twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unknown_outcome_is_reported_and_not_repeated() {
    let (_server, proxy, client) = proxied_client().await;
    let latch = set(&client, "unknown", 100).await;
    let mut expected = latch.count_down().await.unwrap();
    for _ in 0..10 {
        let counted = with_lost_answer(&proxy, latch.count_down()).await;
        assert_matches!(counted, Err(Error::OutcomeUnknown { .. }));
        expected -= 1;
        assert_eq!(latch.count().await.unwrap(), expected);
    }
}

/// A request without an answer is not repeated: other clients may have counted the latch down, or
/// set it, in the meantime.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_answer_does_not_set_or_delete_the_latch_twice() {
    let (server, proxy, client) = proxied_client().await;
    let direct = Client::connect(&server.url()).await.unwrap();
    // From here on, the server knows the scripts.
    let (latch, seen) = (client.count_down_latch("a"), direct.count_down_latch("a"));
    assert!(seen.try_set_count(1).await.unwrap());
    assert!(seen.delete().await.unwrap());

    let open = async { assert_eq!(seen.count_down().await.unwrap(), 0) };
    let error = with_lost_answer_after(&proxy, latch.try_set_count(1), open).await;
    assert_matches!(error, Err(Error::OutcomeUnknown { .. }));
    assert_eq!(latch.count().await.unwrap(), 0);

    assert!(seen.try_set_count(1).await.unwrap());
    let set = async { assert!(seen.try_set_count(2).await.unwrap()) };
    let error = with_lost_answer_after(&proxy, latch.delete(), set).await;
    assert_matches!(error, Err(Error::OutcomeUnknown { .. }));
    assert_eq!(latch.count().await.unwrap(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_and_messages_match_redisson() {
    let server = shared();
    let client = Client::connect(&server.url()).await.unwrap();
    // This channel has its own braces around a name that already contains braces.
    let latch = client.count_down_latch(&format!("{{{}}}:x", unique("layout")));
    let messages = messages(server, &channel(&latch));
    latch.try_set_count(2).await.unwrap();
    assert_eq!(server.command::<String>(&["GET", latch.name()]), "2");
    latch.count_down().await.unwrap();
    assert_eq!(server.command::<String>(&["GET", latch.name()]), "1");
    latch.count_down().await.unwrap();
    assert_eq!(server.command::<i64>(&["EXISTS", latch.name()]), 0);
    // Publishes nothing: the latch is already open.
    latch.count_down().await.unwrap();
    latch.try_set_count(2).await.unwrap();
    latch.delete().await.unwrap();
    let received = [(); 4].map(|()| messages.recv_timeout(LONG).unwrap());
    assert_eq!(received, ["1", "0", "1", "0"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn foreign_keys_stay_unchanged() {
    let server = shared();
    let client = Client::connect(&server.url()).await.unwrap();
    let (text, hash) = (unique("foreign"), unique("foreign-hash"));
    let () = server.command(&["SET", &text, "precious"]);
    let _: i64 = server.command(&["HSET", &hash, "a", "1"]);
    for name in [&text, &hash] {
        let before: Vec<u8> = server.command(&["DUMP", name]);
        let latch = client.count_down_latch(name);
        for error in errors_of_each_request(&latch).await {
            assert_matches!(error, Some(Error::WrongKind { .. }));
        }
        assert_eq!(server.command::<Vec<u8>>(&["DUMP", name]), before);
    }
    let said = client.count_down_latch(&text).count().await.unwrap_err();
    assert!(said.to_string().contains("not an integer"), "{said}");
}

/// A count of zero or less, as Redisson's `trySetCount(0)` leaves it, is an open latch like any
/// other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_latch_at_zero_can_be_set() {
    let client = Client::connect(&shared().url()).await.unwrap();
    for number in ["0", "-3"] {
        let latch = client.count_down_latch(&unique("at-zero"));
        let _: String = shared().command(&["SET", latch.name(), number]);
        done("open", latch.wait()).await;
        assert!(latch.try_set_count(2).await.unwrap(), "{number}");
        assert!(!latch.try_set_count(5).await.unwrap(), "{number}");
        assert_eq!(latch.count().await.unwrap(), 2, "{number}");
    }
}

/// A key that is deleted by hand causes no message: the waiter notices it once per watchdog lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silently_deleted_key_is_noticed() {
    let server = Server::start();
    let settings = Client::builder().watchdog_lease(Duration::from_millis(200));
    let client = settings.connect(&server.url()).await.unwrap();
    let latch = set(&client, "vanishes", 1).await;
    let waiter = waiting(&latch);
    until_subscribed(&client, 1).await;
    let _: i64 = server.command(&["DEL", latch.name()]);
    joined("found gone", waiter).await;
}

#[tokio::test(start_paused = true)]
async fn time_limits_are_kept() {
    let [client, other] = embedded_clients();
    let latch = client.count_down_latch("a");
    latch.try_set_count(1).await.unwrap();
    let begun = tokio::time::Instant::now();
    assert!(!latch.try_wait().wait(3600 * SECOND).await.unwrap());
    assert_took(begun.elapsed(), 3600 * SECOND..3601 * SECOND);
    let waiter = waiting(&latch);
    tokio::time::sleep(3600 * SECOND).await;
    assert!(!waiter.is_finished());
    let begun = tokio::time::Instant::now();
    other.count_down_latch("a").count_down().await.unwrap();
    waiter.await.unwrap().unwrap();
    let woken = begun.elapsed();
    assert_eq!(woken, Duration::ZERO, "by the message, not by a retry");
}

#[test]
fn threads_wait_for_each_other() {
    let clients = [
        redlatch::blocking::Client::connect(&shared().url()).unwrap(),
        redlatch::blocking::Client::embedded().unwrap(),
    ];
    for client in clients {
        let latch = client.count_down_latch(&unique("threads"));
        assert!(latch.try_set_count(9).unwrap());
        let wait = Duration::from_millis(10);
        let opened = retry_if_late_blocking(|| latch.try_wait().wait(wait).block());
        assert!(!opened);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    latch.count_down().unwrap();
                    latch.wait().block().unwrap();
                    assert_eq!(latch.count().unwrap(), 0);
                });
            }
            latch.count_down_by(1).unwrap();
            assert!(latch.try_wait().wait(LONG).block().unwrap());
        });
        assert!(!latch.delete().unwrap());
    }
}
