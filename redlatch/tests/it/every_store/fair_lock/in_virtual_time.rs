//! Tests in virtual time: dead clients, and hours of waiting.

use super::*;
use crate::common::prelude::*;

/// Waiters keep their positions in the queue while a holder is renewed for hours.
#[tokio::test(start_paused = true)]
async fn waiters_keep_their_places_while_lock_is_held_for_hours() {
    let [one, two] = embedded_clients();
    let lock = one.fair_lock("a").wait_time(20 * SECOND);
    let held = lock.lock().await.unwrap();
    let mut waiting = Vec::new();
    for n in 0..10 {
        let lock = if n % 2 == 0 {
            &lock
        } else {
            &two.fair_lock("a").wait_time(20 * SECOND)
        };
        waiting.push(spawn_waiter(lock, n).await);
    }
    let queue = queued_owners(&lock).await;
    for _ in 0..12 {
        tokio::time::sleep(600 * SECOND).await;
        // Another client's attempt would remove waiters that are considered dead.
        assert!(two.fair_lock("a").try_lock().await.unwrap().is_none());
        assert_eq!(queued_owners(&lock).await, queue);
    }
    free(held).await;
    for one in waiting {
        let guard = await_turn(one).await;
        // The same while the lock is held for a long time.
        tokio::time::sleep(300 * SECOND).await;
        free(guard).await;
    }
}

/// No holder releases: each turn ends with its lease, and the next turn starts at that moment.
#[tokio::test(start_paused = true)]
async fn next_turn_starts_when_previous_lease_ends() {
    let [one, two] = embedded_clients();
    let lock = one.fair_lock("a");
    let begun = tokio::time::Instant::now();
    let mut guards = vec![lock.lock().lease(10 * SECOND).await.unwrap()];
    let mut waiting = Vec::new();
    for n in 0..8 {
        let client = if n % 2 == 0 { &one } else { &two };
        let turn = client.fair_lock("a").lock().lease(10 * SECOND);
        waiting.push(tokio::spawn(turn.into_future()));
        until_queued(&lock, n + 1).await;
    }
    for (n, turn) in (1..).zip(waiting) {
        guards.push(await_turn(turn).await);
        let (due, came) = (n * 10 * SECOND, begun.elapsed());
        assert!(came >= due && came < due + SECOND, "{came:?}");
    }
}

/// F10: a dead holder costs its lease. Each waiter that hangs while it is connected costs its wait
/// time.
#[tokio::test(start_paused = true)]
async fn hanging_waiter_costs_only_its_own_wait_time() {
    let [dying, living] = embedded_clients();
    let lock = living.fair_lock("a").wait_time(30 * SECOND);
    let dead = dying.fair_lock("a").wait_time(5 * SECOND);
    // A holder and two waiters that have died: their queue entries remain.
    std::mem::forget(dead.lock().lease(20 * SECOND).await.unwrap());
    let begun = tokio::time::Instant::now();
    for n in 0..2 {
        let mut hanging = Box::pin(dead.lock().into_future());
        poll_until(&mut hanging, until_queued(&lock, n + 1)).await;
        // Never polled again.
        std::mem::forget(hanging);
    }
    let guard = within_virtual_limit(lock.lock().into_future()).await;
    assert_took(begun.elapsed(), 29 * SECOND..32 * SECOND);
    free(guard).await;
    assert!(lock.queue().await.unwrap().is_empty());
}

async fn within_virtual_limit<T>(work: impl Future<Output = Result<T>>) -> T {
    let limit = Duration::from_secs(24 * 3600);
    tokio::time::timeout(limit, work).await.unwrap().unwrap()
}

/// Turns are short until one holder dies: the next waiter waits for that holder's lease, not for
/// earlier timeouts.
#[tokio::test(start_paused = true)]
async fn dead_holder_costs_its_lease_in_a_long_queue() {
    let [one, two] = embedded_clients();
    let lock = one.fair_lock("a");
    let lease = 10 * SECOND;
    let held = lock.lock().lease(3600 * SECOND).await.unwrap();
    let mut waiting = Vec::new();
    for n in 0..50 {
        let turn = two.fair_lock("a").lock().lease(lease);
        waiting.push(tokio::spawn(turn.into_future()));
        until_queued(&lock, n + 1).await;
    }
    free(held).await;
    for (n, one) in waiting.into_iter().enumerate() {
        let begun = tokio::time::Instant::now();
        let guard = within_virtual_limit(async { one.await.unwrap() }).await;
        let took = begun.elapsed();
        match n {
            26 => assert!(took >= lease - SECOND && took <= lease + SECOND, "{took:?}"),
            _ => assert!(took < SECOND, "{n}: {took:?}"),
        }
        match n {
            25 => std::mem::forget(guard),
            _ => free(guard).await,
        }
    }
}

/// The lease in the store starts with the grant. The waiter knows only that it starts after its last request, which it
/// repeats every 5 s.
#[tokio::test(start_paused = true)]
async fn lease_of_granted_lock_counts_from_last_request() {
    let [one, two] = embedded_clients();
    let (lock, other) = (one.fair_lock("a"), two.fair_lock("a"));
    let held = lock.lock().await.unwrap();
    let waiting = spawn_waiter(&other, 0).await;
    tokio::time::sleep(4 * SECOND).await;
    free(held).await;
    let guard = await_turn(waiting).await;
    let remaining = lock.remaining_lease().await.unwrap();
    assert_eq!(remaining, Some(Expiry::In(30 * SECOND)));
    let certain = guard.valid_for();
    assert!(certain <= 26 * SECOND && certain > 25 * SECOND);
    // It is renewed after a third of the lease, as any other.
    tokio::time::sleep(7 * SECOND).await;
    assert!(guard.valid_for() > 26 * SECOND);
    free(guard).await;
}

/// If less than a third of the lease is certain, the waiter requests the lock, and finds that it holds it.
#[tokio::test(start_paused = true)]
async fn granted_lock_is_requested_if_its_lease_may_end_soon() {
    for (late, requested) in [(19, false), (21, true)] {
        let [one, two] = embedded_clients();
        let (lock, other) = (one.fair_lock("a"), two.fair_lock("a"));
        let held = lock.lock().lease(100 * SECOND).await.unwrap();
        let mut waiting = Box::pin(other.lock().into_future());
        poll_until(&mut waiting, until_queued(&lock, 1)).await;
        // It is not polled meanwhile.
        tokio::time::sleep(late * SECOND).await;
        free(held).await;
        let guard = within_virtual_limit(waiting).await;
        let certain = guard.valid_for();
        assert_eq!(certain == 30 * SECOND, requested, "{certain:?}");
        assert!(certain >= 9 * SECOND);
        assert_eq!(other.hold_count(guard.owner()).await.unwrap(), 1);
        free(guard).await;
        assert!(!lock.is_locked().await.unwrap());
    }
}

/// Its granted hold ends with the lease, and the next waiter acquires the lock then.
#[tokio::test(start_paused = true)]
async fn request_that_is_not_polled_keeps_granted_lock_for_one_lease() {
    let [one, two] = embedded_clients();
    let (lock, other) = (one.fair_lock("a"), two.fair_lock("a"));
    let held = lock.lock().await.unwrap();
    let mut parked = Box::pin(other.lock().into_future());
    poll_until(&mut parked, until_queued(&lock, 1)).await;
    let next = spawn_waiter(&lock, 1).await;
    free(held).await;
    let begun = tokio::time::Instant::now();
    let guard = await_turn(next).await;
    assert_took(begun.elapsed(), 30 * SECOND..31 * SECOND);
    assert!(tokio::time::timeout(SECOND, &mut parked).await.is_err());
    free(guard).await;
    free(within_virtual_limit(parked).await).await;
}

/// Redisson's layout gives these two locks one queue.
#[tokio::test(start_paused = true)]
async fn release_grants_no_lock_to_waiter_for_another_one() {
    let [one, two] = embedded_clients();
    let (plain, braced) = (one.fair_lock("a"), one.fair_lock("{a}"));
    let first = held(&plain).await;
    let second = held(&braced).await;
    let waiting = spawn_waiter(&two.fair_lock("a"), 0).await;
    free(second).await;
    tokio::time::sleep(SECOND).await;
    assert!(!waiting.is_finished() && first.is_valid());
    assert!(!braced.is_locked().await.unwrap());
    free(first).await;
    free(await_turn(waiting).await).await;
}

/// The next waiter expects the lease of the earlier holder.
#[tokio::test(start_paused = true)]
async fn short_lease_of_dead_holder_delays_next_waiter_for_that_lease_only() {
    let [one, two] = embedded_clients();
    let (lock, other) = (one.fair_lock("a"), two.fair_lock("a"));
    let guard = held(&lock).await;
    let short = tokio::spawn(other.lock().lease(SECOND).into_future());
    until_queued(&lock, 1).await;
    let waiting = spawn_waiter(&other, 1).await;
    free(guard).await;
    std::mem::forget(await_turn(short).await);
    let begun = tokio::time::Instant::now();
    free(await_turn(waiting).await).await;
    assert!(begun.elapsed() < 2 * SECOND, "{:?}", begun.elapsed());
}
