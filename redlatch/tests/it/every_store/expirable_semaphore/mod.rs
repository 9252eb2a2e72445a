//! Tests of the expirable semaphore on every store: permits with ids and leases.

mod in_virtual_time;
mod on_a_server;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicI64;

use redlatch::{PermitGuard, PermitId};
use tokio::time::Instant;

use crate::common::prelude::*;

const BRIEF: Duration = Duration::from_millis(300);

on_every_store! {
    permits_are_acquired_and_released,
    many_permits_are_acquired_all_or_none,
    a_semaphore_that_was_never_set_has_no_permits,
    permits_are_set_once,
    handle_with_number_of_permits_sets_it_if_absent,
    exhausted_semaphore_is_not_set_again,
    permits_can_be_set_while_some_are_acquired,
    permits_can_be_added_and_removed,
    release_by_id_wakes_waiter,
    waiter_for_many_permits_is_served_once_they_are_free,
    setting_or_adding_permits_wakes_waiter,
    ids_are_released_all_or_none,
    only_acquired_ids_are_released,
    expired_permit_is_counted_once_and_cannot_be_released,
    a_lease_is_updated,
    lease_can_be_inspected,
    guard_learns_that_a_permit_was_released,
    all_permits_can_be_revoked,
    permits_can_leave_their_guard,
    dropped_guards_release_and_wake,
    waiters_of_one_client_are_served_in_order,
    acquired_permits_never_exceed_total,
    counts_are_exact_after_every_step,
    run_executes_with_a_permit,
    a_deleted_semaphore_is_gone,
    invalid_requests_are_rejected,
    prefixes_keep_clients_apart,
    no_state_remains_after_release,
    canceled_acquisitions_leave_nothing_behind,
    canceled_waiting_leaves_nothing_behind,
    canceled_releases_complete,
}

async fn with_permits(client: &Client, name: &str, permits: u32) -> ExpirableSemaphore {
    let semaphore = client.expirable_semaphore(&unique(name));
    assert!(semaphore.try_set_permits(permits).await.unwrap());
    semaphore
}

async fn permits_on(store: &TestStore, name: &str, permits: u32) -> (Client, ExpirableSemaphore) {
    let client = store.client().await;
    let semaphore = with_permits(&client, name, permits).await;
    (client, semaphore)
}

/// Returns the numbers of available, acquired and total permits.
async fn counts(semaphore: &ExpirableSemaphore) -> (i64, i64, i64) {
    (
        semaphore.available().await.unwrap(),
        semaphore.acquired().await.unwrap(),
        semaphore.total().await.unwrap(),
    )
}

/// Acquires permits without a guard.
async fn ids_of(request: impl IntoFuture<Output = Result<PermitGuard, Error>>) -> Vec<PermitId> {
    request.await.unwrap().into_ids().unwrap()
}

/// Returns the remaining lease of a permit.
async fn lease_of(semaphore: &ExpirableSemaphore, id: PermitId) -> Duration {
    let left = semaphore.lease_of(id).await.unwrap();
    left.and_then(Expiry::duration).unwrap()
}

/// Runs each request once. Returns their errors.
async fn errors_of_each_request(semaphore: &ExpirableSemaphore) -> [Option<Error>; 14] {
    let id = PermitId::from_bytes([1; 16]);
    [
        semaphore.acquire().await.err(),
        semaphore.try_acquire().await.err(),
        semaphore.release(id).await.err(),
        semaphore.try_release(id).await.err(),
        semaphore.try_release_many(&[id]).await.err(),
        semaphore.update_lease(id, SECOND).await.err(),
        semaphore.lease_of(id).await.err(),
        semaphore.available().await.err(),
        semaphore.held_permits().await.err(),
        semaphore.try_set_permits(1).await.err(),
        semaphore.set_permits(1).await.err(),
        semaphore.add_permits(1).await.err(),
        semaphore.force_release().await.err(),
        semaphore.delete().await.err(),
    ]
}

fn is_lost<T: std::fmt::Debug>(result: &Result<T, Error>) -> bool {
    matches!(result, Err(Error::Lost { .. }))
}

async fn permits_are_acquired_and_released(store: TestStore) {
    let (_client, semaphore) = permits_on(&store, "take", 2).await;
    let one = semaphore.acquire().await.unwrap();
    assert!(one.is_valid());
    assert!(one.valid_for() <= Duration::from_secs(30));
    assert_eq!(one.name(), semaphore.name());
    let ids = one.ids();
    assert_eq!(ids.len(), 1);
    assert_eq!(ids[0].to_string().len(), 32);
    assert_eq!(counts(&semaphore).await, (1, 1, 2));

    let two = semaphore.try_acquire().await.unwrap().unwrap();
    assert_ne!(two.ids(), ids);
    assert!(semaphore.try_acquire().await.unwrap().is_none());
    let wait = Duration::from_millis(20);
    let limited = retry_if_late(|| semaphore.try_acquire().wait(wait)).await;
    assert!(limited.is_none());
    let mut held = semaphore.held_permits().await.unwrap();
    held.sort_by_key(|permit| permit.id);
    let mut expected = [ids[0], two.ids()[0]];
    expected.sort();
    assert!(held.iter().map(|permit| permit.id).eq(expected));
    for permit in held {
        assert!(permit.remaining <= Expiry::In(Duration::from_secs(30)));
    }

    one.release().await.unwrap();
    free(two).await;
    assert_eq!(counts(&semaphore).await, (2, 0, 2));
}

async fn many_permits_are_acquired_all_or_none(store: TestStore) {
    let (_client, semaphore) = permits_on(&store, "many", 10).await;
    let six = semaphore.acquire_many(6).await.unwrap();
    assert_eq!(six.ids().len(), 6);
    assert_eq!(counts(&semaphore).await, (4, 6, 10));
    assert!(semaphore.try_acquire_many(5).await.unwrap().is_none());
    let four = semaphore.try_acquire_many(4).await.unwrap().unwrap();
    assert_eq!(counts(&semaphore).await, (0, 10, 10));
    six.release().await.unwrap();
    assert_eq!(counts(&semaphore).await, (6, 4, 10));
    four.release().await.unwrap();
    assert_eq!(counts(&semaphore).await, (10, 0, 10));
}

async fn a_semaphore_that_was_never_set_has_no_permits(store: TestStore) {
    let (_client, semaphore) = store.object(Client::expirable_semaphore, "never").await;
    assert_eq!(counts(&semaphore).await, (0, 0, 0));
    assert!(semaphore.try_acquire().await.unwrap().is_none());
    assert!(semaphore.held_permits().await.unwrap().is_empty());
    let nobodys = PermitId::from_bytes([7; 16]);
    assert!(is_lost(&semaphore.release(nobodys).await));
    assert!(!semaphore.try_release(nobodys).await.unwrap());
    assert!(!semaphore.update_lease(nobodys, SECOND).await.unwrap());
    assert_eq!(semaphore.lease_of(nobodys).await.unwrap(), None);
    assert!(!semaphore.force_release().await.unwrap());
    assert!(!semaphore.delete().await.unwrap());
    // None of these calls has set the number of permits.
    assert!(semaphore.try_set_permits(0).await.unwrap());
    assert!(!semaphore.try_set_permits(1).await.unwrap());
}

async fn handle_with_number_of_permits_sets_it_if_absent(store: TestStore) {
    let (client, plain) = store.object(Client::expirable_semaphore, "numbered").await;
    let semaphore = client.expirable_semaphore(plain.name()).permits(3);
    let two = semaphore.acquire_many(2).await.unwrap();
    assert_eq!(counts(&plain).await, (1, 2, 3));
    // Another number changes nothing.
    let five = client.expirable_semaphore(plain.name()).permits(5);
    assert!(five.try_acquire_many(2).await.unwrap().is_none());
    two.release().await.unwrap();
    assert_eq!(counts(&plain).await, (3, 0, 3));
    // The number is lost while a request waits, and permits are held.
    let all = semaphore.acquire_many(3).lease(SHORT).await.unwrap();
    let waiting = tokio::spawn(semaphore.acquire().into_future());
    assert!(plain.delete().await.unwrap());
    let next = joined("set again", waiting).await;
    assert_eq!(counts(&plain).await, (2, 1, 3));
    // What was held before does not count.
    assert!(all.release().await.is_err());
    assert_eq!(counts(&plain).await, (2, 1, 3));
    next.release().await.unwrap();
    for permits in [0, 1 << 31] {
        let invalid = semaphore.clone().permits(permits);
        assert_matches!(invalid.try_acquire().await, Err(Error::InvalidCount { .. }));
    }
    plain.delete().await.unwrap();
}

async fn permits_are_set_once(store: TestStore) {
    let (_client, semaphore) = permits_on(&store, "once", 10).await;
    assert!(!semaphore.try_set_permits(15).await.unwrap());
    assert_eq!(counts(&semaphore).await, (10, 0, 10));
}

/// F22: all permits are acquired, so the stored number is zero. The semaphore still counts as set.
async fn exhausted_semaphore_is_not_set_again(store: TestStore) {
    let (_client, semaphore) = permits_on(&store, "exhausted", 2).await;
    let both = semaphore.acquire_many(2).await.unwrap();
    assert!(!semaphore.try_set_permits(2).await.unwrap());
    assert_eq!(counts(&semaphore).await, (0, 2, 2));
    both.release().await.unwrap();
    assert_eq!(counts(&semaphore).await, (2, 0, 2));
}

async fn permits_can_be_set_while_some_are_acquired(store: TestStore) {
    let (_client, semaphore) = store.object(Client::expirable_semaphore, "set").await;
    semaphore.set_permits(10).await.unwrap();
    assert_eq!(counts(&semaphore).await, (10, 0, 10));
    assert!(!semaphore.try_set_permits(15).await.unwrap());
    for total in [15, 15, 5] {
        semaphore.set_permits(total).await.unwrap();
        assert_eq!(counts(&semaphore).await, (total.into(), 0, total.into()));
    }
    let three = semaphore.acquire_many(3).await.unwrap();
    assert_eq!(counts(&semaphore).await, (2, 3, 5));
    semaphore.set_permits(3).await.unwrap();
    assert_eq!(counts(&semaphore).await, (0, 3, 3));
    semaphore.set_permits(2).await.unwrap();
    assert_eq!(counts(&semaphore).await, (-1, 3, 2));
    assert!(semaphore.try_acquire().await.unwrap().is_none());
    three.release().await.unwrap();
    assert_eq!(counts(&semaphore).await, (2, 0, 2));
}

async fn permits_can_be_added_and_removed(store: TestStore) {
    let (_client, semaphore) = permits_on(&store, "add", 10).await;
    for (more, available) in [(5, 15), (0, 15), (-10, 5), (-10, -5), (6, 1)] {
        semaphore.add_permits(more).await.unwrap();
        assert_eq!(semaphore.available().await.unwrap(), available);
    }
    // Exceeds the numbers that Redisson can count.
    let refused = semaphore.add_permits(i32::MAX).await;
    assert_matches!(refused, Err(Error::InvalidCount { .. }));
    assert_eq!(counts(&semaphore).await, (1, 0, 1));
    semaphore.add_permits(i32::MAX - 1).await.unwrap();
    semaphore.add_permits(-i32::MAX).await.unwrap();
    semaphore.add_permits(-i32::MAX).await.unwrap();
    assert!(semaphore.add_permits(-1).await.is_err());
}

async fn release_by_id_wakes_waiter(store: TestStore) {
    let [client, other] = store.clients().await;
    let semaphore = with_permits(&client, "woken", 1).await;
    let ids = ids_of(semaphore.acquire().lease(10 * LONG)).await;
    let theirs = other.expirable_semaphore(semaphore.name());
    let waiter = waiter_of(&other, theirs.acquire()).await;
    assert!(!waiter.is_finished());
    semaphore.release(ids[0]).await.unwrap();
    let permit = joined("woken", waiter).await;
    assert_eq!(counts(&semaphore).await, (0, 1, 1));
    permit.release().await.unwrap();
}

/// F21. The holders are other clients with long leases, so only the releases can wake the waiter.
async fn waiter_for_many_permits_is_served_once_they_are_free(store: TestStore) {
    let [client, other] = store.clients().await;
    let semaphore = with_permits(&client, "f21", 5).await;
    let mut held = Vec::new();
    for _ in 0..5 {
        held.push(semaphore.acquire().lease(10 * LONG).await.unwrap());
    }
    let theirs = other.expirable_semaphore(semaphore.name());
    let waiter = waiter_of(&other, theirs.acquire_many(3)).await;
    for free in 1..=2 {
        held.pop().unwrap().release().await.unwrap();
        assert_eq!(semaphore.available().await.unwrap(), free);
        assert!(!waiter.is_finished());
    }
    held.pop().unwrap().release().await.unwrap();
    let three = joined("three are free", waiter).await;
    assert_eq!(three.ids().len(), 3);
    assert_eq!(counts(&semaphore).await, (0, 5, 5));
}

async fn setting_or_adding_permits_wakes_waiter(store: TestStore) {
    let [client, other] = store.clients().await;
    let semaphore = client.expirable_semaphore(&unique("grow"));
    let theirs = other.expirable_semaphore(semaphore.name());
    let mut held = Vec::new();
    for round in 0..3 {
        let waiter = waiter_of(&other, theirs.acquire().lease(10 * LONG)).await;
        match round {
            0 => assert!(semaphore.try_set_permits(1).await.unwrap()),
            1 => semaphore.set_permits(2).await.unwrap(),
            _ => semaphore.add_permits(1).await.unwrap(),
        }
        held.push(joined("woken", waiter).await);
    }
    assert_eq!(counts(&semaphore).await, (0, 3, 3));
}

async fn ids_are_released_all_or_none(store: TestStore) {
    let (_client, semaphore) = permits_on(&store, "all", 10).await;
    let ids = semaphore.acquire_many(6).await.unwrap().into_ids().unwrap();
    semaphore.release_many(&ids[..4]).await.unwrap();
    assert_eq!(counts(&semaphore).await, (8, 2, 10));
    // Some of these permits are acquired, others are not any more.
    assert!(is_lost(&semaphore.release_many(&ids).await));
    assert_eq!(counts(&semaphore).await, (8, 2, 10));
    // An id that is listed twice is released once.
    let twice = [ids[4], ids[5], ids[4]];
    semaphore.release_many(&twice).await.unwrap();
    assert_eq!(counts(&semaphore).await, (10, 0, 10));
    assert!(is_lost(&semaphore.release_many(&ids).await));
    assert!(is_lost(&semaphore.release(ids[0]).await));
    semaphore.release_many(&[]).await.unwrap();
    assert_eq!(counts(&semaphore).await, (10, 0, 10));
}

async fn only_acquired_ids_are_released(store: TestStore) {
    let (_client, semaphore) = permits_on(&store, "some", 10).await;
    let ids = semaphore.acquire_many(6).await.unwrap().into_ids().unwrap();
    assert_eq!(semaphore.try_release_many(&ids[..4]).await.unwrap(), 4);
    assert_eq!(semaphore.try_release_many(&ids).await.unwrap(), 2);
    assert_eq!(semaphore.try_release_many(&ids).await.unwrap(), 0);
    assert_eq!(semaphore.try_release_many(&[]).await.unwrap(), 0);
    assert_eq!(counts(&semaphore).await, (10, 0, 10));
}

/// F22.
async fn expired_permit_is_counted_once_and_cannot_be_released(store: TestStore) {
    let (_client, semaphore) = permits_on(&store, "expired", 10).await;
    let ids = ids_of(semaphore.acquire_many(3)).await;
    for id in &ids {
        assert!(semaphore.update_lease(*id, BRIEF).await.unwrap());
    }
    let long = semaphore.acquire_many(3).lease(10 * LONG).await.unwrap();
    let gone = || async { semaphore.lease_of(ids[2]).await.unwrap().is_none() };
    until("the last of them expires", gone).await;
    assert_eq!(counts(&semaphore).await, (7, 3, 10));
    assert!(!semaphore.try_release(ids[0]).await.unwrap());
    assert!(is_lost(&semaphore.release(ids[1]).await));
    assert!(is_lost(&semaphore.release_many(&ids).await));
    assert_eq!(semaphore.try_release_many(&ids).await.unwrap(), 0);
    assert!(!semaphore.update_lease(ids[2], LONG).await.unwrap());
    assert_eq!(counts(&semaphore).await, (7, 3, 10));
    long.release().await.unwrap();
    assert_eq!(counts(&semaphore).await, (10, 0, 10));
}

async fn a_lease_is_updated(store: TestStore) {
    let [client, other] = store.clients().await;
    let semaphore = with_permits(&client, "update", 1).await;
    let id = ids_of(semaphore.acquire().lease(LONG)).await[0];
    assert!(semaphore.update_lease(id, 10 * LONG).await.unwrap());
    assert!(lease_of(&semaphore, id).await > 9 * LONG);
    assert!(semaphore.update_lease(id, MAX_LEASE).await.unwrap());
    assert!(lease_of(&semaphore, id).await > MAX_LEASE - LONG);
    // The waiter is notified that the end is now earlier.
    let theirs = other.expirable_semaphore(semaphore.name());
    let waiter = waiter_of(&other, theirs.acquire()).await;
    assert!(semaphore.update_lease(id, BRIEF).await.unwrap());
    let permit = joined("it expires", waiter).await;
    assert!(!semaphore.update_lease(id, LONG).await.unwrap());
    assert!(!semaphore.try_release(id).await.unwrap());
    permit.release().await.unwrap();
}

async fn lease_can_be_inspected(store: TestStore) {
    let (_client, semaphore) = permits_on(&store, "lease", 2).await;
    let renewed = semaphore.acquire().await.unwrap();
    let left = lease_of(&semaphore, renewed.ids()[0]).await;
    assert!(left > SECOND && left <= Duration::from_secs(30), "{left:?}");
    // The guard's remaining time never exceeds the store's.
    let fixed = semaphore.acquire().lease(LONG).await.unwrap();
    let believed = fixed.valid_for();
    let left = lease_of(&semaphore, fixed.ids()[0]).await;
    assert!(left <= LONG && left > LONG / 2, "{left:?}");
    assert!(believed <= LONG && believed > LONG / 2, "{believed:?}");
    renewed.release().await.unwrap();
}

async fn guard_learns_that_a_permit_was_released(store: TestStore) {
    let settings = renewing();
    let (client, other) = (store.client_with(settings).await, store.client().await);
    let semaphore = with_permits(&client, "taken", 3).await;
    let theirs = other.expirable_semaphore(semaphore.name());
    let renewed = semaphore.acquire_many(3).await.unwrap();
    theirs.release(renewed.ids()[1]).await.unwrap();
    within_limit("the loss is reported at the next renewal", renewed.lost()).await;
    assert!(!renewed.is_valid());
    assert!(is_lost(
        &renewed.run(async { unreachable!("not even polled") }).await
    ));
    assert!(is_lost(&renewed.release().await));
    client.flush().await;
    assert_eq!(counts(&semaphore).await, (3, 0, 3), "the others came back");

    let fixed = semaphore.acquire_many(2).lease(LONG).await.unwrap();
    theirs.release(fixed.ids()[0]).await.unwrap();
    assert_lost(fixed.release().await, Loss::NotHeld);
    assert_eq!(counts(&semaphore).await, (3, 0, 3));
}

async fn all_permits_can_be_revoked(store: TestStore) {
    let settings = renewing();
    let (client, other) = (store.client_with(settings).await, store.client().await);
    let semaphore = with_permits(&client, "force", 2).await;
    assert!(!semaphore.force_release().await.unwrap());
    let both = semaphore.acquire_many(2).lease(10 * LONG).await.unwrap();
    let theirs = other.expirable_semaphore(semaphore.name());
    let waiter = waiter_of(&other, theirs.acquire()).await;
    assert!(theirs.force_release().await.unwrap());
    let permit = joined("woken", waiter).await;
    assert!(is_lost(&both.release().await));
    assert_eq!(counts(&semaphore).await, (1, 1, 2), "theirs was left alone");
    permit.release().await.unwrap();

    let renewed = semaphore.acquire().await.unwrap();
    assert!(theirs.force_release().await.unwrap());
    within_limit("the loss is reported at the next renewal", renewed.lost()).await;
    assert!(is_lost(&renewed.release().await));
    assert_eq!(counts(&semaphore).await, (2, 0, 2));
}

async fn permits_can_leave_their_guard(store: TestStore) {
    let settings = renewing();
    let (client, other) = (store.client_with(settings).await, store.client().await);
    let semaphore = with_permits(&client, "leave", 2).await;
    let ids = ids_of(semaphore.acquire().lease(10 * LONG)).await;
    client.flush().await;
    assert_eq!(client.status().holds, 0);
    assert_eq!(counts(&semaphore).await, (1, 1, 2), "not released");
    // Another process would receive the id as text.
    let received: PermitId = ids[0].to_string().parse().unwrap();
    let theirs = other.expirable_semaphore(semaphore.name());
    theirs.release(received).await.unwrap();
    assert_eq!(counts(&semaphore).await, (2, 0, 2));

    // No longer renewed.
    let ids = semaphore.acquire().await.unwrap().into_ids().unwrap();
    let gone = || async { semaphore.lease_of(ids[0]).await.unwrap().is_none() };
    until("its lease ends", gone).await;
    assert_eq!(counts(&semaphore).await, (2, 0, 2));

    let lost = retry_if_late(|| semaphore.acquire().lease(BRIEF)).await;
    within_limit("lost", lost.lost()).await;
    assert!(is_lost(&lost.into_ids()));
    client.flush().await;
    assert_eq!(client.status().holds, 0);
}

async fn dropped_guards_release_and_wake(store: TestStore) {
    let (client, semaphore) = permits_on(&store, "drop", 2).await;
    let both = semaphore.acquire_many(2).lease(10 * LONG).await.unwrap();
    let waiter = waiter_of(&client, semaphore.acquire_many(2)).await;
    drop(both);
    drop(joined("woken", waiter).await);
    client.flush().await;
    assert_eq!(counts(&semaphore).await, (2, 0, 2));
}

/// A waiter for one permit does not overtake a waiter for three either.
async fn waiters_of_one_client_are_served_in_order(store: TestStore) {
    let [client, other] = store.clients().await;
    let semaphore = with_permits(&client, "order", 3).await;
    let theirs = other.expirable_semaphore(semaphore.name());
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(theirs.acquire().lease(10 * LONG).await.unwrap());
    }
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut waiters = Vec::new();
    for n in 0..30u32 {
        let permits = if n % 3 == 0 { 3 } else { 1 };
        let mut waiting = semaphore.acquire_many(permits).into_future();
        // Polled here, so that they queue in this order.
        {
            let queued = until("it is queued", async || client.status().subscriptions == 1);
            poll_until(&mut waiting, queued).await;
        }
        let order = order.clone();
        waiters.push(tokio::spawn(async move {
            let permits = waiting.await.unwrap();
            order.lock().unwrap().push(n);
            permits.release().await.unwrap();
        }));
    }
    for permit in held {
        permit.release().await.unwrap();
    }
    done_all("served", waiters).await;
    let order = order.lock().unwrap().clone();
    // Two waiters for one permit each may be served at the same time, in any order.
    let rounds: Vec<_> = order
        .chunks(3)
        .map(|round| (round[0], round[1].min(round[2])))
        .collect();
    let expected: Vec<_> = (0..10).map(|round| (3 * round, 3 * round + 1)).collect();
    assert_eq!(rounds, expected, "{order:?}");
    assert_eq!(counts(&semaphore).await, (3, 0, 3));
}

async fn acquired_permits_never_exceed_total(store: TestStore) {
    let clients: [Client; 3] = store.clients_without_retries().await;
    let semaphore = with_permits(&clients[0], "crowd", 5).await;
    let inside = Arc::new(AtomicI64::new(0));
    let tasks = spawn_each(0..50usize, |n| {
        let semaphore = clients[n % 3].expirable_semaphore(semaphore.name());
        let inside = inside.clone();
        async move {
            for round in 0..5 {
                let wanted = u32::try_from((n + round) % 3 + 1).unwrap();
                let permits = semaphore.acquire_many(wanted).await.unwrap();
                let wanted = i64::from(wanted);
                let now = inside.fetch_add(wanted, Ordering::SeqCst) + wanted;
                assert!(now <= 5, "{now} at once");
                tokio::task::yield_now().await;
                inside.fetch_sub(wanted, Ordering::SeqCst);
                match round % 2 {
                    0 => permits.release().await.unwrap(),
                    _ => drop(permits),
                }
            }
        }
    });
    done_all("every task has its turns", tasks).await;
    for client in &clients {
        client.flush().await;
    }
    assert_eq!(counts(&semaphore).await, (5, 0, 5));
}

/// F22: a model counts permits in parallel with the store.
async fn counts_are_exact_after_every_step(store: TestStore) {
    let (_client, semaphore) = permits_on(&store, "model", 5).await;
    let (mut total, mut out) = (5i64, BTreeMap::<PermitId, ()>::new());
    let mut random = Random(0x2545_f491_4f6c_dd1d);
    let mut next = |below: u64| random.below(below);
    for _ in 0..500 {
        match next(8) {
            0..3 => {
                let n = u32::try_from(next(3) + 1).unwrap();
                let free = total - i64::try_from(out.len()).unwrap();
                let got = semaphore.try_acquire_many(n).lease(LONG).await.unwrap();
                assert_eq!(got.is_some(), free >= i64::from(n));
                if let Some(got) = got {
                    out.extend(got.into_ids().unwrap().into_iter().map(|id| (id, ())));
                }
            }
            3 => {
                let first = out.pop_first().map(|(id, ())| id);
                let id = first.unwrap_or(PermitId::from_bytes([1; 16]));
                assert_eq!(semaphore.try_release(id).await.unwrap(), first.is_some());
                assert!(!semaphore.try_release(id).await.unwrap());
            }
            4 => {
                let ids: Vec<_> = out.keys().copied().take(2).collect();
                let released = semaphore.try_release_many(&ids).await.unwrap();
                assert_eq!(released, ids.len());
                out.retain(|id, ()| !ids.contains(id));
            }
            5 => {
                total = i64::try_from(next(8)).unwrap();
                let permits = u32::try_from(total).unwrap();
                semaphore.set_permits(permits).await.unwrap();
            }
            6 => {
                let more = i32::try_from(next(5)).unwrap() - 2;
                semaphore.add_permits(more).await.unwrap();
                total += i64::from(more);
            }
            _ => {
                let (more, free) = (next(4), total - i64::try_from(out.len()).unwrap());
                assert!(!semaphore.try_set_permits(9).await.unwrap());
                if more == 0 && !out.is_empty() {
                    assert!(semaphore.force_release().await.unwrap());
                    out.clear();
                } else {
                    assert_eq!(semaphore.available().await.unwrap(), free);
                }
            }
        }
        let acquired = i64::try_from(out.len()).unwrap();
        assert_eq!(
            counts(&semaphore).await,
            (total - acquired, acquired, total)
        );
    }
}

async fn run_executes_with_a_permit(store: TestStore) {
    let client = store.client_with(renewing()).await;
    let semaphore = with_permits(&client, "run", 1).await;
    let inside = semaphore.clone();
    let free = semaphore
        .run(async move { inside.available().await.unwrap() })
        .await;
    assert_eq!(free.unwrap(), 0);
    assert_eq!(counts(&semaphore).await, (1, 0, 1));
    let inside = semaphore.clone();
    let run = semaphore.run(async move {
        assert!(inside.force_release().await.unwrap());
        std::future::pending::<()>().await
    });
    assert!(is_lost(&within_limit("lost", run).await));
    client.flush().await;
    assert_eq!(counts(&semaphore).await, (1, 0, 1));
}

async fn a_deleted_semaphore_is_gone(store: TestStore) {
    let client = store.client_with(renewing()).await;
    let semaphore = with_permits(&client, "delete", 2).await;
    let renewed = semaphore.acquire().await.unwrap();
    let ids = ids_of(semaphore.acquire().lease(LONG)).await;
    assert!(semaphore.delete().await.unwrap());
    assert!(!semaphore.delete().await.unwrap());
    assert_eq!(counts(&semaphore).await, (0, 0, 0));
    // Permits acquired from the deleted semaphore do not count in the next one.
    assert!(semaphore.try_set_permits(3).await.unwrap());
    assert!(!semaphore.try_release(ids[0]).await.unwrap());
    within_limit("the loss is reported at the next renewal", renewed.lost()).await;
    assert!(is_lost(&renewed.release().await));
    client.flush().await;
    assert_eq!(counts(&semaphore).await, (3, 0, 3));
    assert!(semaphore.delete().await.unwrap());
}

async fn invalid_requests_are_rejected(store: TestStore) {
    let (client, semaphore) = permits_on(&store, "bad", 2000).await;
    for n in [0, 1001, u32::MAX] {
        for error in [
            semaphore.acquire_many(n).await.err(),
            semaphore.try_acquire_many(n).wait(LONG).await.err(),
        ] {
            assert!(
                matches!(error, Some(Error::InvalidCount { .. })),
                "{n}: {error:?}"
            );
        }
    }
    let most = semaphore.try_acquire_many(1000).await.unwrap().unwrap();
    assert_eq!(counts(&semaphore).await, (1000, 1000, 2000));
    most.release().await.unwrap();
    for n in [1 << 31, u32::MAX] {
        for error in [
            semaphore.try_set_permits(n).await.err(),
            semaphore.set_permits(n).await.err(),
        ] {
            assert!(
                matches!(error, Some(Error::InvalidCount { .. })),
                "{n}: {error:?}"
            );
        }
    }
    semaphore.set_permits((1 << 31) - 1).await.unwrap();
    let id = PermitId::from_bytes([1; 16]);
    for lease in [Duration::ZERO, Duration::from_micros(999), Duration::MAX] {
        for error in [
            semaphore.acquire().lease(lease).await.err(),
            semaphore.update_lease(id, lease).await.err(),
        ] {
            assert_matches!(error, Some(Error::InvalidLease { .. }));
        }
    }
    for name in ["", "a\nb", &"x".repeat(513)] {
        let semaphore = client.expirable_semaphore(name);
        let of_none = semaphore.try_release_many(&[]).await;
        assert_matches!(of_none, Err(Error::InvalidName { .. }));
        for error in errors_of_each_request(&semaphore).await {
            assert_matches!(error, Some(Error::InvalidName { .. }));
        }
    }
    let lock = client.lock(&unique("bad-lock"));
    let _held = held(&lock).await;
    let semaphore = client.expirable_semaphore(lock.name());
    for error in [
        semaphore.acquire().await.err(),
        semaphore.available().await.err(),
        semaphore.set_permits(1).await.err(),
        semaphore.add_permits(1).await.err(),
        semaphore.delete().await.err(),
    ] {
        assert_matches!(error, Some(Error::WrongKind { .. }));
    }
    assert!(lock.is_locked().await.unwrap());
}

async fn prefixes_keep_clients_apart(store: TestStore) {
    let prefix = unique("prefix") + "::";
    let with = store.client_with_prefix(&prefix).await;
    let without = store.client().await;
    let name = unique("prefixed");
    let semaphore = with.expirable_semaphore(&name);
    assert!(semaphore.try_set_permits(1).await.unwrap());
    let permit = semaphore.acquire().await.unwrap();
    assert_eq!(without.expirable_semaphore(&name).total().await.unwrap(), 0);
    let same = without.expirable_semaphore(&format!("{prefix}{name}"));
    assert_eq!(counts(&same).await, (0, 1, 1));
    permit.release().await.unwrap();
}

async fn no_state_remains_after_release(store: TestStore) {
    let settings = Client::builder()
        .subscription_linger(Duration::from_millis(10))
        .watchdog_lease(10 * LONG);
    let client = store.client_with(settings).await;
    let semaphore = with_permits(&client, "account", 2).await;
    let tasks = spawn_each(0..20, |n| {
        let semaphore = semaphore.clone();
        async move {
            let permit = semaphore.acquire().await.unwrap();
            match n % 3 {
                0 => permit.release().await.unwrap(),
                1 => drop(permit),
                _ => {
                    let id = permit.into_ids().unwrap()[0];
                    semaphore.release(id).await.unwrap();
                }
            }
        }
    });
    done_all("done", tasks).await;
    client.flush().await;
    until_idle(&client).await;
    assert_eq!(counts(&semaphore).await, (2, 0, 2));
}

async fn canceled_acquisitions_leave_nothing_behind(store: TestStore) {
    let (client, semaphore) = permits_on(&store, "cancel", 4).await;
    drop_result_after_each_poll(
        async |polls| poll_up_to(polls, semaphore.acquire_many(3)).await,
        async || {
            within_limit("settled", client.flush()).await;
            assert_eq!(counts(&semaphore).await, (4, 0, 4));
            assert_eq!(client.status().holds, 0);
        },
    )
    .await;
}

async fn canceled_waiting_leaves_nothing_behind(store: TestStore) {
    let [client, other] = store.clients().await;
    let semaphore = with_permits(&client, "cancel-wait", 4).await;
    let theirs = other.expirable_semaphore(semaphore.name());
    drop_after_each_poll(async |polls| {
        let held = theirs.acquire_many(2).lease(10 * LONG).await.unwrap();
        let waiter = poll_up_to(polls, semaphore.acquire_many(3));
        let permits = beside_release(waiter, held.release()).await;
        let through = permits.is_some();
        drop(permits);
        within_limit("settled", client.flush()).await;
        assert_eq!(counts(&semaphore).await, (4, 0, 4));
        through
    })
    .await;
}

async fn canceled_releases_complete(store: TestStore) {
    let (client, semaphore) = permits_on(&store, "cancel-release", 4).await;
    drop_after_each_poll(async |polls| {
        let permits = semaphore.acquire_many(3).await.unwrap();
        let released = poll_up_to(polls, permits.release()).await;
        within_limit("settled", client.flush()).await;
        assert_eq!(counts(&semaphore).await, (4, 0, 4));
        released.is_some()
    })
    .await;
}

// The blocking API.

#[test]
fn threads_share_permits() {
    let store = Embedded::new();
    for client in [
        redlatch::blocking::Client::connect(&shared().url()),
        redlatch::blocking::Client::with_embedded(Client::builder(), &store),
    ] {
        let client = client.unwrap();
        let semaphore = client.expirable_semaphore(&unique("threads"));
        assert!(semaphore.try_set_permits(2).unwrap());
        let one = semaphore.acquire().block().unwrap();
        let two = semaphore.try_acquire().block().unwrap().unwrap();
        assert!(one.is_valid() && two.valid_for() > SECOND);
        let wait = Duration::from_millis(5);
        assert!(retry_if_late_blocking(|| semaphore.try_acquire().wait(wait).block()).is_none());
        // The guard can move to another thread.
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| semaphore.acquire().block());
            scope.spawn(move || one.release().unwrap());
            drop(waiter.join().unwrap().unwrap());
        });
        client.flush().unwrap();
        let id = two.into_ids().unwrap()[0];
        assert!(semaphore.update_lease(id, LONG).unwrap());
        let left = semaphore.lease_of(id).unwrap();
        assert!(left.and_then(Expiry::duration).unwrap() > LONG / 2);
        assert_eq!(semaphore.held_permits().unwrap().len(), 1);
        let counts = || {
            let (available, acquired) = (semaphore.available(), semaphore.acquired());
            let total = semaphore.total().unwrap();
            (available.unwrap(), acquired.unwrap(), total)
        };
        assert_eq!(counts(), (1, 1, 2));
        semaphore.release(id).unwrap();
        assert!(!semaphore.try_release(id).unwrap());
        semaphore.set_permits(3).unwrap();
        semaphore.add_permits(1).unwrap();
        let four = semaphore.acquire_many(4).block().unwrap();
        let four = four.into_ids().unwrap();
        semaphore.release_many(&four[..2]).unwrap();
        assert_eq!(semaphore.try_release_many(&four).unwrap(), 2);
        let fixed = retry_if_late_blocking(|| semaphore.acquire_many(4).lease(BRIEF).block());
        assert_eq!(fixed.ids().len(), 4);
        assert!(fixed.valid_for() <= BRIEF);
        // Waits until the lease ends.
        let next = semaphore.try_acquire_many(4).wait(LONG).block();
        let next = next.unwrap().expect("within its limit");
        assert!(!fixed.is_valid());
        assert!(is_lost(&fixed.release()));
        assert!(semaphore.force_release().unwrap());
        assert!(is_lost(&next.release()));
        assert_eq!(counts(), (4, 0, 4));
        assert!(semaphore.delete().unwrap());
        client.flush().unwrap();
    }
}
