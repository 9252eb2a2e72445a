//! Locks that stay locked for a minimum time after their release: [`redlatch::Acquire::at_least`].

use redlatch::HasMinimum;
use redlatch::kind::LockKind;
use tokio::time::Instant;

use crate::common::prelude::*;

on_every_store! {
    released_lock_is_kept_from_all_owners,
    waiters_acquire_at_end_of_time,
    forced_release_frees_lock_earlier,
}

/// The time until the lock is free.
async fn remaining<K: LockKind>(lock: &Lock<K>) -> Option<Duration> {
    let remaining = lock.remaining_lease().await.unwrap();
    remaining.and_then(Expiry::duration)
}

/// Releases a lock that must be kept for [`LONG`] with `acquire`, and tries to acquire it again.
async fn is_kept<K: OwnedKind>(lock: Lock<K>, other: Lock<K>)
where
    Lock<K>: HasMinimum,
{
    let me = Owner::new();
    let outer = lock.lock().owner(me).at_least(LONG).await.unwrap();
    free(outer.reenter().await.unwrap()).await;
    assert_eq!(lock.hold_count(me).await.unwrap(), 1);
    let released = outer.owner_id();
    free(outer).await;
    let holder = lock.holder().await.unwrap().expect("it is kept");
    assert_ne!(holder.owner, released);
    let client = |owner: &str| owner.rsplit_once(':').unwrap().0.to_owned();
    assert_eq!(client(holder.owner.as_str()), client(released.as_str()));
    assert!(holder.remaining > Expiry::In(LONG / 2));
    assert!(holder.remaining <= Expiry::In(LONG));
    assert!(!lock.is_held_by(me).await.unwrap());
    for lock in [&lock, &other] {
        assert!(lock.try_lock().await.unwrap().is_none());
        assert!(lock.try_lock().owner(me).await.unwrap().is_none());
    }
    // Nothing of the two refused attempts remains that could release it.
    let left = remaining(&lock).await.expect("it is still kept");
    assert!(left > LONG / 2 && left <= LONG);
}

async fn released_lock_is_kept_from_all_owners(store: TestStore) {
    let [client, other] = store.clients().await;
    let name = unique("kept");
    let [plain, fair, fenced, spin] =
        ["plain", "fair", "fenced", "spin"].map(|kind| format!("{name}:{kind}"));
    is_kept(client.lock(&plain), other.lock(&plain)).await;
    is_kept(client.fair_lock(&fair), other.fair_lock(&fair)).await;
    is_kept(client.fenced_lock(&fenced), other.fenced_lock(&fenced)).await;
    is_kept(client.spin_lock(&spin), other.spin_lock(&spin)).await;
    assert_eq!(client.status().holds, 0);
}

/// One waiter of the same client, one of another. The lease that they learn first is far longer.
async fn waiters_acquire_at_end_of_time(store: TestStore) {
    let clients: [Client; 2] = store.clients().await;
    let name = unique("end");
    wait_for_end(&clients, |client| client.lock(&name)).await;
    let name = unique("end");
    wait_for_end(&clients, |client| client.fair_lock(&name)).await;
}

async fn wait_for_end<K: OwnedKind>(clients: &[Client; 2], lock: impl Fn(&Client) -> Lock<K>)
where
    Lock<K>: HasMinimum,
{
    let (begun, at_least) = (Instant::now(), 2 * SECOND);
    let request = lock(&clients[0]).lock().at_least(at_least);
    let guard = request.await.unwrap();
    let wait = |client| {
        let lock = lock(client);
        tokio::spawn(async move {
            let guard = held(&lock).await;
            let waited = begun.elapsed();
            free(guard).await;
            waited
        })
    };
    let waiters = [0, 1].map(|i| wait(&clients[i]));
    for client in clients {
        let subscribed = async || client.status().subscriptions > 0;
        until("the waiter subscribes", subscribed).await;
    }
    drop(guard);
    for waiter in waiters {
        let waited = done("the lock is free", waiter).await;
        assert!(waited >= at_least, "{waited:?}");
    }
}

async fn forced_release_frees_lock_earlier(store: TestStore) {
    let (_client, lock) = store.object(Client::lock, "forced").await;
    lock.lock().at_least(LONG).run(async {}).await.unwrap();
    assert!(lock.force_unlock().await.unwrap());
    assert!(lock.try_lock().await.unwrap().is_some());
}

/// Timers have a resolution of a millisecond, and so has the lease that waiters learn.
#[track_caller]
fn assert_elapsed(elapsed: Duration, expected: Duration) {
    let late = elapsed.checked_sub(expected);
    let is_exact = late.is_some_and(|late| late < Duration::from_millis(3));
    assert!(is_exact, "{elapsed:?}, not {expected:?}");
}

/// Waits until another client acquires the lock. Returns the time since `begun`.
async fn free_after(other: &Client, begun: Instant) -> Duration {
    let guard = held(&other.lock("a")).await;
    let elapsed = begun.elapsed();
    free(guard).await;
    elapsed
}

#[tokio::test(start_paused = true)]
async fn lock_is_free_exactly_at_end_of_time() {
    // Shorter and longer than the lease of the watchdog; with a fixed lease.
    for at_least in [5 * SECOND, 50 * SECOND] {
        for lease in [None, Some(60 * SECOND)] {
            let [client, other] = embedded_clients();
            let begun = Instant::now();
            let mut request = client.lock("a").lock().at_least(at_least);
            if let Some(lease) = lease {
                request = request.lease(lease);
            }
            let guard = request.await.unwrap();
            let waiter = tokio::spawn(async move { free_after(&other, begun).await });
            sleep(3 * SECOND).await;
            free(guard).await;
            // The process ends.
            drop(client);
            assert_elapsed(waiter.await.unwrap(), at_least);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn release_after_time_frees_lock_immediately() {
    let [client, other] = embedded_clients();
    let begun = Instant::now();
    let request = client.lock("a").lock().at_least(5 * SECOND);
    request.run(sleep(7 * SECOND)).await.unwrap();
    assert_elapsed(free_after(&other, begun).await, 7 * SECOND);
}

/// Without the time, the hold passes to the waiter of this client at the release.
#[tokio::test(start_paused = true)]
async fn kept_lock_does_not_pass_to_waiter_of_same_client() {
    for is_transfer in [false, true] {
        let [client, _] = embedded_clients();
        let begun = Instant::now();
        let lock = client.lock("a");
        let request = |lock: &Lock| match is_transfer {
            // A hold with a known owner is transferred, others are handed over.
            true => lock.lock().owner(Owner::new()),
            false => lock.lock(),
        };
        let guard = request(&lock).at_least(5 * SECOND).await.unwrap();
        let next = request(&lock);
        let waiter = tokio::spawn(async move {
            let guard = next.await.unwrap();
            (guard, begun.elapsed())
        });
        // Later it would not pass on in any case: the client does not know whether others wait.
        sleep(Duration::from_millis(1)).await;
        free(guard).await;
        let (guard, waited) = waiter.await.unwrap();
        assert_elapsed(waited, 5 * SECOND);
        // The next hold is not kept.
        free(guard).await;
        assert!(!lock.is_locked().await.unwrap());
    }
}

/// The time of an earlier hold of the same owner does not count for the next one.
#[tokio::test(start_paused = true)]
async fn each_hold_has_its_own_time() {
    let [client, other] = embedded_clients();
    let (lock, me) = (client.lock("a"), Owner::new());
    let guard = lock.lock().owner(me).at_least(5 * SECOND).await.unwrap();
    let longer = guard.reenter().at_least(8 * SECOND).await.unwrap();
    free(longer).await;
    let begun = Instant::now();
    free(guard).await;
    assert_elapsed(free_after(&other, begun).await, 8 * SECOND);
    free(lock.lock().owner(me).await.unwrap()).await;
    assert!(!lock.is_locked().await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn kept_fenced_lock_has_no_token() {
    let [client, _] = embedded_clients();
    let lock = client.fenced_lock("a");
    let me = Owner::new();
    let first = lock.lock().owner(me).at_least(5 * SECOND).await.unwrap();
    assert_eq!(first.token(), 1);
    free(first).await;
    assert_eq!(lock.lock().owner(me).await.unwrap().token(), 2);
}

#[tokio::test(start_paused = true)]
async fn dropped_release_keeps_lock() {
    let [client, other] = embedded_clients();
    let begun = Instant::now();
    let guard = client.lock("a").lock().at_least(5 * SECOND).await.unwrap();
    drop(guard.unlock());
    client.flush().await;
    assert_elapsed(free_after(&other, begun).await, 5 * SECOND);
}

#[tokio::test]
async fn invalid_time_is_an_error() {
    let lock = Client::embedded().lock("a");
    for time in [Duration::ZERO, Duration::MAX] {
        let error = lock.lock().at_least(time).await.unwrap_err();
        let Error::InvalidSetting { setting, .. } = &error else {
            panic!("{error}");
        };
        assert_eq!(*setting, "at_least");
    }
    assert!(!lock.is_locked().await.unwrap());
}

/// Its request begins while the release is in flight, so both concern the same hold.
#[tokio::test(start_paused = true)]
async fn owner_that_gives_up_leaves_the_queue_of_a_kept_lock() {
    let client = Client::embedded();
    let (lock, me) = (client.fair_lock("a"), Owner::new());
    drop(lock.lock().owner(me).at_least(60 * SECOND).await.unwrap());
    let refused = lock.try_lock().owner(me).wait(10 * SECOND).await;
    assert!(refused.unwrap().is_none());
    client.flush().await;
    assert_eq!(lock.queue().await.unwrap(), []);
}

#[tokio::test(start_paused = true)]
async fn lock_that_was_lost_at_its_limit_is_kept_from_its_owner() {
    let client = Client::embedded();
    let (lock, me, begun) = (client.lock("a"), Owner::new(), Instant::now());
    let request = lock.lock().owner(me).at_least(60 * SECOND);
    let hanging = request.at_most(10 * SECOND).await.unwrap();
    hanging.lost().await;
    let again = lock.lock().owner(me).await.unwrap();
    assert!(begun.elapsed() >= 60 * SECOND);
    drop((hanging, again));
}

#[tokio::test]
async fn lease_that_ends_before_the_minimum_is_refused() {
    let lock = Client::embedded().lock("a");
    let request = lock.lock().at_least(60 * SECOND).lease(59 * SECOND);
    let setting = match request.await {
        Err(Error::InvalidSetting { setting, .. }) => setting,
        other => panic!("{other:?}"),
    };
    assert_eq!(setting, "at_least");
}
