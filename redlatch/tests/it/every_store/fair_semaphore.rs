//! Tests of the fair semaphore: permits with leases, acquired in the order of the requests.

use redlatch::inspect::{ObjectKind, ObjectState};
use redlatch::{FairPermitGuard, FairSemaphore, Result};

use crate::common::prelude::*;

on_every_store! {
    permits_are_limited_and_come_back,
    large_request_is_not_overtaken_by_smaller_ones,
    one_release_serves_all_waiters_that_fit,
    waiter_that_gives_up_lets_those_behind_it_in,
    force_release_serves_the_queue,
    inspection_shows_holders_and_waiters,
    invalid_numbers_and_other_kinds_are_refused,
}

type Waiting = JoinHandle<Result<FairPermitGuard>>;

async fn semaphore(store: &TestStore, what: &str, permits: u32) -> (Client, FairSemaphore) {
    let [client] = store.clients_with(short_linger()).await;
    let semaphore = client.fair_semaphore(&unique(what), permits);
    (client, semaphore)
}

async fn until_queued(semaphore: &FairSemaphore, waiters: usize) {
    let queued = async || semaphore.queue().await.unwrap().len() == waiters;
    until("in the queue", queued).await;
}

/// Starts a waiter, and returns once it has its position in the queue.
async fn spawn_waiter(semaphore: &FairSemaphore, permits: u32, ahead: usize) -> Waiting {
    let waiting = tokio::spawn(semaphore.acquire_many(permits).into_future());
    until_queued(semaphore, ahead + 1).await;
    waiting
}

async fn turn(waiting: Waiting) -> FairPermitGuard {
    joined("it is its turn", waiting).await
}

async fn release(guard: FairPermitGuard) {
    within_limit("released", guard.release()).await.unwrap();
}

async fn assert_nothing_left(client: &Client, semaphore: &FairSemaphore, permits: i64) {
    within_limit("settled", client.flush()).await;
    assert_eq!(semaphore.available().await.unwrap(), permits);
    assert!(semaphore.queue().await.unwrap().is_empty());
    assert!(client.inspect(semaphore.name()).await.unwrap().is_none());
    until_subscribed(client, 0).await;
}

async fn permits_are_limited_and_come_back(store: TestStore) {
    let (client, jobs) = semaphore(&store, "fair-permits", 3).await;
    let elsewhere = store.client().await.fair_semaphore(jobs.name(), 3);
    let two = jobs.acquire_many(2).await.unwrap();
    let one = elsewhere.acquire().await.unwrap();
    assert_eq!(jobs.available().await.unwrap(), 0);
    assert!(jobs.try_acquire().await.unwrap().is_none());
    release(two).await;
    assert!(jobs.try_acquire_many(3).await.unwrap().is_none());
    assert_eq!(jobs.available().await.unwrap(), 2);
    drop(one);
    let all = within_limit("it comes back", jobs.acquire_many(3))
        .await
        .unwrap();
    assert!(all.is_valid());
    release(all).await;
    assert_eq!(jobs.run(async { 42 }).await.unwrap(), 42);
    assert_nothing_left(&client, &jobs, 3).await;
}

async fn large_request_is_not_overtaken_by_smaller_ones(store: TestStore) {
    let (client, jobs) = semaphore(&store, "fair-large", 3).await;
    let elsewhere = store.client().await.fair_semaphore(jobs.name(), 3);
    let (one, two) = (jobs.acquire().await.unwrap(), jobs.acquire().await.unwrap());
    let large = spawn_waiter(&elsewhere, 3, 0).await;
    let small = spawn_waiter(&jobs, 1, 1).await;
    // One permit is free, but others wait.
    assert_eq!(jobs.available().await.unwrap(), 1);
    assert!(jobs.try_acquire().await.unwrap().is_none());
    release(one).await;
    assert_eq!(jobs.available().await.unwrap(), 2);
    assert_eq!(jobs.queue().await.unwrap().len(), 2);
    release(two).await;
    let large = turn(large).await;
    assert!(!small.is_finished());
    release(large).await;
    release(turn(small).await).await;
    assert_nothing_left(&client, &jobs, 3).await;
}

async fn one_release_serves_all_waiters_that_fit(store: TestStore) {
    let (client, jobs) = semaphore(&store, "fair-many", 4).await;
    let all = jobs.acquire_many(4).await.unwrap();
    let mut waiting = Vec::new();
    for (ahead, permits) in [1, 2, 2, 1].into_iter().enumerate() {
        waiting.push(spawn_waiter(&jobs, permits, ahead).await);
    }
    let last = waiting.split_off(2);
    release(all).await;
    let mut guards = Vec::new();
    for one in waiting {
        guards.push(turn(one).await);
    }
    // One permit is left, and the next waiter wants two.
    until_queued(&jobs, 2).await;
    assert_eq!(jobs.available().await.unwrap(), 1);
    for guard in guards {
        release(guard).await;
    }
    for one in last {
        release(turn(one).await).await;
    }
    assert_nothing_left(&client, &jobs, 4).await;
}

async fn waiter_that_gives_up_lets_those_behind_it_in(store: TestStore) {
    let (client, jobs) = semaphore(&store, "fair-gives-up", 2).await;
    let first = jobs.acquire().await.unwrap();
    let large = spawn_waiter(&jobs, 2, 0).await;
    let small = spawn_waiter(&jobs, 1, 1).await;
    large.abort();
    let small = turn(small).await;
    assert!(first.is_valid());
    release(first).await;
    release(small).await;
    assert_nothing_left(&client, &jobs, 2).await;
}

async fn force_release_serves_the_queue(store: TestStore) {
    let (client, jobs) = semaphore(&store, "fair-force", 2).await;
    assert!(!jobs.force_release().await.unwrap());
    let held = jobs.acquire_many(2).await.unwrap();
    let waiting = spawn_waiter(&jobs, 2, 0).await;
    assert!(jobs.force_release().await.unwrap());
    let next = turn(waiting).await;
    assert_lost(held.release().await, Loss::NotHeld);
    assert!(next.is_valid());
    release(next).await;
    assert_nothing_left(&client, &jobs, 2).await;
}

async fn inspection_shows_holders_and_waiters(store: TestStore) {
    let (client, jobs) = semaphore(&store, "fair-inspect", 3).await;
    let held = jobs.acquire_many(2).await.unwrap();
    let waiting = spawn_waiter(&jobs, 2, 0).await;
    let state = client.inspect(jobs.name()).await.unwrap().unwrap();
    assert_eq!(state.kind(), ObjectKind::FairSemaphore);
    assert!(matches!(state, ObjectState::FairSemaphore { .. }));
    let holders: Vec<u32> = state.holders().iter().map(|it| it.holds).collect();
    assert_eq!(holders, [2]);
    assert!(state.queue().iter().map(|it| it.permits).eq([Some(2)]));
    assert_eq!(jobs.holders().await.unwrap().len(), 1);
    let waiters = client.waiters(jobs.name()).await.unwrap();
    assert!(waiters.iter().map(|it| it.position).eq([Some(1)]));
    release(held).await;
    release(turn(waiting).await).await;
    assert_nothing_left(&client, &jobs, 3).await;
}

async fn invalid_numbers_and_other_kinds_are_refused(store: TestStore) {
    let (client, jobs) = semaphore(&store, "fair-kinds", 2).await;
    let name = jobs.name();
    for (total, wanted) in [(2, 0), (2, 3), (0, 1), (0, 0), (u32::MAX, 1)] {
        let refused = client.fair_semaphore(name, total);
        let refused = refused.try_acquire_many(wanted).await;
        let error = refused.map(|guard| guard.is_some()).unwrap_err();
        assert!(matches!(error, Error::InvalidCount { .. }), "{error}");
    }
    let is_refused = |outcome: Result<()>| assert_matches!(outcome, Err(Error::WrongKind { .. }));
    let held = jobs.acquire().await.unwrap();
    let lock = client.fair_read_write_lock(name);
    is_refused(lock.read().try_lock().await.map(drop));
    is_refused(lock.write().is_locked().await.map(drop));
    is_refused(client.lock(name).try_lock().await.map(drop));
    is_refused(client.semaphore(name).available().await.map(drop));
    release(held).await;
    let reader = lock.read().lock().await.unwrap();
    is_refused(jobs.try_acquire().await.map(drop));
    is_refused(jobs.available().await.map(drop));
    free(reader).await;
    assert_nothing_left(&client, &jobs, 2).await;
}

/// Nobody releases: permits come back when their leases end, each at its own time.
#[tokio::test(start_paused = true)]
async fn permits_of_the_dead_come_back_when_their_leases_end() {
    let [one, two] = embedded_clients();
    let of = |client: &Client| client.fair_semaphore("a", 3);
    let (jobs, theirs) = (of(&one), of(&two));
    let begun = tokio::time::Instant::now();
    let mut guards = Vec::new();
    for n in 1..=3 {
        guards.push(jobs.acquire().lease(n * 10 * SECOND).await.unwrap());
    }
    // At the end of the second lease two permits are free.
    let large = tokio::spawn(theirs.acquire_many(2).lease(60 * SECOND).into_future());
    until_queued(&jobs, 1).await;
    let small = tokio::spawn(jobs.acquire().into_future());
    until_queued(&jobs, 2).await;
    guards.push(turn(large).await);
    assert_took(begun.elapsed(), 20 * SECOND..21 * SECOND);
    guards.push(turn(small).await);
    assert_took(begun.elapsed(), 30 * SECOND..31 * SECOND);
}

/// Held permits are renewed for hours, and so is the position of a waiter.
#[tokio::test(start_paused = true)]
async fn permits_and_positions_are_kept_for_hours() {
    let [one, two] = embedded_clients();
    let of = |client: &Client| client.fair_semaphore("a", 2).wait_time(20 * SECOND);
    let (jobs, theirs) = (of(&one), of(&two));
    let held = jobs.acquire().await.unwrap();
    let large = spawn_waiter(&theirs, 2, 0).await;
    let small = spawn_waiter(&jobs, 1, 1).await;
    for _ in 0..12 {
        tokio::time::sleep(600 * SECOND).await;
        // Another attempt would remove waiters that are considered dead.
        assert!(theirs.try_acquire().await.unwrap().is_none());
        assert_eq!(jobs.queue().await.unwrap().len(), 2);
    }
    assert!(held.is_valid());
    release(held).await;
    release(turn(large).await).await;
    release(turn(small).await).await;
}
