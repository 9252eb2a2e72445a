//! In virtual time: the dead, and hours of waiting.

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn two_of(store: &redlatch::Embedded) -> (Client, Client) {
    let client = || Client::builder().connect_embedded(store).unwrap();
    (client(), client())
}

/// A holder that is renewed for hours does not cost those who wait their places.
#[tokio::test(start_paused = true)]
async fn places_are_kept_while_the_lock_is_held_for_hours() {
    let (one, two) = two_of(&redlatch::Embedded::new());
    let lock = one.fair_lock("a").wait_time(20 * SECOND);
    let held = lock.lock().await.unwrap();
    let mut waiting = Vec::new();
    for n in 0..10 {
        let lock = if n % 2 == 0 {
            &lock
        } else {
            &two.fair_lock("a").wait_time(20 * SECOND)
        };
        waiting.push(wait_behind(lock, n).await);
    }
    let queue = lock.queue().await.unwrap();
    for _ in 0..12 {
        tokio::time::sleep(600 * SECOND).await;
        // Somebody else asks, who would drop those who were given up.
        assert!(two.fair_lock("a").try_lock().await.unwrap().is_none());
        assert_eq!(lock.queue().await.unwrap(), queue);
    }
    held.unlock().await.unwrap();
    for one in waiting {
        let guard = served(one).await;
        // Also while they have it for long.
        tokio::time::sleep(300 * SECOND).await;
        guard.unlock().await.unwrap();
    }
}

/// Nobody releases: each turn ends with its lease, and the next one begins just then.
#[tokio::test(start_paused = true)]
async fn each_turn_begins_when_the_one_before_has_ended() {
    let (one, two) = two_of(&redlatch::Embedded::new());
    let lock = one.fair_lock("a");
    let begun = tokio::time::Instant::now();
    let mut guards = vec![lock.lock().lease(10 * SECOND).await.unwrap()];
    let mut waiting = Vec::new();
    for n in 0..8 {
        let client = if n % 2 == 0 { &one } else { &two };
        let turn = client.fair_lock("a").lock().lease(10 * SECOND);
        waiting.push(tokio::spawn(turn.into_future()));
        queued(&lock, n + 1).await;
    }
    for (n, turn) in (1..).zip(waiting) {
        guards.push(served(turn).await);
        let (due, came) = (n * 10 * SECOND, begun.elapsed());
        assert!(came >= due && came < due + SECOND, "{came:?}");
    }
}

/// F10: a dead holder costs its lease, and each waiter that hangs while it is connected its wait time.
#[tokio::test(start_paused = true)]
async fn waiters_that_hang_cost_their_own_time_and_no_more() {
    let store = redlatch::Embedded::new();
    let (dying, living) = two_of(&store);
    let lock = living.fair_lock("a").wait_time(30 * SECOND);
    let dead = dying.fair_lock("a").wait_time(5 * SECOND);
    // A holder that says nothing any more, and two who waited: their queue entries stay behind.
    std::mem::forget(dead.lock().lease(20 * SECOND).await.unwrap());
    let begun = tokio::time::Instant::now();
    for n in 0..2 {
        let mut ghost = Box::pin(dead.lock().into_future());
        tokio::select! {
            _ = &mut ghost => unreachable!("it is held"),
            () = queued(&lock, n + 1) => {}
        }
        // Never polled again.
        std::mem::forget(ghost);
    }
    let guard = soon_virtual(lock.lock().into_future()).await;
    let took = begun.elapsed();
    assert!(took >= 29 * SECOND && took < 32 * SECOND, "{took:?}");
    guard.unlock().await.unwrap();
    assert!(lock.queue().await.unwrap().is_empty());
}

async fn soon_virtual<T>(work: impl Future<Output = Result<T>>) -> T {
    let limit = Duration::from_secs(24 * 3600);
    tokio::time::timeout(limit, work).await.unwrap().unwrap()
}

/// Turns are short, and then one of them dies: the next one waits for its lease, not for old times.
#[tokio::test(start_paused = true)]
async fn a_holder_that_dies_in_a_long_queue_costs_its_lease() {
    let (one, two) = two_of(&redlatch::Embedded::new());
    let lock = one.fair_lock("a");
    let lease = 10 * SECOND;
    let held = lock.lock().lease(3600 * SECOND).await.unwrap();
    let mut waiting = Vec::new();
    for n in 0..50 {
        waiting.push(tokio::spawn(
            two.fair_lock("a").lock().lease(lease).into_future(),
        ));
        queued(&lock, n + 1).await;
    }
    held.unlock().await.unwrap();
    for (n, one) in waiting.into_iter().enumerate() {
        let begun = tokio::time::Instant::now();
        let guard = soon_virtual(async { one.await.unwrap() }).await;
        let took = begun.elapsed();
        match n {
            26 => assert!(took >= lease - SECOND && took <= lease + SECOND, "{took:?}"),
            _ => assert!(took < SECOND, "{n}: {took:?}"),
        }
        match n {
            25 => std::mem::forget(guard),
            _ => guard.unlock().await.unwrap(),
        }
    }
}
