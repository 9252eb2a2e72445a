//! Tests of the semaphore, on every store and under faults.

mod in_virtual_time;
mod on_a_server;

use std::sync::atomic::{AtomicI64, Ordering::SeqCst};

use crate::common::prelude::*;

const MOST: u32 = i32::MAX as u32;

async fn set(client: &Client, what: &str, permits: u32) -> Semaphore {
    let semaphore = client.semaphore(&unique(what));
    assert!(semaphore.try_set_permits(permits).await.unwrap());
    semaphore
}

/// The same for a test on a store, whose waiters must be woken by messages.
async fn set_on(store: &TestStore, what: &str, permits: u32) -> (Client, Semaphore) {
    let client = store.client_without_retries().await;
    let semaphore = set(&client, what, permits).await;
    (client, semaphore)
}

/// Acquires permits and releases them.
async fn pass(semaphore: &Semaphore, permits: u32) {
    let permits = semaphore.acquire_many(permits).await.unwrap();
    permits.release().await.unwrap();
}

/// Runs each request once. Returns their errors.
async fn errors_of_each_request(semaphore: &Semaphore) -> [Option<Error>; 9] {
    [
        semaphore.try_set_permits(1).await.err(),
        semaphore.acquire().await.err(),
        semaphore.try_acquire().wait(LONG).await.err(),
        semaphore.release(1).await.err(),
        semaphore.release_if_exists(1).await.err(),
        semaphore.add_permits(-1).await.err(),
        semaphore.drain().await.err(),
        semaphore.available().await.err(),
        semaphore.delete().await.err(),
    ]
}

on_every_store! {
    permits_are_set_once,
    permits_are_counted,
    acquiring_zero_permits_succeeds_immediately,
    permits_released_without_being_set_can_be_acquired,
    permits_can_be_reduced_below_zero,
    reduced_semaphore_fills_up_first,
    draining_acquires_all_available_permits,
    release_requires_an_existing_semaphore,
    time_to_live_ends_and_survives_changes,
    guards_release_exactly_once_in_every_way,
    released_guard_does_not_recreate_a_semaphore,
    permits_do_not_go_to_the_next_semaphore,
    adding_zero_permits_creates_nothing,
    wait_limits_are_kept,
    waiter_for_many_permits_is_served_once_they_are_free,
    every_way_to_add_permits_wakes_a_waiter,
    small_requests_do_not_overtake_big_ones,
    first_come_first_served,
    one_message_serves_as_many_waiters_as_possible,
    acquired_permits_never_exceed_the_total,
    waiters_for_hundreds_of_names_are_all_served,
    invalid_numbers_are_rejected,
    invalid_names_are_rejected,
    dropped_everywhere,
    dropped_while_permits_come,
    dropped_release_completes,
}

async fn permits_are_set_once(store: TestStore) {
    let client = store.client_without_retries().await;
    let semaphore = client.semaphore(&unique("set"));
    assert_eq!(semaphore.available().await.unwrap(), 0);
    assert!(semaphore.try_set_permits(10).await.unwrap());
    assert!(!semaphore.try_set_permits(15).await.unwrap());
    assert_eq!(semaphore.available().await.unwrap(), 10);
    // An exhausted semaphore still counts as set (failure catalogue F22).
    assert_eq!(semaphore.drain().await.unwrap(), 10);
    assert!(!semaphore.try_set_permits(15).await.unwrap());
    assert!(semaphore.delete().await.unwrap());
    assert!(!semaphore.delete().await.unwrap());
    assert!(semaphore.try_set_permits(0).await.unwrap());
    assert!(!semaphore.try_set_permits(1).await.unwrap());
}

async fn permits_are_counted(store: TestStore) {
    let (client, semaphore) = set_on(&store, "counted", 10).await;
    let one = semaphore.acquire().await.unwrap();
    assert_eq!((one.permits(), one.name()), (1, semaphore.name()));
    assert_eq!(semaphore.available().await.unwrap(), 9);
    one.release().await.unwrap();
    let five = semaphore.acquire_many(5).await.unwrap();
    assert_eq!(semaphore.available().await.unwrap(), 5);
    assert!(semaphore.try_acquire_many(6).await.unwrap().is_none());
    let rest = semaphore.try_acquire_many(5).await.unwrap().unwrap();
    assert!(semaphore.try_acquire().await.unwrap().is_none());
    five.release().await.unwrap();
    rest.release().await.unwrap();
    assert_eq!(semaphore.available().await.unwrap(), 10);
    assert_idle(&client);
}

async fn acquiring_zero_permits_succeeds_immediately(store: TestStore) {
    let client = store.client_without_retries().await;
    let semaphore = client.semaphore(&unique("zero"));
    let none = semaphore.try_acquire_many(0).wait(10 * LONG).await;
    let none = done("at once", async { none }).await.unwrap();
    assert_eq!(none.permits(), 0);
    none.release().await.unwrap();
    drop(semaphore.acquire_many(0).await.unwrap());
    assert!(!semaphore.release_if_exists(0).await.unwrap());
    semaphore.release(0).await.unwrap();
    assert_eq!(semaphore.available().await.unwrap(), 0);
    assert_idle(&client);
}

async fn permits_released_without_being_set_can_be_acquired(store: TestStore) {
    let client = store.client_without_retries().await;
    let semaphore = client.semaphore(&unique("unset"));
    semaphore.release(1).await.unwrap();
    semaphore.release(1).await.unwrap();
    assert_eq!(semaphore.available().await.unwrap(), 2);
    let both = within_limit("both", semaphore.acquire_many(2)).await;
    both.unwrap().forget();
    assert_eq!(semaphore.available().await.unwrap(), 0);
}

async fn permits_can_be_reduced_below_zero(store: TestStore) {
    let (_client, semaphore) = set_on(&store, "reduced", 10).await;
    semaphore.acquire_many(10).await.unwrap().forget();
    semaphore.add_permits(-5).await.unwrap();
    assert_eq!(semaphore.available().await.unwrap(), -5);
    assert!(semaphore.try_acquire().await.unwrap().is_none());
    semaphore.release(10).await.unwrap();
    assert_eq!(semaphore.available().await.unwrap(), 5);
    semaphore.add_permits(4).await.unwrap();
    assert_eq!(semaphore.available().await.unwrap(), 9);
}

async fn reduced_semaphore_fills_up_first(store: TestStore) {
    let (_client, semaphore) = set_on(&store, "fills-up", 1).await;
    let held = semaphore.acquire().await.unwrap();
    semaphore.add_permits(-1).await.unwrap();
    held.release().await.unwrap();
    assert!(semaphore.try_acquire().await.unwrap().is_none());
    semaphore.release(1).await.unwrap();
    assert!(semaphore.try_acquire().await.unwrap().is_some());
}

async fn draining_acquires_all_available_permits(store: TestStore) {
    let client = store.client_without_retries().await;
    let semaphore = client.semaphore(&unique("drain"));
    assert_eq!(semaphore.drain().await.unwrap(), 0);
    // Draining it does not create it.
    assert!(semaphore.try_set_permits(10).await.unwrap());
    let three = semaphore.acquire_many(3).await.unwrap();
    assert_eq!(semaphore.drain().await.unwrap(), 7);
    assert_eq!(semaphore.available().await.unwrap(), 0);
    three.release().await.unwrap();
    assert_eq!(semaphore.available().await.unwrap(), 3);
    semaphore.add_permits(-5).await.unwrap();
    assert_eq!(semaphore.drain().await.unwrap(), -2);
    assert_eq!(semaphore.available().await.unwrap(), 0);
}

async fn release_requires_an_existing_semaphore(store: TestStore) {
    let client = store.client_without_retries().await;
    let semaphore = client.semaphore(&unique("if-exists"));
    assert!(!semaphore.release_if_exists(3).await.unwrap());
    assert!(semaphore.try_set_permits(1).await.unwrap());
    assert!(semaphore.release_if_exists(3).await.unwrap());
    assert_eq!(semaphore.available().await.unwrap(), 4);
}

async fn time_to_live_ends_and_survives_changes(store: TestStore) {
    let client = store.client_without_retries().await;
    let semaphore = client.semaphore(&unique("ttl"));
    let begun = std::time::Instant::now();
    let set = semaphore.try_set_permits(3).time_to_live(SHORT);
    assert!(set.await.unwrap());
    pass(&semaphore, 2).await;
    semaphore.add_permits(1).await.unwrap();
    semaphore.drain().await.unwrap();
    semaphore.release(2).await.unwrap();
    until("it ends", async || {
        semaphore.available().await.unwrap() == 0
    })
    .await;
    assert!(begun.elapsed() >= SHORT);
    assert!(semaphore.try_set_permits(1).await.unwrap());
}

async fn guards_release_exactly_once_in_every_way(store: TestStore) {
    let (client, semaphore) = set_on(&store, "guards", 7).await;
    drop(semaphore.acquire_many(7).await.unwrap());
    within_limit("settled", client.flush()).await;
    assert_eq!(semaphore.available().await.unwrap(), 7);
    pass(&semaphore, 4).await;
    within_limit("settled", client.flush()).await;
    assert_eq!(semaphore.available().await.unwrap(), 7);
    semaphore.acquire_many(4).await.unwrap().forget();
    within_limit("settled", client.flush()).await;
    assert_eq!(semaphore.available().await.unwrap(), 3);
    assert_idle(&client);
}

async fn released_guard_does_not_recreate_a_semaphore(store: TestStore) {
    let (client, semaphore) = set_on(&store, "gone", 5).await;
    let one = semaphore.acquire().await.unwrap();
    let two = semaphore.acquire().await.unwrap();
    assert!(semaphore.delete().await.unwrap());
    one.release().await.unwrap();
    drop(two);
    within_limit("settled", client.flush()).await;
    assert!(!semaphore.delete().await.unwrap(), "created again");
}

/// Permits of a semaphore whose time to live has ended do not count in the semaphore that was set
/// afterwards.
async fn permits_do_not_go_to_the_next_semaphore(store: TestStore) {
    let client = store.client_without_retries().await;
    let semaphore = client.semaphore(&unique("next"));
    let set = |lives| semaphore.try_set_permits(3).time_to_live(lives);
    assert!(set(SHORT).await.unwrap());
    let released = semaphore.acquire_many(2).await.unwrap();
    let dropped = semaphore.acquire().await.unwrap();
    until("set anew", async || set(LONG).await.unwrap()).await;
    released.release().await.unwrap();
    drop(dropped);
    within_limit("settled", client.flush()).await;
    assert_eq!(semaphore.available().await.unwrap(), 3, "over the total");
    // Its own permits do.
    pass(&semaphore, 2).await;
    drop(semaphore.acquire_many(3).await.unwrap());
    within_limit("settled", client.flush()).await;
    assert_eq!(semaphore.available().await.unwrap(), 3);
    assert_idle(&client);
}

/// Redisson's `release(0)` does nothing either. It would otherwise create an exhausted semaphore,
/// which could not be set.
async fn adding_zero_permits_creates_nothing(store: TestStore) {
    let client = store.client_without_retries().await;
    let semaphore = client.semaphore(&unique("nothing"));
    semaphore.release(0).await.unwrap();
    semaphore.add_permits(0).await.unwrap();
    assert!(!semaphore.release_if_exists(0).await.unwrap());
    assert!(semaphore.try_set_permits(3).await.unwrap());
    assert!(semaphore.release_if_exists(0).await.unwrap());
    semaphore.release(0).await.unwrap();
    assert_eq!(semaphore.available().await.unwrap(), 3);
    let nameless = client.semaphore("");
    assert_matches!(nameless.release(0).await, Err(Error::InvalidName { .. }));
}

async fn wait_limits_are_kept(store: TestStore) {
    let [client, other] = store.clients_without_retries().await;
    let semaphore = set(&client, "waits", 1).await;
    let held = semaphore.acquire().await.unwrap();
    let brief = Duration::from_millis(30);
    assert!(semaphore.try_acquire().wait(brief).await.unwrap().is_none());
    let waiting = other.semaphore(semaphore.name());
    let waiting = waiter_of(&other, waiting.try_acquire().wait(LONG)).await;
    held.release().await.unwrap();
    let permits = joined("woken", waiting).await.unwrap();
    assert!(semaphore.try_acquire().await.unwrap().is_none());
    permits.release().await.unwrap();
    until_subscribed(&client, 0).await;
    until_subscribed(&other, 0).await;
    assert_idle(&client);
}

/// Failure catalogue F21.
async fn waiter_for_many_permits_is_served_once_they_are_free(store: TestStore) {
    let [client, other] = store.clients_without_retries().await;
    let semaphore = set(&client, "many", 5).await;
    let first = semaphore.acquire_many(3).await.unwrap();
    let waiting = other.semaphore(semaphore.name());
    let waiting = waiter_of(&other, waiting.acquire_many(4)).await;
    semaphore.release(1).await.unwrap();
    // Three are free: not enough yet, however many messages arrive.
    assert_eq!(semaphore.available().await.unwrap(), 3);
    assert!(!waiting.is_finished());
    semaphore.release(1).await.unwrap();
    let four = joined("four are free", waiting).await;
    assert_eq!(semaphore.available().await.unwrap(), 0);
    drop(first);
    four.release().await.unwrap();
}

async fn every_way_to_add_permits_wakes_a_waiter(store: TestStore) {
    let client = store.client_without_retries().await;
    for way in 0..6 {
        let other = store.client_without_retries().await;
        let semaphore = client.semaphore(&unique("ways"));
        let held = match way {
            // Waiters also wait for permits that were never set.
            0 => None,
            _ => {
                assert!(semaphore.try_set_permits(2).await.unwrap());
                Some(semaphore.acquire_many(2).await.unwrap())
            }
        };
        let waiting = other.semaphore(semaphore.name());
        let waiting = waiter_of(&other, waiting.acquire_many(2)).await;
        match (way, held) {
            (0, _) => assert!(semaphore.try_set_permits(2).await.unwrap()),
            (1, Some(held)) => held.release().await.unwrap(),
            (2, Some(held)) => drop(held),
            (3, Some(held)) => {
                held.forget();
                semaphore.add_permits(2).await.unwrap();
            }
            (4, Some(held)) => {
                held.forget();
                assert!(semaphore.release_if_exists(2).await.unwrap());
            }
            (_, held) => {
                drop(held);
                semaphore.delete().await.unwrap();
                // Whether the guard's release or this call came first: in the end there are two
                // permits.
                client.flush().await;
                semaphore.try_set_permits(2).await.unwrap();
            }
        }
        joined("woken", waiting).await.forget();
    }
}

async fn small_requests_do_not_overtake_big_ones(store: TestStore) {
    let (client, semaphore) = set_on(&store, "big", 2).await;
    let one = semaphore.acquire().await.unwrap();
    let two = semaphore.acquire().await.unwrap();
    let big = waiter_of(&client, semaphore.acquire_many(2)).await;
    let small = tokio::spawn(semaphore.acquire().into_future());
    one.release().await.unwrap();
    // One permit is free, and a waiter that overtakes would have had every chance to.
    for _ in 0..100 {
        assert_eq!(semaphore.available().await.unwrap(), 1);
        assert!(!small.is_finished());
    }
    two.release().await.unwrap();
    let big = joined("the big one", big).await;
    assert!(!small.is_finished());
    big.release().await.unwrap();
    joined("the small one", small).await.forget();
}

/// Failure catalogue F23, in one process.
async fn first_come_first_served(store: TestStore) {
    const WAITERS: usize = 50;
    let (client, semaphore) = set_on(&store, "order", 1).await;
    let held = semaphore.acquire().await.unwrap();
    let served = Arc::new(Mutex::new(Vec::new()));
    let mut waiting = Vec::new();
    for n in 0..WAITERS {
        let (served, mut acquire) = (served.clone(), semaphore.acquire().into_future());
        // Queued before the next one starts: the first by subscribing, the others by being polled.
        let polled = poll_fn(|cx| Poll::Ready(acquire.as_mut().poll(cx).is_ready())).await;
        assert!(!polled, "held by another owner");
        let one = tokio::spawn(async move {
            let permit = acquire.await.unwrap();
            served.lock().unwrap().push(n);
            permit.release().await.unwrap();
        });
        if n == 0 {
            until_subscribed(&client, 1).await;
        }
        waiting.push(one);
    }
    held.release().await.unwrap();
    done_all("served", waiting).await;
    assert_eq!(*served.lock().unwrap(), Vec::from_iter(0..WAITERS));
}

/// No waiter waits for another message while there are permits left.
async fn one_message_serves_as_many_waiters_as_possible(store: TestStore) {
    let [client, other] = store.clients_without_retries().await;
    let semaphore = set(&client, "at-once", 5).await;
    let held = semaphore.acquire_many(5).await.unwrap();
    let same = other.semaphore(semaphore.name());
    let waiting = spawn_each(0..5, |_| same.acquire());
    until_subscribed(&other, 1).await;
    held.release().await.unwrap();
    let mut served = Vec::new();
    for one in waiting {
        served.push(joined("served", one).await);
    }
    assert_eq!(semaphore.available().await.unwrap(), 0);
    drop(served);
    within_limit("settled", other.flush()).await;
    assert_eq!(semaphore.available().await.unwrap(), 5);
}

async fn acquired_permits_never_exceed_the_total(store: TestStore) {
    const TOTAL: i64 = 5;
    let name = unique("total");
    let clients: [Client; 3] = store.clients_without_retries().await;
    let semaphore = clients[0].semaphore(&name);
    assert!(semaphore.try_set_permits(TOTAL as u32).await.unwrap());
    let (taken, most, rounds) = <(Arc<AtomicI64>, Arc<AtomicI64>, Arc<AtomicUsize>)>::default();
    let crowd = spawn_each(0..50usize, |n| {
        let semaphore = clients[n % 3].semaphore(&name);
        let (taken, most, rounds) = (taken.clone(), most.clone(), rounds.clone());
        async move {
            for round in 0..10usize {
                let wanted = ((n + round) % 3 + 1) as u32;
                let permits = semaphore.acquire_many(wanted).await.unwrap();
                let now = taken.fetch_add(wanted.into(), SeqCst) + i64::from(wanted);
                most.fetch_max(now, SeqCst);
                tokio::task::yield_now().await;
                taken.fetch_sub(wanted.into(), SeqCst);
                rounds.fetch_add(1, SeqCst);
                match round % 2 {
                    0 => permits.release().await.unwrap(),
                    _ => drop(permits),
                }
            }
        }
    });
    done_all("served", crowd).await;
    for client in &clients {
        within_limit("settled", client.flush()).await;
        assert_idle(client);
    }
    assert_eq!(rounds.load(SeqCst), 500);
    let most = most.load(SeqCst);
    assert!((1..=TOTAL).contains(&most), "{most} at once");
    assert_eq!(semaphore.available().await.unwrap(), TOTAL);
}

/// Failure catalogue F23: waiters for hundreds of names, in two clients.
async fn waiters_for_hundreds_of_names_are_all_served(store: TestStore) {
    const NAMES: usize = 300;
    let clients: [Client; 2] = store.clients_without_retries().await;
    let prefix = unique("hundreds");
    let mut waiting = Vec::new();
    let mut held = Vec::new();
    for n in 0..NAMES {
        let name = format!("{prefix}-{n}");
        let semaphore = clients[0].semaphore(&name);
        assert!(semaphore.try_set_permits(1).await.unwrap());
        held.push(semaphore.acquire().await.unwrap());
        for waiter in 0..4 {
            let semaphore = clients[waiter % 2].semaphore(&name);
            waiting.push(tokio::spawn(async move {
                semaphore.acquire().await.unwrap().release().await.unwrap();
            }));
        }
    }
    until("all wait", async || {
        let waiting = |client: &Client| client.status().subscriptions == NAMES;
        clients.iter().all(waiting)
    })
    .await;
    drop(held);
    done_all("served", waiting).await;
}

async fn invalid_numbers_are_rejected(store: TestStore) {
    let client = store.client_without_retries().await;
    let semaphore = client.semaphore(&unique("numbers"));
    for error in [
        semaphore.try_set_permits(MOST + 1).await.err(),
        semaphore.try_set_permits(u32::MAX).await.err(),
        semaphore.acquire_many(MOST + 1).await.err(),
        semaphore.try_acquire_many(u32::MAX).await.err(),
        semaphore.release(u32::MAX).await.err(),
        semaphore.release_if_exists(MOST + 1).await.err(),
    ] {
        assert_matches!(error, Some(Error::InvalidCount { .. }));
    }
    for lives in [Duration::ZERO, Duration::from_nanos(1), Duration::MAX] {
        let error = semaphore.try_set_permits(1).time_to_live(lives).await;
        assert!(matches!(error, Err(Error::InvalidLease { .. })));
    }
    assert!(!semaphore.delete().await.unwrap(), "created by an error");
    let long = semaphore.try_set_permits(MOST).time_to_live(MAX_LEASE);
    assert!(long.await.unwrap());
    // At the maximum: one more is rejected, and changes nothing.
    for error in [
        semaphore.release(1).await.err(),
        semaphore.add_permits(i32::MAX).await.err(),
        semaphore.release_if_exists(1).await.err(),
    ] {
        assert_matches!(error, Some(Error::InvalidCount { .. }));
    }
    assert_eq!(semaphore.available().await.unwrap(), i64::from(MOST));
    let all = semaphore.acquire_many(MOST).await.unwrap();
    assert_eq!(semaphore.available().await.unwrap(), 0);
    all.release().await.unwrap();
    // The same at the minimum.
    semaphore.add_permits(-i32::MAX).await.unwrap();
    semaphore.add_permits(-i32::MAX).await.unwrap();
    assert!(semaphore.add_permits(-1).await.is_err());
    assert!(semaphore.add_permits(i32::MIN).await.is_err());
    assert_eq!(semaphore.available().await.unwrap(), -i64::from(MOST));
}

async fn invalid_names_are_rejected(store: TestStore) {
    let client = store.client_without_retries().await;
    for name in ["", "a\nb", &"x".repeat(513)] {
        let semaphore = client.semaphore(name);
        assert_eq!(semaphore.name(), name);
        for error in errors_of_each_request(&semaphore).await {
            assert!(matches!(error, Some(Error::InvalidName { .. })), "{name:?}");
        }
    }
}

async fn dropped_everywhere(store: TestStore) {
    let (client, semaphore) = set_on(&store, "dropped", 3).await;
    crate::common::drop_after_each_poll(async |polls| {
        let permits = poll_up_to(polls, semaphore.acquire_many(2)).await;
        let through = permits.is_some();
        drop(permits);
        within_limit("settled", client.flush()).await;
        assert_eq!(semaphore.available().await.unwrap(), 3, "{polls} polls");
        through
    })
    .await;
    assert_idle(&client);
}

/// Dropped after each await point, while the permits that it waits for are released: permits that
/// it has acquired by then are returned.
async fn dropped_while_permits_come(store: TestStore) {
    let [client, other] = store.clients_without_retries().await;
    let semaphore = set(&client, "dropped-waiting", 2).await;
    let same = other.semaphore(semaphore.name());
    crate::common::drop_after_each_poll(async |polls| {
        let held = same.acquire_many(2).await.unwrap();
        let waiter = poll_up_to(polls, semaphore.acquire_many(2));
        let permits = beside_release(waiter, held.release()).await;
        let through = permits.is_some();
        drop(permits);
        within_limit("settled", client.flush()).await;
        assert_eq!(semaphore.available().await.unwrap(), 2, "{polls} polls");
        through
    })
    .await;
    assert_idle(&client);
}

async fn dropped_release_completes(store: TestStore) {
    let (client, semaphore) = set_on(&store, "dropped-release", 2).await;
    for polls in 0.. {
        let permits = semaphore.acquire_many(2).await.unwrap();
        let mut release = Box::pin(permits.release());
        let released = match polls {
            // Not started at all.
            0 => None,
            polls => poll_up_to(polls, &mut release).await,
        };
        drop(release);
        within_limit("settled", client.flush()).await;
        assert_eq!(semaphore.available().await.unwrap(), 2, "{polls} polls");
        if released.is_some() {
            break;
        }
    }
    // The same for permits without a guard, once the release has started.
    let mut expected = 2;
    for polls in 1.. {
        let released = poll_up_to(polls, semaphore.release(1)).await;
        expected += 1;
        within_limit("settled", client.flush()).await;
        assert_eq!(semaphore.available().await.unwrap(), expected);
        if released.is_some() {
            break;
        }
    }
}

#[test]
fn guards_can_outlive_their_runtime() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let client = runtime.block_on(Client::connect(&shared().url())).unwrap();
    let semaphore = client.semaphore(&unique("outlives"));
    let permits = runtime.block_on(async {
        semaphore.try_set_permits(1).await.unwrap();
        semaphore.acquire().await.unwrap()
    });
    drop(runtime);
    // There is no runtime to release it in: this is logged, and does not panic.
    drop(permits);
}

mod blocking {
    use super::*;

    #[test]
    fn threads_share_permits() {
        let clients = [
            redlatch::blocking::Client::connect(&shared().url()).unwrap(),
            redlatch::blocking::Client::embedded().unwrap(),
        ];
        for client in clients {
            let semaphore = client.semaphore(&unique("threads"));
            assert!(semaphore.try_set_permits(2).block().unwrap());
            let inside = AtomicI64::new(0);
            std::thread::scope(|scope| {
                for _ in 0..8 {
                    scope.spawn(|| {
                        for _ in 0..20 {
                            let permit = semaphore.acquire().block().unwrap();
                            assert!(inside.fetch_add(1, SeqCst) < 2, "three at once");
                            inside.fetch_sub(1, SeqCst);
                            permit.release().unwrap();
                        }
                    });
                }
            });
            let both = semaphore.acquire_many(2).block().unwrap();
            assert_eq!((both.permits(), both.name()), (2, semaphore.name()));
            assert!(semaphore.try_acquire().block().unwrap().is_none());
            assert!(semaphore.try_acquire_many(2).block().unwrap().is_none());
            let brief = Duration::from_millis(10);
            let limited = semaphore.try_acquire().wait(brief).block();
            assert!(limited.unwrap().is_none());
            // Another thread may release permits that this one acquired.
            std::thread::scope(|scope| {
                scope.spawn(move || drop(both));
            });
            let both = semaphore.try_acquire_many(2).wait(LONG).block().unwrap();
            both.unwrap().forget();
            assert_eq!(semaphore.available().unwrap(), 0);
            semaphore.release(1).unwrap();
            assert!(semaphore.release_if_exists(1).unwrap());
            semaphore.add_permits(-1).unwrap();
            assert_eq!(semaphore.drain().unwrap(), 1);
            assert!(semaphore.delete().unwrap());
            let set = semaphore.try_set_permits(1).time_to_live(LONG);
            assert!(set.block().unwrap());
            client.flush().unwrap();
        }
    }
}
