//! Tests of the read-write lock in virtual time: leases, renewal and loss, hours in microseconds.

use tokio::time::Instant;

use crate::common::prelude::*;

/// Asserts that the time is roughly as expected: not earlier, and not much later.
#[track_caller]
fn assert_about(elapsed: Duration, expected: Duration) {
    assert_took(elapsed, expected..expected + SECOND);
}

#[tokio::test(start_paused = true)]
async fn both_sides_are_renewed_while_they_are_held() {
    let [client, other] = embedded_clients();
    let lock = client.read_write_lock("a");
    let theirs = other.read_write_lock("a");
    let writer = held(&lock.write()).await;
    let reader = writer.reenter_read().await.unwrap();
    let again = reader.reenter().await.unwrap();
    for _ in 0..5 {
        sleep(HOUR).await;
        for left in [
            lease_left(&theirs.write()).await,
            lease_left(&theirs.read()).await,
        ] {
            // Renewed after every third of 30 s: at least two thirds always remain.
            assert!(left >= 19 * SECOND, "{left:?}");
        }
        assert!(theirs.read().try_lock().await.unwrap().is_none());
        assert!(theirs.write().try_lock().await.unwrap().is_none());
    }
    free(writer).await;
    free(again).await;
    for _ in 0..5 {
        sleep(HOUR).await;
        assert!(theirs.write().try_lock().await.unwrap().is_none());
        assert!(lease_left(&theirs.read()).await >= 19 * SECOND);
    }
    assert!(reader.is_valid());
    free(reader).await;
    assert_eq!(client.status().holds, 0);
    let writer = theirs.write().try_lock().await.unwrap().unwrap();
    free(writer).await;
}

/// F13.
#[tokio::test(start_paused = true)]
async fn two_hundred_read_holds_are_renewed_for_hours() {
    let [one, two, other] = embedded_clients();
    let mut guards = Vec::new();
    for n in 0..200 {
        let client = if n % 2 == 0 { &one } else { &two };
        let lock = client.read_write_lock("a");
        guards.push(held(&lock.read()).await);
        sleep(Duration::from_millis(77)).await;
    }
    let lock = other.read_write_lock("a");
    for _ in 0..2 {
        sleep(HOUR).await;
        assert!(guards.iter().all(redlatch::Guard::is_valid));
        assert_eq!(lock.read().holders().await.unwrap().len(), 200);
    }
    let writer = tokio::spawn(lock.write().lock().into_future());
    for guard in guards {
        assert!(!writer.is_finished());
        free(guard).await;
    }
    free(writer.await.unwrap().unwrap()).await;
    assert_eq!((one.status().holds, two.status().holds), (0, 0));
}

/// F12: live readers renew their own holds, not that of a dead reader, in any client.
#[tokio::test(start_paused = true)]
async fn dead_reader_costs_one_lease_regardless_of_live_readers() {
    let [client, other, writers] = embedded_clients();
    let lock = client.read_write_lock("a");
    let mut alive = Vec::new();
    for client in [&client, &other] {
        alive.push(held(&client.read_write_lock("a").read()).await);
    }
    // Its client is gone together with its watchdog: the hold is neither renewed nor released.
    std::mem::forget(lock.read().lock().lease(20 * SECOND).await.unwrap());
    let theirs = writers.read_write_lock("a");
    let writer = tokio::spawn(theirs.write().lock().into_future());
    sleep(19 * SECOND).await;
    assert_eq!(lock.read().holders().await.unwrap().len(), 3);
    sleep(2 * SECOND).await;
    assert_eq!(lock.read().holders().await.unwrap().len(), 2);
    sleep(HOUR).await;
    assert!(!writer.is_finished());
    let begun = Instant::now();
    free_all(alive).await;
    let writer = writer.await.unwrap().unwrap();
    assert_about(begun.elapsed(), Duration::ZERO);
    free(writer).await;
}

/// Redisson: testMultiInstanceZombieReadLockPerformance. The leases of sixty readers that died at
/// the same time pass in parallel, not one after the other.
#[tokio::test(start_paused = true)]
async fn sixty_dead_readers_delay_a_writer_like_one() {
    let [client, other, writers] = embedded_clients();
    for n in 0..60 {
        let dead = if n % 2 == 0 { &client } else { &other };
        let lock = dead.read_write_lock("a");
        std::mem::forget(lock.read().lock().lease(20 * SECOND).await.unwrap());
    }
    let lock = writers.read_write_lock("a");
    assert_eq!(lock.read().holders().await.unwrap().len(), 60);
    let alive = held(&lock.read()).await;
    let begun = Instant::now();
    let waiting = tokio::spawn(lock.write().lock().into_future());
    sleep(SECOND).await;
    free(alive).await;
    let writer = waiting.await.unwrap().unwrap();
    assert_about(begun.elapsed(), 20 * SECOND);
    free(writer).await;
    assert!(!lock.read().is_locked().await.unwrap());
    // The dead readers do not appear among the next holders either.
    let reader = held(&lock.read()).await;
    assert_eq!(lock.read().holders().await.unwrap().len(), 1);
    free(reader).await;
}

/// The dead reader's lease outlives the live readers: the writer waits for the rest of that lease,
/// and no longer.
#[tokio::test(start_paused = true)]
async fn writer_waits_for_the_rest_of_a_dead_readers_lease() {
    let [client, writers] = embedded_clients();
    let lock = client.read_write_lock("a");
    let alive = lock.read().lock().lease(HOUR).await.unwrap();
    std::mem::forget(lock.read().lock().lease(20 * SECOND).await.unwrap());
    let begun = Instant::now();
    let theirs = writers.read_write_lock("a");
    let writer = tokio::spawn(theirs.write().lock().into_future());
    sleep(5 * SECOND).await;
    free(alive).await;
    assert_eq!(lease_left(&lock.read()).await, 15 * SECOND);
    // The writer had received another end, an hour away.
    let writer = writer.await;
    assert_about(begun.elapsed(), 20 * SECOND);
    free(writer.unwrap().unwrap()).await;
}

#[tokio::test(start_paused = true)]
async fn writer_waits_for_the_longest_read_lease() {
    let [client] = embedded_clients();
    let lock = client.read_write_lock("a");
    let begun = Instant::now();
    let long = lock.read().lock().lease(10 * SECOND).await.unwrap();
    sleep(SECOND).await;
    let short = lock.read().lock().lease(3 * SECOND).await.unwrap();
    let writer = tokio::spawn(lock.write().lock().into_future());
    sleep(2 * SECOND).await;
    // The shorter lease did not apply to the other readers.
    free(short).await;
    sleep(6 * SECOND + SECOND / 10).await;
    assert!(!writer.is_finished());
    free(long).await;
    let writer = writer.await.unwrap().unwrap();
    assert_about(begun.elapsed(), 9 * SECOND);
    free(writer).await;
}

#[tokio::test(start_paused = true)]
async fn released_reader_does_not_extend_another_reader() {
    let [client] = embedded_clients();
    let lock = client.read_write_lock("a");
    std::mem::forget(lock.read().lock().lease(4 * SECOND).await.unwrap());
    sleep(3 * SECOND).await;
    let brief = lock.read().lock().lease(4 * SECOND).await.unwrap();
    free(brief).await;
    sleep(SECOND + SECOND / 10).await;
    free(lock.write().try_lock().await.unwrap().unwrap()).await;
}

#[tokio::test(start_paused = true)]
async fn dead_writer_costs_one_lease_regardless_of_reentries() {
    let [client, other] = embedded_clients();
    let lock = client.read_write_lock("a");
    let outer = lock.write().lock().lease(10 * SECOND).await.unwrap();
    // Redisson adds these leases up.
    std::mem::forget(outer.reenter().lease(10 * SECOND).await.unwrap());
    std::mem::forget(outer);
    let begun = Instant::now();
    let theirs = other.read_write_lock("a");
    let (read, write) = (theirs.read().lock(), theirs.write().lock());
    let read = tokio::spawn(read.into_future());
    let guard = write.await.unwrap();
    // Readers may be served first; they release immediately.
    free(guard).await;
    free(read.await.unwrap().unwrap()).await;
    assert_about(begun.elapsed(), 10 * SECOND);
}

#[tokio::test(start_paused = true)]
async fn waiting_readers_are_admitted_when_a_writers_lease_ends() {
    let [client, other] = embedded_clients();
    let lock = client.read_write_lock("a");
    let writer = lock.write().lock().lease(10 * SECOND).await.unwrap();
    let begun = Instant::now();
    let readers = spawn_each(0..50, |n| {
        let client = if n % 2 == 0 { &client } else { &other };
        let lock = client.read_write_lock("a");
        lock.read().lock().into_future()
    });
    let mut guards = Vec::new();
    for reader in readers {
        guards.push(reader.await.unwrap().unwrap());
    }
    assert_about(begun.elapsed(), 10 * SECOND);
    assert_lost(writer.unlock().await, Loss::LeaseEnded);
    client.flush().await;
    assert_eq!(lock.read().holders().await.unwrap().len(), 50);
    drop(guards);
    client.flush().await;
    other.flush().await;
    assert!(!lock.read().is_locked().await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn wait_limits_end_on_time_on_both_sides() {
    let [client, other] = embedded_clients();
    let lock = client.read_write_lock("a");
    let theirs = other.read_write_lock("a");
    let writer = held(&lock.write()).await;
    let begun = Instant::now();
    let reader = theirs.read().try_lock().wait(60 * SECOND).await.unwrap();
    assert!(reader.is_none());
    assert_about(begun.elapsed(), 60 * SECOND);
    let reader = writer.downgrade().await.unwrap();
    let begun = Instant::now();
    let writer = theirs.write().try_lock().wait(60 * SECOND).await.unwrap();
    assert!(writer.is_none());
    assert_about(begun.elapsed(), 60 * SECOND);
    free(reader).await;
    assert_eq!(client.status().holds, 0);
}

/// F16: an inner lease ends while another hold of the same owner continues.
#[tokio::test(start_paused = true)]
async fn inner_lease_does_not_end_the_outer_hold() {
    let [client, other] = embedded_clients();
    let lock = client.read_write_lock("a");
    let outer = held(&lock.read()).await;
    let inner = outer.reenter().lease(5 * SECOND).await.unwrap();
    sleep(HOUR).await;
    assert!(inner.is_valid() && outer.is_valid());
    // Released in the order of acquisition: the count goes from 2 to 1 to 0.
    free(outer).await;
    assert!(inner.is_valid());
    assert_eq!(lock.read().hold_count(inner.owner()).await.unwrap(), 1);
    // From now on it has a fixed lifetime: at most what the last renewal set.
    let waiting = other.read_write_lock("a");
    let begun = Instant::now();
    let writer = held(&waiting.write()).await;
    assert!(begun.elapsed() <= 31 * SECOND, "{:?}", begun.elapsed());
    assert!(!inner.is_valid());
    free(writer).await;
}

#[tokio::test(start_paused = true)]
async fn mark_of_dead_waiting_writer_expires() {
    let [client, other] = embedded_clients();
    let lock = client.read_write_lock("a").prefer_writers();
    let theirs = other.read_write_lock("a").prefer_writers();
    let reader = lock.read().lock().lease(HOUR).await.unwrap();
    // It waits, and then its process stops for good.
    let mut dead = theirs.write().lock().into_future();
    poll_until(&mut dead, sleep(40 * SECOND)).await;
    // While it was alive, its mark did not expire.
    assert!(lock.read().try_lock().await.unwrap().is_none());
    std::mem::forget(dead);
    let begun = Instant::now();
    let more = held(&lock.read()).await;
    assert!(begun.elapsed() > 5 * SECOND, "{:?}", begun.elapsed());
    assert!(begun.elapsed() <= 11 * SECOND, "{:?}", begun.elapsed());
    free(more).await;
    free(reader).await;
}

#[tokio::test(start_paused = true)]
async fn writer_that_gives_up_admits_readers_immediately() {
    let [client, other] = embedded_clients();
    let lock = client.read_write_lock("a").prefer_writers();
    let theirs = other.read_write_lock("a").prefer_writers();
    let reader = lock.read().lock().lease(HOUR).await.unwrap();
    let begun = Instant::now();
    let write = theirs.write().try_lock().wait(5 * SECOND);
    let writer = tokio::spawn(write.into_future());
    sleep(SECOND).await;
    let more = held(&lock.read()).await;
    assert_about(begun.elapsed(), 5 * SECOND);
    assert!(writer.await.unwrap().unwrap().is_none());
    free(more).await;

    let begun = Instant::now();
    let writer = tokio::spawn(theirs.write().lock().into_future());
    sleep(SECOND).await;
    let waiting = tokio::spawn(lock.read().lock().into_future());
    sleep(SECOND).await;
    assert!(!waiting.is_finished());
    writer.abort();
    let more = waiting.await.unwrap().unwrap();
    assert_about(begun.elapsed(), 2 * SECOND);
    free(more).await;
    free(reader).await;
}

/// The second writer of a client retries as soon as the first has released, and not before.
#[tokio::test(start_paused = true)]
async fn preferred_writers_of_one_client_take_turns() {
    let [client, other] = embedded_clients();
    let lock = client.read_write_lock("a").prefer_writers();
    let reading = other.read_write_lock("a").prefer_writers();
    let reader = held(&reading.read()).await;
    let writers = spawn_each(0..20, |_| {
        let lock = lock.clone();
        async move {
            let guard = held(&lock.write()).await;
            sleep(SECOND).await;
            free(guard).await;
        }
    });
    sleep(SECOND).await;
    let begun = Instant::now();
    free(reader).await;
    for writer in writers {
        writer.await.unwrap();
    }
    assert_about(begun.elapsed(), 20 * SECOND);
    free(held(&reading.read()).await).await;
    assert_about(begun.elapsed(), 20 * SECOND);
}
