//! Tests in virtual time: leases and their expiry.

use super::*;

#[tokio::test(start_paused = true)]
async fn watchdog_renews_permits_while_they_are_held() {
    let [client, other] = embedded_clients();
    let semaphore = with_permits(&client, "kept", 3).await;
    let theirs = other.expirable_semaphore(semaphore.name());
    let two = semaphore.acquire_many(2).await.unwrap();
    for _ in 0..24 {
        sleep(HOUR).await;
        assert!(two.is_valid());
        assert_eq!(counts(&theirs).await, (1, 2, 3));
        for id in two.ids() {
            // Renewed after every third of 30 s: at least two thirds always remain.
            assert!(lease_of(&theirs, id).await >= 19 * SECOND);
        }
    }
    two.release().await.unwrap();
    assert_eq!(client.status().holds, 0);
    sleep(HOUR).await;
    assert_eq!(counts(&theirs).await, (3, 0, 3));
}

#[tokio::test(start_paused = true)]
async fn fixed_lease_ends_on_time_and_guard_notices() {
    let [client, other] = embedded_clients();
    let semaphore = with_permits(&client, "fixed", 1).await;
    let permit = semaphore.acquire().lease(10 * SECOND).await.unwrap();
    let begun = Instant::now();
    let theirs = other.expirable_semaphore(semaphore.name());
    let next = theirs.acquire().await.unwrap();
    assert_took(begun.elapsed(), 10 * SECOND..11 * SECOND);
    assert!(!permit.is_valid());
    permit.lost().await;
    assert!(is_lost(&permit.release().await));
    client.flush().await;
    assert_eq!(counts(&theirs).await, (0, 1, 1));
    next.release().await.unwrap();
}

/// One message announces several permits: each local waiter sends its request as soon as the
/// previous one was served.
#[tokio::test(start_paused = true)]
async fn permits_released_together_serve_all_waiters() {
    let [client, other] = embedded_clients();
    let semaphore = with_permits(&client, "together", 5).await;
    let ids = ids_of(semaphore.acquire_many(5).lease(HOUR)).await;
    let theirs = other.expirable_semaphore(semaphore.name());
    let waiters = spawn_each(0..5, |_| theirs.acquire());
    sleep(SECOND).await;
    let begun = Instant::now();
    semaphore.release_many(&ids).await.unwrap();
    let mut permits = Vec::new();
    for waiter in waiters {
        permits.push(waiter.await.unwrap().unwrap());
    }
    assert!(begun.elapsed() < SECOND, "{:?}", begun.elapsed());
    assert_eq!(counts(&theirs).await, (0, 5, 5));
}

/// No message is published when a permit expires, so the waiter needs a timer.
#[tokio::test(start_paused = true)]
async fn a_waiter_for_two_is_served_when_the_second_permit_expires() {
    let [client, other] = embedded_clients();
    let semaphore = with_permits(&client, "silent", 3).await;
    for seconds in [30, 10, 20] {
        ids_of(semaphore.acquire().lease(seconds * SECOND)).await;
    }
    let begun = Instant::now();
    let theirs = other.expirable_semaphore(semaphore.name());
    let wait = theirs.try_acquire_many(2).wait(15 * SECOND);
    assert!(wait.await.unwrap().is_none());
    assert_took(begun.elapsed(), 15 * SECOND..16 * SECOND);
    let two = theirs.acquire_many(2).await.unwrap();
    assert_took(begun.elapsed(), 20 * SECOND..21 * SECOND);
    assert_eq!(counts(&theirs).await, (0, 3, 3));
    two.release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn waiter_notices_shortened_lease() {
    let [client, other] = embedded_clients();
    let semaphore = with_permits(&client, "nearer", 1).await;
    let id = ids_of(semaphore.acquire().lease(HOUR)).await[0];
    let theirs = other.expirable_semaphore(semaphore.name());
    let waiter = tokio::spawn(theirs.acquire().into_future());
    sleep(SECOND).await;
    let begun = Instant::now();
    assert!(semaphore.update_lease(id, 10 * SECOND).await.unwrap());
    let permit = waiter.await.unwrap().unwrap();
    assert_took(begun.elapsed(), 10 * SECOND..11 * SECOND);
    // The same for an end that moves further away.
    let id = permit.into_ids().unwrap()[0];
    assert!(semaphore.update_lease(id, 3 * HOUR).await.unwrap());
    sleep(2 * HOUR).await;
    assert_eq!(counts(&theirs).await, (0, 1, 1));
    sleep(HOUR).await;
    assert_eq!(counts(&theirs).await, (1, 0, 1));
}

/// F1: no permit is renewed after it has left its guard or was released.
#[tokio::test(start_paused = true)]
async fn permits_without_guard_are_not_renewed() {
    let [client] = embedded_clients();
    let semaphore = with_permits(&client, "f1", 1).await;
    let permit = semaphore.acquire().await.unwrap();
    sleep(25 * SECOND).await;
    let id = permit.into_ids().unwrap()[0];
    assert_eq!(client.status().holds, 0);
    assert!(semaphore.update_lease(id, 60 * SECOND).await.unwrap());
    let mut before = Duration::MAX;
    for _ in 0..59 {
        let left = lease_of(&semaphore, id).await;
        assert!(left < before, "the lease was renewed");
        before = left;
        sleep(SECOND).await;
    }
    sleep(SECOND).await;
    assert_eq!(semaphore.lease_of(id).await.unwrap(), None);
}

/// A guard never considers its permit valid for longer than the store does, to the microsecond.
#[tokio::test(start_paused = true)]
async fn lease_is_never_too_short_by_a_fraction_of_a_millisecond() {
    let [client, other] = embedded_clients();
    let semaphore = with_permits(&client, "rounding", 1).await;
    let theirs = other.expirable_semaphore(semaphore.name());
    for micros in [1, 499, 500, 999, 1000] {
        tokio::time::advance(Duration::from_micros(micros)).await;
        let permit = semaphore.acquire().lease(SECOND).await.unwrap();
        tokio::time::advance(SECOND - Duration::from_micros(1)).await;
        assert!(permit.is_valid());
        assert!(theirs.try_acquire().await.unwrap().is_none(), "held by two");
        tokio::time::advance(Duration::from_millis(1)).await;
        assert!(!permit.is_valid());
        free(theirs.try_acquire().await.unwrap().unwrap()).await;
    }
}
