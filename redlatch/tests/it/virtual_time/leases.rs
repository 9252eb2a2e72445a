//! Waiting, renewal and loss in virtual time: hours pass in microseconds.

use tokio::time::{Instant, advance};

use crate::common::prelude::*;

#[tokio::test(start_paused = true)]
async fn watchdog_renews_a_lock_while_it_is_held() {
    let [holder, other] = embedded_clients();
    let guard = held(&holder.lock("a")).await;
    for _ in 0..24 {
        sleep(HOUR).await;
        assert!(guard.is_valid());
        assert!(other.lock("a").try_lock().await.unwrap().is_none());
        let left = lease_left(&other.lock("a")).await;
        // Renewed after every third of 30 s: at least two thirds always remain.
        assert!(left >= 19 * SECOND, "{left:?}");
    }
    free(guard).await;
    assert!(other.lock("a").try_lock().await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn after_the_release_nothing_is_renewed() {
    let holder = Client::embedded();
    let lock = holder.lock("a");
    let me = redlatch::Owner::new();
    let guard = lock.lock().owner(me).await.unwrap();
    sleep(25 * SECOND).await;
    free(guard).await;
    assert_eq!(holder.status().holds, 0);
    // The same owner again, without renewal: a leftover renewal would keep it alive.
    let fixed = lock.lock().owner(me).lease(60 * SECOND).await.unwrap();
    let mut before = lease_left(&lock).await;
    for _ in 0..59 {
        sleep(SECOND).await;
        let left = lease_left(&lock).await;
        assert!(left < before, "the lease was renewed");
        before = left;
    }
    sleep(SECOND).await;
    assert!(!lock.is_locked().await.unwrap());
    assert!(!fixed.is_valid());
}

#[tokio::test(start_paused = true)]
async fn fixed_lease_ends_on_time() {
    let client = Client::embedded();
    let guard = client.lock("a").lock().lease(10 * SECOND).await.unwrap();
    let begun = Instant::now();
    let lost = guard.lost();
    let reported = tokio::spawn(async move {
        lost.await;
        Instant::now()
    });
    advance(10 * SECOND - Duration::from_millis(1)).await;
    assert!(guard.is_valid());
    assert_eq!(guard.valid_for(), Duration::from_millis(1));
    advance(Duration::from_millis(1)).await;
    assert!(!guard.is_valid());
    let reported = reported.await.unwrap() - begun;
    let late = Duration::from_millis(5);
    assert_took(reported, 10 * SECOND..10 * SECOND + late);
}

#[tokio::test(start_paused = true)]
async fn waiter_acquires_when_lease_of_dead_holder_ends() {
    let [holder, other] = embedded_clients();
    // A holder that never sends another command.
    std::mem::forget(holder.lock("a").lock().lease(20 * SECOND).await.unwrap());
    let begun = Instant::now();
    let limited = other.lock("a").try_lock().wait(5 * SECOND).await;
    assert!(limited.unwrap().is_none());
    assert_took(begun.elapsed(), 5 * SECOND..6 * SECOND);
    let guard = held(&other.lock("a")).await;
    assert!(begun.elapsed() >= 20 * SECOND, "before the lease ended");
    assert!(begun.elapsed() < 21 * SECOND, "long after the lease ended");
    free(guard).await;
}

#[tokio::test(start_paused = true)]
async fn wait_limit_ends_on_time_in_the_queue() {
    let client = Client::embedded();
    let lock = client.lock("a");
    let guard = held(&lock).await;
    let first = tokio::spawn(lock.try_lock().wait(HOUR).into_future());
    sleep(SECOND).await;
    let begun = Instant::now();
    // Second in the queue: it never sends a request.
    assert!(lock.try_lock().wait(60 * SECOND).await.unwrap().is_none());
    assert_took(begun.elapsed(), 60 * SECOND..61 * SECOND);
    free(guard).await;
    assert!(first.await.unwrap().unwrap().is_some());
}

/// Returns how long a request waits that was created an hour before it is awaited.
async fn refused_after<T>(
    request: impl IntoFuture<Output = redlatch::Result<Option<T>>>,
) -> Duration {
    sleep(HOUR).await;
    let begun = Instant::now();
    assert!(request.await.unwrap().is_none());
    begun.elapsed()
}

#[tokio::test(start_paused = true)]
async fn wait_limit_starts_when_request_is_awaited() {
    let client = Client::embedded();
    let lock = client.lock("a");
    let _held = held(&lock).await;
    let permits = client.semaphore("b");
    let expirable = client.expirable_semaphore("c");
    let multi = MultiLock::new([&lock]);
    let red = RedLock::new([&lock]);
    for took in [
        refused_after(lock.try_lock().wait(SECOND)).await,
        refused_after(lock.try_lock().owner(Owner::new()).wait(SECOND)).await,
        refused_after(permits.try_acquire().wait(SECOND)).await,
        refused_after(expirable.try_acquire().wait(SECOND)).await,
        refused_after(multi.try_lock().wait(SECOND)).await,
        refused_after(red.try_lock().wait(SECOND)).await,
    ] {
        assert!(took >= SECOND && took < 2 * SECOND, "{took:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn inner_fixed_lease_does_not_stop_renewal_of_outer_hold() {
    let client = Client::embedded();
    let lock = client.lock("a");
    let outer = held(&lock).await;
    let inner = outer.reenter().lease(5 * SECOND).await.unwrap();
    sleep(HOUR).await;
    free(inner).await;
    sleep(HOUR).await;
    free(outer).await;

    // The reverse: without the renewed hold, the fixed lease ends.
    let outer = lock.lock().lease(60 * SECOND).await.unwrap();
    let inner = outer.reenter().await.unwrap();
    sleep(HOUR).await;
    assert!(outer.is_valid(), "renewed for the inner guard's sake");
    free(inner).await;
    sleep(60 * SECOND).await;
    assert_lost(outer.unlock().await, Loss::LeaseEnded);
}

#[tokio::test(start_paused = true)]
async fn holder_learns_at_next_renewal_that_its_lock_was_removed() {
    let [holder, admin] = embedded_clients();
    let guard = held(&holder.lock("a")).await;
    assert!(admin.lock("a").force_unlock().await.unwrap());
    let begun = Instant::now();
    guard.lost().await;
    assert_took(begun.elapsed(), ..=10 * SECOND + SECOND / 2);
    let again = guard.run(async { unreachable!("not even polled") }).await;
    assert_lost(again, Loss::NotHeld);
}

#[tokio::test(start_paused = true)]
async fn subscriptions_end_after_the_linger_and_not_before() {
    let store = Embedded::new();
    let settings = Client::builder().subscription_linger(10 * SECOND);
    let client = settings.connect_embedded(&store).unwrap();
    let lock = client.lock("a");
    let guard = held(&lock).await;
    assert!(lock.try_lock().wait(SECOND).await.unwrap().is_none());
    sleep(9 * SECOND).await;
    assert_eq!(client.status().subscriptions, 1);
    // Another wait restarts the linger time.
    assert!(lock.try_lock().wait(SECOND).await.unwrap().is_none());
    sleep(9 * SECOND).await;
    assert_eq!(client.status().subscriptions, 1);
    sleep(2 * SECOND).await;
    assert_eq!(client.status().subscriptions, 0);
    free(guard).await;
}

#[tokio::test(start_paused = true)]
async fn twenty_thousand_locks_are_renewed() {
    let client = Client::embedded();
    let mut guards = Vec::new();
    for n in 0..20_000 {
        guards.push(held(&client.lock(&format!("many-{n}"))).await);
        if n % 1000 == 0 {
            sleep(Duration::from_millis(50)).await;
        }
    }
    assert_eq!(client.status().holds, 20_000);
    sleep(2 * 60 * SECOND).await;
    assert!(guards.iter().all(redlatch::Guard::is_valid));
    drop(guards);
    client.flush().await;
    assert_eq!(client.status().holds, 0);
}

#[tokio::test(start_paused = true)]
async fn work_is_not_polled_again_after_the_lease_has_ended() {
    let client = Client::embedded();
    let guard = client.lock("a").lock().lease(SECOND).await.unwrap();
    // As after a pause of the process: the lease has ended, and no timer has run yet.
    let work = async {
        advance(2 * SECOND).await;
        unreachable!("polled after the lease had ended")
    };
    assert_lost(guard.run(work).await, Loss::LeaseEnded);
}
