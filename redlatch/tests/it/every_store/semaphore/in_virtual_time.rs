//! Tests of the semaphore in virtual time.

use crate::common::prelude::*;

#[tokio::test(start_paused = true)]
async fn time_limits_are_kept() {
    let client = Client::embedded();
    let semaphore = client.semaphore("a");
    let begun = tokio::time::Instant::now();
    let limited = semaphore.try_acquire().wait(600 * SECOND).await;
    assert!(limited.unwrap().is_none());
    assert_took(begun.elapsed(), 600 * SECOND..601 * SECOND);
    let set = semaphore.try_set_permits(1).time_to_live(60 * SECOND);
    set.await.unwrap();
    tokio::time::sleep(60 * SECOND - Duration::from_millis(1)).await;
    assert_eq!(semaphore.available().await.unwrap(), 1);
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert_eq!(semaphore.available().await.unwrap(), 0);
    assert!(!semaphore.delete().await.unwrap());
}

/// The end of a time to live sends no message: waiters keep waiting, and are served when permits
/// are set again.
#[tokio::test(start_paused = true)]
async fn waiters_outlive_the_semaphore() {
    let [client, other] = embedded_clients();
    let semaphore = client.semaphore("a");
    let set = semaphore.try_set_permits(1).time_to_live(60 * SECOND);
    set.await.unwrap();
    semaphore.acquire().await.unwrap().forget();
    let waiting = tokio::spawn(other.semaphore("a").acquire().into_future());
    tokio::time::sleep(600 * SECOND).await;
    assert!(!waiting.is_finished());
    assert!(semaphore.try_set_permits(1).await.unwrap());
    drop(waiting.await.unwrap().unwrap());
    other.flush().await;
    assert_eq!(semaphore.available().await.unwrap(), 1);
}
