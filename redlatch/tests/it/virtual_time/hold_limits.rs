//! Limits of holds that the watchdog renews: `at_most` and `fed_every`.

use std::future::pending;

use redlatch::HasLease;
use tokio::time::Instant;

use crate::common::prelude::*;

const AFTER_HOUR: Loss = Loss::HeldTooLong { limit: HOUR };

/// Asserts that a hold that began now lasts for exactly an hour, and that a later release reports the limit.
async fn assert_lost_after_hour<R: HasLease>(guard: Guard<R>) {
    let begun = Instant::now();
    let lost = tokio::spawn(guard.lost());
    sleep(HOUR - Duration::from_millis(1)).await;
    assert!(guard.is_valid() && !lost.is_finished());
    guard.feed().unwrap();
    // A timer may fire up to a millisecond late.
    let late = Duration::from_millis(2);
    timeout(late, lost).await.unwrap().unwrap();
    assert!(begun.elapsed() >= HOUR);
    assert!(!guard.is_valid());
    assert_lost(guard.feed(), AFTER_HOUR);
    assert_lost(guard.unlock().await, AFTER_HOUR);
}

/// Returns what this returns after an hour, and asserts that it does so after less than an hour and a second.
async fn after_hour<T>(work: impl IntoFuture<Output = T>) -> T {
    let begun = Instant::now();
    let done = timeout(HOUR + SECOND, work.into_future()).await.unwrap();
    assert!(begun.elapsed() >= HOUR, "{:?}", begun.elapsed());
    done
}

/// The waiter also waits for as long as its own limit, which only starts when it acquires the lock.
async fn waiter_acquires_at_limit<K: OwnedKind>(held: Lock<K>, awaited: Lock<K>) {
    let guard = held.lock().at_most(HOUR).await.unwrap();
    let next = after_hour(awaited.lock().at_most(HOUR)).await.unwrap();
    assert!(!guard.is_valid() && next.is_valid());
    assert_lost_after_hour(next).await;
    sleep(SECOND).await;
    assert!(!awaited.is_locked().await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn waiter_of_any_kind_acquires_at_limit_of_hanging_holder() {
    let [one, other] = embedded_clients();
    let side = |client: &Client| client.read_write_lock("a");
    // Of another client, of the same client, and for an owner that the caller named.
    for awaiting in [&other, &one] {
        waiter_acquires_at_limit(one.lock("a"), awaiting.lock("a")).await;
        waiter_acquires_at_limit(one.fair_lock("b"), awaiting.fair_lock("b")).await;
        waiter_acquires_at_limit(one.fenced_lock("c"), awaiting.fenced_lock("c")).await;
        waiter_acquires_at_limit(one.spin_lock("d"), awaiting.spin_lock("d")).await;
        waiter_acquires_at_limit(side(&one).write(), side(awaiting).write()).await;
    }
}

#[tokio::test(start_paused = true)]
async fn reader_is_lost_at_limit() {
    let [one, other] = embedded_clients();
    let reader = one.read_write_lock("a").read().lock().at_most(HOUR);
    let reader = reader.await.unwrap();
    let writer = after_hour(other.read_write_lock("a").write().lock()).await;
    let writer = writer.unwrap();
    assert!(!reader.is_valid() && writer.is_valid());
}

/// The read side of a writer would otherwise be renewed for ever.
#[tokio::test(start_paused = true)]
async fn read_side_has_limit_of_writer() {
    let [client, other] = embedded_clients();
    let lock = client.read_write_lock("a");
    let writer = lock.write().lock().at_most(HOUR).await.unwrap();
    let reader = writer.reenter_read().await.unwrap();
    sleep(HOUR / 2).await;
    let reader_of_second = writer.reenter().await.unwrap();
    let downgraded = reader_of_second.downgrade().await.unwrap();
    let next = other.read_write_lock("a").write().lock();
    let next = timeout(HOUR, next.into_future()).await.unwrap().unwrap();
    assert!(!writer.is_valid() && !reader.is_valid() && !downgraded.is_valid());
    assert!(next.is_valid());
}

#[tokio::test(start_paused = true)]
async fn permits_are_released_at_limit() {
    let [one, other] = embedded_clients();
    let semaphores = [&one, &other].map(|client| client.expirable_semaphore("a"));
    semaphores[0].try_set_permits(2).await.unwrap();
    let both = semaphores[0].acquire_many(2).at_most(HOUR).await.unwrap();
    let one = after_hour(semaphores[1].acquire()).await.unwrap();
    assert!(one.is_valid());
    assert_lost(both.release().await, AFTER_HOUR);
}

#[tokio::test(start_paused = true)]
async fn several_locks_are_lost_at_limit() {
    let [one, other] = embedded_clients();
    let names = ["a", "b", "c"];
    let both = MultiLock::new(names.map(|name| one.lock(name)));
    assert_lost_after_hour(both.lock().at_most(HOUR).await.unwrap()).await;
    let guard = both.lock().at_most(HOUR).await.unwrap();
    let next = MultiLock::new(names.map(|name| other.lock(name)));
    let next = after_hour(next.lock()).await.unwrap();
    assert!(!guard.is_valid() && next.is_valid());

    let clients = [(); 3].map(|()| Client::embedded());
    let red = RedLock::new(clients.each_ref().map(|client| client.lock("a")));
    assert_lost_after_hour(red.lock().at_most(HOUR).await.unwrap()).await;
    let guard = red.lock().at_most(HOUR).await.unwrap();
    let next = after_hour(red.lock()).await.unwrap();
    assert!(!guard.is_valid() && next.is_valid());
}

/// The same owner acquires again, which is a hold of its own.
#[tokio::test(start_paused = true)]
async fn released_hold_leaves_no_limit_behind() {
    let [client, other] = embedded_clients();
    let (lock, me) = (client.lock("a"), Owner::new());
    let limited = lock.lock().owner(me).at_most(HOUR).fed_every(HOUR);
    free(limited.await.unwrap()).await;
    let guard = lock.lock().owner(me).await.unwrap();
    sleep(3 * HOUR).await;
    assert!(guard.is_valid());
    assert!(other.lock("a").try_lock().await.unwrap().is_none());
    free(guard).await;
}

#[tokio::test(start_paused = true)]
async fn lost_owner_acquires_again() {
    let [client, other] = embedded_clients();
    let (lock, me) = (client.lock("a"), Owner::new());
    let hanging = lock.lock().owner(me).at_most(HOUR).await.unwrap();
    after_hour(hanging.lost()).await;
    let again = lock.lock().owner(me).await.unwrap();
    // The release of the lost hold, and its guard, do not remove the later one.
    sleep(HOUR).await;
    drop(hanging);
    sleep(HOUR).await;
    assert!(again.is_valid() && lock.is_held_by(me).await.unwrap());
    assert!(other.lock("a").try_lock().await.unwrap().is_none());
    free(again).await;
}

#[tokio::test(start_paused = true)]
async fn fed_hold_lasts_until_it_is_not_fed() {
    let [client, other] = embedded_clients();
    let lock = client.lock("a");
    let guard = lock.lock().fed_every(60 * SECOND).await.unwrap();
    for _ in 0..100 {
        sleep(59 * SECOND).await;
        guard.feed().unwrap();
    }
    let waiting = tokio::spawn(other.lock("a").lock().into_future());
    let begun = Instant::now();
    guard.lost().await;
    assert_took(begun.elapsed(), 60 * SECOND..61 * SECOND);
    let next = waiting.await.unwrap().unwrap();
    assert!(begun.elapsed() < 61 * SECOND);
    let not_fed = Loss::NotFed { limit: 60 * SECOND };
    let error = guard.feed().unwrap_err();
    assert_matches!(&error, Error::Lost { reason, .. } if *reason == not_fed);
    let said = error.to_string();
    assert!(said.contains("its holder did not feed it for 60s"));
    assert!(!guard.is_valid() && next.is_valid());
    free(next).await;
    assert_lost(guard.unlock().await, not_fed);
}

/// The loss is known before the watchdog runs, for example after the process was stopped.
#[tokio::test(start_paused = true)]
async fn hold_that_is_fed_too_late_is_lost() {
    let client = Client::embedded();
    let guard = client.lock("a").lock().fed_every(SECOND).await.unwrap();
    let checks = async {
        tokio::time::advance(SECOND).await;
        guard.feed()
    };
    assert!(matches!(checks.await, Err(Error::Lost { .. })));
}

/// Feeds a hold shortly before the end of each minute.
async fn feed_ten_times<R: HasLease>(guard: &Guard<R>) {
    for _ in 0..10 {
        sleep(59 * SECOND).await;
        guard.feed().unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn several_locks_are_fed_together() {
    let clients = [(); 3].map(|()| Client::embedded());
    let locks = || clients.each_ref().map(|client| client.lock("a"));
    let multi = MultiLock::new(locks()).lock().fed_every(60 * SECOND);
    let multi = multi.await.unwrap();
    feed_ten_times(&multi).await;
    free(multi).await;
    let red = RedLock::new(locks()).lock().fed_every(60 * SECOND);
    let red = red.await.unwrap();
    feed_ten_times(&red).await;
    let begun = Instant::now();
    red.lost().await;
    assert_took(begun.elapsed(), 60 * SECOND..61 * SECOND);
    let limit = 60 * SECOND;
    assert_lost(red.feed(), Loss::NotFed { limit });
}

/// Its owner holds one of the locks already, without a limit.
#[tokio::test(start_paused = true)]
async fn failed_request_for_several_locks_limits_no_hold() {
    let [client, peer] = embedded_clients();
    let owner = Owner::new();
    let fair = || client.fair_lock("fair");
    let held = fair().lock().owner(owner).await.unwrap();
    let _blocking = peer.fair_lock("other").lock().await.unwrap();
    // A fair lock is acquired by a script of its own.
    let both = MultiLock::new([fair(), client.fair_lock("other")]);
    let refused = both.try_lock().owner(owner).at_most(5 * SECOND);
    assert!(refused.await.unwrap().is_none());
    let others = [(); 2].map(|()| Client::embedded());
    let [second, third] = others.each_ref().map(|client| client.fair_lock("fair"));
    let _taken = [second.lock().await.unwrap(), third.lock().await.unwrap()];
    let majority = RedLock::new([fair(), second, third]);
    let refused = majority.try_lock().owner(owner).at_most(5 * SECOND);
    assert!(refused.await.unwrap().is_none());
    sleep(100 * SECOND).await;
    assert!(held.is_valid());
    free(held).await;
}

#[tokio::test(start_paused = true)]
async fn earliest_limit_applies_to_all_guards_of_owner() {
    let [client, _] = embedded_clients();
    let lock = client.lock("a");
    let outer = held(&lock).await;
    sleep(HOUR).await;
    let inner = outer.reenter().at_most(HOUR).await.unwrap();
    let longer = outer.reenter().at_most(3 * HOUR).await.unwrap();
    free(inner).await;
    after_hour(outer.lost()).await;
    assert_lost(longer.unlock().await, AFTER_HOUR);
    assert_lost(outer.reenter().await, AFTER_HOUR);
}

#[tokio::test(start_paused = true)]
async fn any_guard_feeds_hold() {
    let client = Client::embedded();
    let outer = client.lock("a").lock().fed_every(60 * SECOND).await;
    let outer = outer.unwrap();
    let inner = outer.reenter().fed_every(20 * SECOND).await.unwrap();
    for _ in 0..50 {
        sleep(19 * SECOND).await;
        outer.feed().unwrap();
        sleep(19 * SECOND).await;
        inner.feed().unwrap();
    }
    sleep(21 * SECOND).await;
    let limit = 20 * SECOND;
    assert_lost(outer.feed(), Loss::NotFed { limit });
}

/// The next task of the client gets the same hold in the store, or a transferred one.
#[tokio::test(start_paused = true)]
async fn next_task_of_client_has_limit_of_its_own() {
    let [client, other] = embedded_clients();
    let lock = client.lock("a");
    for owner in [None, Some(Owner::new())] {
        let request = |lock: &Lock| match owner {
            None => lock.lock(),
            Some(owner) => lock.lock().owner(owner),
        };
        // From a limit to none, and from none to a limit.
        for (first, second) in [(Some(HOUR), None), (None, Some(HOUR))] {
            let limited = |limit: Option<Duration>| match limit {
                Some(limit) => request(&lock).at_most(limit),
                None => request(&lock),
            };
            let guard = lock.lock().at_most(first.unwrap_or(Duration::MAX));
            let guard = guard.await.unwrap();
            let waiting = tokio::spawn(limited(second).into_future());
            // For less than the time after which a hold is not handed over.
            sleep(Duration::from_millis(5)).await;
            let known = lock.holder().await.unwrap().unwrap().owner;
            free(guard).await;
            let next = waiting.await.unwrap().unwrap();
            let is_handed_over = lock.holder().await.unwrap().unwrap().owner == known;
            assert_eq!(is_handed_over, owner.is_none());
            match second {
                Some(_) => assert_lost_after_hour(next).await,
                None => {
                    sleep(3 * HOUR).await;
                    assert!(next.is_valid());
                    assert!(other.lock("a").try_lock().await.unwrap().is_none());
                    free(next).await;
                }
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn earlier_of_fixed_lease_and_limit_applies() {
    let client = Client::embedded();
    let lock = client.lock("a");
    for (lease, limit, reason) in [
        (2 * HOUR, HOUR, AFTER_HOUR),
        (HOUR, 2 * HOUR, Loss::LeaseEnded),
    ] {
        let guard = lock.lock().lease(lease).at_most(limit).await.unwrap();
        assert_eq!(guard.valid_for(), HOUR);
        after_hour(guard.lost()).await;
        assert_lost(guard.unlock().await, reason);
        sleep(SECOND).await;
        assert!(!lock.is_locked().await.unwrap());
    }
}

#[tokio::test(start_paused = true)]
async fn zero_is_refused_and_unrepresentable_time_is_no_limit() {
    let client = Client::embedded();
    let lock = client.lock("a");
    let both = MultiLock::new([&lock]);
    let red = RedLock::new([&lock]);
    let zero = Duration::ZERO;
    let me = Owner::new();
    let refused = [
        lock.lock().at_most(zero).await.map(drop),
        lock.lock().fed_every(zero).await.map(drop),
        lock.lock().owner(me).at_most(zero).await.map(drop),
        lock.try_lock().at_most(zero).await.map(drop),
        both.lock().at_most(zero).await.map(drop),
        red.lock().fed_every(zero).await.map(drop),
    ];
    for refused in refused {
        assert!(matches!(refused, Err(Error::InvalidSetting { .. })));
    }
    assert!(!lock.is_locked().await.unwrap());
    let endless = lock.lock().at_most(Duration::MAX).fed_every(Duration::MAX);
    let guard = endless.await.unwrap();
    sleep(24 * HOUR).await;
    guard.feed().unwrap();
    free(guard).await;
}

#[tokio::test(start_paused = true)]
async fn run_drops_work_at_limit() {
    let client = Client::embedded();
    let lock = client.lock("a");
    let reasons = [AFTER_HOUR, Loss::NotFed { limit: SECOND }];
    for reason in reasons {
        let request = || match reason {
            AFTER_HOUR => lock.try_lock().at_most(HOUR),
            _ => lock.try_lock().fed_every(SECOND),
        };
        let begun = Instant::now();
        assert_lost(request().run(pending::<()>()).await, reason);
        assert!(begun.elapsed() <= HOUR + Duration::from_millis(1));
        client.flush().await;
        assert!(!lock.is_locked().await.unwrap());
    }
}

/// The lease of the holder ends long after the test, so the other client acquires the lock only after its release.
async fn hanging_holder_is_replaced_at_limit(store: TestStore) {
    let [holder, other] = store.clients_without_retries().await;
    let name = unique("limit");
    let lock = holder.lock(&name);
    let limit = 2 * SECOND;
    let begun = Instant::now();
    let guard = lock.lock().at_most(limit).await.unwrap();
    let hanging = tokio::spawn(async move { guard.run(pending::<()>()).await });
    let lock = other.lock(&name);
    let next = within_limit("acquired", lock.lock()).await;
    assert_took(begun.elapsed(), limit..LONG);
    assert_lost(hanging.await.unwrap(), Loss::HeldTooLong { limit });
    // The guard was dropped, and its release has not removed the hold of the other client.
    holder.flush().await;
    free(next.unwrap()).await;
}

on_every_store! { hanging_holder_is_replaced_at_limit, }
