//! Conformance tests: the lock behaves the same on every store.

use crate::common::prelude::*;

on_every_store_and_deployment! {
    free_lock_is_acquired_and_released,
    tasks_that_share_a_handle_exclude_each_other,
    clients_exclude_and_wake_each_other,
    try_lock_does_not_wait,
    try_lock_keeps_its_wait_limit,
    wait_beyond_clock_range_is_unlimited,
    guard_can_be_reentered,
    owner_can_reenter,
    owner_can_reenter_while_others_wait,
    scope_sets_the_owner,
    non_reentrant_lock_refuses_its_owner_immediately,
    fixed_lease_expires,
    reentering_never_shortens_the_lease,
    reentering_can_extend_the_lease,
    force_unlock_notifies_holder_and_wakes_waiter,
    dropping_a_guard_releases,
    dropping_inner_guard_keeps_outer_hold,
    released_guard_does_not_report_loss,
    run_returns_the_result_and_releases,
    run_drops_its_future_when_the_lock_is_lost,
    held_locks_can_be_listed,
    names_that_look_like_auxiliary_keys_are_listed,
    prefixes_keep_clients_apart,
    waiters_of_one_client_are_served_in_order,
    owner_can_acquire_again_after_loss,
    no_state_remains_after_release,
}

async fn free_lock_is_acquired_and_released(store: TestStore) {
    let (client, lock) = store.object(Client::lock, "free").await;
    assert!(!lock.is_locked().await.unwrap());
    assert_eq!(lock.remaining_lease().await.unwrap(), None);

    let guard = held(&lock).await;
    assert!(guard.is_valid());
    assert_eq!(guard.hold_count(), 1);
    assert_eq!(guard.name(), lock.name());
    assert_eq!(guard.owner_id(), client.owner_id(guard.owner()));
    assert!(lock.is_locked().await.unwrap());
    assert!(lock.is_held_by(guard.owner()).await.unwrap());
    assert!(!lock.is_held_by(Owner::new()).await.unwrap());
    assert_eq!(lock.hold_count(guard.owner()).await.unwrap(), 1);
    let left = lease_left(&lock).await;
    assert!(left > Duration::ZERO && left <= Duration::from_secs(30));
    assert!(guard.valid_for() <= left + Duration::from_millis(1));
    let holder = lock.holder().await.unwrap().unwrap();
    assert_eq!(holder.owner, guard.owner_id());
    assert_eq!(holder.holds, 1);

    free(guard).await;
    assert!(!lock.is_locked().await.unwrap());
    assert_eq!(lock.holder().await.unwrap(), None);
}

async fn tasks_that_share_a_handle_exclude_each_other(store: TestStore) {
    let (_client, lock) = store.object(Client::lock, "tasks").await;
    let inside = Arc::new(AtomicBool::new(false));
    let turns = Arc::new(AtomicU32::new(0));
    let tasks = spawn_each(0..16, |_| {
        let (lock, inside, turns) = (lock.clone(), inside.clone(), turns.clone());
        async move {
            for _ in 0..20 {
                let guard = held(&lock).await;
                assert!(!inside.swap(true, Ordering::SeqCst), "two at once");
                tokio::task::yield_now().await;
                inside.store(false, Ordering::SeqCst);
                turns.fetch_add(1, Ordering::SeqCst);
                free(guard).await;
            }
        }
    });
    done_all("every task has its turns", tasks).await;
    assert_eq!(turns.load(Ordering::SeqCst), 320);
    assert!(!lock.is_locked().await.unwrap());
}

async fn clients_exclude_and_wake_each_other(store: TestStore) {
    let [one, two] = store.clients().await;
    assert_ne!(one.id(), two.id());
    let name = unique("clients");
    let guard = held(&one.lock(&name)).await;
    let lock = two.lock(&name);
    let waiter = tokio::spawn(async move { lock.lock().await });
    until_subscribed(&two, 1).await;
    assert!(!waiter.is_finished());
    free(guard).await;
    let theirs = joined("woken", waiter).await;
    assert!(two.lock(&name).is_held_by(theirs.owner()).await.unwrap());
    free(theirs).await;
}

async fn try_lock_does_not_wait(store: TestStore) {
    let (_client, lock) = store.object(Client::lock, "try").await;
    let guard = lock.try_lock().await.unwrap().unwrap();
    assert!(lock.try_lock().await.unwrap().is_none());
    let not_waiting = lock.try_lock().wait(Duration::ZERO).await;
    assert!(not_waiting.unwrap().is_none());
    free(guard).await;
    assert!(lock.try_lock().await.unwrap().is_some());
}

async fn try_lock_keeps_its_wait_limit(store: TestStore) {
    let (client, lock) = store.object(Client::lock, "wait").await;
    let guard = held(&lock).await;
    let wait = Duration::from_millis(30);
    let begun = std::time::Instant::now();
    assert!(retry_if_late(|| lock.try_lock().wait(wait)).await.is_none());
    assert!(begun.elapsed() >= wait);

    let waiter = lock.try_lock().wait(LONG).into_future();
    let waiter = tokio::spawn(waiter);
    until_subscribed(&client, 1).await;
    free(guard).await;
    assert!(joined("woken", waiter).await.is_some());
}

async fn wait_beyond_clock_range_is_unlimited(store: TestStore) {
    let (client, lock) = store.object(Client::lock, "ever").await;
    let guard = held(&lock).await;
    let waiter = waiter_of(&client, lock.try_lock().wait(Duration::MAX)).await;
    free(guard).await;
    assert!(joined("woken", waiter).await.is_some());
}

async fn guard_can_be_reentered(store: TestStore) {
    let (_client, lock) = store.object(Client::lock, "again").await;
    let outer = held(&lock).await;
    let inner = outer.reenter().await.unwrap();
    assert_eq!(outer.owner(), inner.owner());
    assert_eq!((outer.hold_count(), inner.hold_count()), (2, 2));
    assert_eq!(lock.hold_count(outer.owner()).await.unwrap(), 2);
    // The order of the releases does not matter.
    free(outer).await;
    assert_eq!(lock.hold_count(inner.owner()).await.unwrap(), 1);
    assert!(lock.try_lock().await.unwrap().is_none());
    free(inner).await;
    assert!(!lock.is_locked().await.unwrap());
}

async fn owner_can_reenter(store: TestStore) {
    let (_client, lock) = store.object(Client::lock, "owner").await;
    let (me, other) = (Owner::new(), Owner::new());
    let mut guards = Vec::new();
    for n in 1..=5 {
        guards.push(lock.lock().owner(me).await.unwrap());
        assert_eq!(lock.hold_count(me).await.unwrap(), n);
    }
    assert!(lock.try_lock().owner(other).await.unwrap().is_none());
    for guard in guards {
        assert!(lock.is_held_by(me).await.unwrap());
        free(guard).await;
    }
    assert!(lock.try_lock().owner(other).await.unwrap().is_some());
}

async fn owner_can_reenter_while_others_wait(store: TestStore) {
    let (client, lock) = store.object(Client::lock, "overtake").await;
    let outer = held(&lock).await;
    let waiter = waiter_of(&client, lock.lock()).await;
    // Queued behind the waiter, it would deadlock.
    free(done("re-entered", outer.reenter()).await).await;
    free(outer).await;
    drop(joined("woken", waiter).await);
}

async fn scope_sets_the_owner(store: TestStore) {
    let (client, lock) = store.object(Client::lock, "scope").await;
    let me = Owner::new();
    assert_eq!(Owner::current(), None);
    me.scope(async {
        assert_eq!(Owner::current(), Some(me));
        let outer = held(&lock).await;
        assert_eq!(outer.owner(), me);
        let _inner = held(&lock).await;
        let other = lock.try_lock().owner(Owner::new()).await.unwrap();
        // An owner set by the caller has precedence over the scope's.
        assert!(other.is_none());
        let outside = lock.clone();
        let spawned = tokio::spawn(async move { outside.try_lock().await });
        assert!(spawned.await.unwrap().unwrap().is_none());
    })
    .await;
    client.flush().await;
    assert!(!lock.is_locked().await.unwrap());
}

async fn non_reentrant_lock_refuses_its_owner_immediately(store: TestStore) {
    let client = store.client().await;
    let lock = client.lock(&unique("non-reentrant")).non_reentrant();
    let me = Owner::new();
    let guard = lock.lock().owner(me).await.unwrap();
    for refused in [
        within_limit("refused", lock.lock().owner(me)).await.err(),
        lock.try_lock().owner(me).await.err(),
        guard.reenter().await.err(),
    ] {
        assert_matches!(refused, Some(Error::AlreadyHeld { .. }));
    }
    assert!(guard.is_valid());
    // Others wait as ever.
    assert!(lock.try_lock().await.unwrap().is_none());
    free(guard).await;
    free(lock.lock().owner(me).await.unwrap()).await;
}

async fn fixed_lease_expires(store: TestStore) {
    let (_client, lock) = store.object(Client::lock, "lease").await;
    let lease = Duration::from_millis(300);
    let guard = retry_if_late(|| lock.lock().lease(lease)).await;
    assert!(guard.valid_for() <= lease);
    let next = done("the lease ends", lock.lock()).await;
    within_limit("the loss is reported", guard.lost()).await;
    assert!(!guard.is_valid());
    assert_eq!(guard.valid_for(), Duration::ZERO);
    assert_lost(guard.unlock().await, Loss::LeaseEnded);
    // The late unlock did not release the next holder's lock.
    assert!(lock.is_held_by(next.owner()).await.unwrap());
    free(next).await;
}

async fn reentering_never_shortens_the_lease(store: TestStore) {
    let (_client, lock) = store.object(Client::lock, "shorter").await;
    let outer = lock.lock().lease(LONG).await.unwrap();
    let inner = outer.reenter().lease(Duration::from_millis(20));
    let inner = inner.await.unwrap();
    assert!(outer.valid_for() > LONG / 2);
    assert!(lease_left(&lock).await > LONG / 2);
    free(inner).await;
    assert!(lease_left(&lock).await > LONG / 2);
    assert!(outer.is_valid());
    free(outer).await;
}

async fn reentering_can_extend_the_lease(store: TestStore) {
    let (_client, lock) = store.object(Client::lock, "longer").await;
    let outer = lock.lock().lease(LONG).await.unwrap();
    let inner = outer.reenter().lease(3 * LONG).await.unwrap();
    assert!(outer.valid_for() > 2 * LONG);
    assert!(lease_left(&lock).await > 2 * LONG);
    free(inner).await;
    free(outer).await;
}

async fn force_unlock_notifies_holder_and_wakes_waiter(store: TestStore) {
    let holder = store.client_with(renewing()).await;
    let other = store.client().await;
    let name = unique("force");
    let lock = other.lock(&name);
    assert!(!lock.force_unlock().await.unwrap(), "it was not held");

    let renewed = held(&holder.lock(&name)).await;
    let waiter = waiter_of(&other, lock.lock()).await;
    assert!(lock.force_unlock().await.unwrap());
    let next = joined("woken", waiter).await;
    within_limit("the loss is reported at the next renewal", renewed.lost()).await;
    assert_lost(renewed.unlock().await, Loss::NotHeld);
    assert!(next.is_valid());
    free(next).await;

    let fixed = holder.lock(&name).lock().lease(LONG).await.unwrap();
    assert!(lock.force_unlock().await.unwrap());
    assert_lost(fixed.unlock().await, Loss::NotHeld);
}

async fn dropping_a_guard_releases(store: TestStore) {
    let (client, lock) = store.object(Client::lock, "drop").await;
    drop(held(&lock).await);
    client.flush().await;
    assert!(!lock.is_locked().await.unwrap());
    // Dropping a guard wakes a waiter just as unlocking does.
    let guard = held(&lock).await;
    let waiter = waiter_of(&client, lock.lock()).await;
    drop(guard);
    drop(joined("woken", waiter).await);
}

async fn dropping_inner_guard_keeps_outer_hold(store: TestStore) {
    let (client, lock) = store.object(Client::lock, "inner").await;
    let outer = held(&lock).await;
    drop(outer.reenter().await.unwrap());
    client.flush().await;
    assert_eq!(outer.hold_count(), 1);
    assert_eq!(lock.hold_count(outer.owner()).await.unwrap(), 1);
    assert!(outer.is_valid());
    free(outer).await;
    assert!(!lock.is_locked().await.unwrap());
}

async fn released_guard_does_not_report_loss(store: TestStore) {
    let (_client, lock) = store.object(Client::lock, "released").await;
    let lost = retry_if_late(|| async {
        let guard = lock.lock().lease(Duration::from_millis(200)).await?;
        let lost = guard.lost();
        guard.unlock().await?;
        Ok(lost)
    })
    .await;
    let reported = tokio::time::timeout(Duration::from_millis(300), lost).await;
    assert!(reported.is_err(), "a loss was reported after the release");
}

async fn run_returns_the_result_and_releases(store: TestStore) {
    let (_client, lock) = store.object(Client::lock, "run").await;
    let inside = lock.clone();
    let held = lock.run(async move { inside.is_locked().await.unwrap() });
    assert!(held.await.unwrap());
    assert!(!lock.is_locked().await.unwrap());
}

async fn run_drops_its_future_when_the_lock_is_lost(store: TestStore) {
    struct Dropped(Arc<AtomicBool>);
    impl Drop for Dropped {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    let client = store.client_with(renewing()).await;
    let lock = client.lock(&unique("run-lost"));
    let dropped = Arc::new(AtomicBool::new(false));
    let sign = Dropped(dropped.clone());
    let inside = lock.clone();
    let run = lock.run(async move {
        let _sign = sign;
        assert!(inside.force_unlock().await.unwrap());
        std::future::pending::<()>().await
    });
    assert_matches!(within_limit("lost", run).await, Err(Error::Lost { .. }));
    assert!(dropped.load(Ordering::SeqCst));
}

async fn held_locks_can_be_listed(store: TestStore) {
    let client = store.client().await;
    let family = unique("list");
    let guards = held_all((0..250).map(|n| client.lock(&format!("{family}:{n}")))).await;
    let mut names = Vec::new();
    let mut listing = client.list(&format!("{family}:*"));
    while let Some(found) = listing.next().await.unwrap() {
        assert_eq!(found.state.kind().to_string(), "lock");
        assert_eq!(found.state.holders()[0].holds, 1);
        names.push(found.name);
    }
    names.sort();
    names.dedup();
    let mut expected: Vec<_> = guards.iter().map(|guard| guard.name().to_owned()).collect();
    expected.sort();
    assert_eq!(names, expected);
    let mut none = client.list(&format!("{family}-not:*"));
    assert_eq!(none.next().await.unwrap(), None);
}

async fn names_that_look_like_auxiliary_keys_are_listed(store: TestStore) {
    let client = store.client().await;
    let end = unique("beside");
    let mut names = [
        format!("redlatch_leader-{end}"),
        format!("redisson_lock_x-{end}"),
        format!("redisson_lock_token:{end}"),
        format!("a:rwlock_timeout:{end}"),
    ];
    names.sort();
    let _guards = held_all(names.iter().map(|name| client.lock(name))).await;
    // Keys that really belong to other objects are not listed as locks.
    let fenced = client.fenced_lock(&format!("fenced-{end}")).lock().await;
    let read_write = client.read_write_lock(&format!("rw-{end}"));
    let reads = held(&read_write.read()).await;
    let mut found = Vec::new();
    let mut listing = client.list(&format!("*{end}*"));
    while let Some(listed) = listing.next().await.unwrap() {
        found.push(listed.name);
    }
    found.sort();
    found.dedup();
    let mut expected = names.to_vec();
    expected.extend([fenced.unwrap().name(), reads.name()].map(str::to_owned));
    expected.sort();
    assert_eq!(found, expected);
}

async fn prefixes_keep_clients_apart(store: TestStore) {
    let prefix = unique("a*[b]?") + ":";
    let with = store.client_with_prefix(&prefix).await;
    let without = store.client().await;
    let name = unique("prefixed");
    let guard = held(&with.lock(&name)).await;
    assert_eq!(guard.name(), name);
    assert!(!without.lock(&name).is_locked().await.unwrap());
    let same = without.lock(&format!("{prefix}{name}"));
    assert!(same.is_locked().await.unwrap());
    let found = with.list("*").next().await.unwrap().unwrap();
    assert_eq!(found.name, name);
    free(guard).await;
}

async fn waiters_of_one_client_are_served_in_order(store: TestStore) {
    let (client, lock) = store.object(Client::lock, "order").await;
    let order = Arc::new(Mutex::new(Vec::new()));
    let guard = held(&lock).await;
    let mut waiters = Vec::new();
    for n in 0..50 {
        // Each future is polled here once, so that they queue in this order.
        let mut waiting = lock.lock().into_future();
        assert!(poll_up_to(1, &mut waiting).await.is_none());
        if n == 0 {
            // The first waiter sends a request before it joins the queue; then it is the first in
            // the queue.
            poll_until(&mut waiting, until_subscribed(&client, 1)).await;
        }
        let order = order.clone();
        waiters.push(tokio::spawn(async move {
            let guard = waiting.await.unwrap();
            order.lock().unwrap().push(n);
            free(guard).await;
        }));
    }
    free(guard).await;
    done_all("served", waiters).await;
    assert_eq!(*order.lock().unwrap(), (0..50).collect::<Vec<_>>());
}

async fn owner_can_acquire_again_after_loss(store: TestStore) {
    let (client, lock) = store.object(Client::lock, "anew").await;
    let me = Owner::new();
    let brief = || lock.lock().owner(me).lease(Duration::from_millis(300));
    let lost = retry_if_late(brief).await;
    within_limit("lost", lost.lost()).await;
    assert!(matches!(lost.reenter().await, Err(Error::Lost { .. })));
    let anew = lock.lock().owner(me).await.unwrap();
    assert_eq!(anew.hold_count(), 1);
    // The lost hold stays lost, and its end does not change the new hold.
    assert!(!lost.is_valid());
    assert!(matches!(lost.unlock().await, Err(Error::Lost { .. })));
    client.flush().await;
    assert!(lock.is_held_by(me).await.unwrap());
    free(anew).await;
    assert!(!lock.is_locked().await.unwrap());
}

async fn no_state_remains_after_release(store: TestStore) {
    let client = store.client_with(short_linger()).await;
    let lock = client.lock(&unique("account"));
    let tasks = spawn_each(0..20, |n| {
        let lock = lock.clone();
        async move {
            let guard = held(&lock).await;
            if n % 3 == 0 {
                let inner = guard.reenter().await.unwrap();
                drop(guard);
                free(inner).await;
            } else if n % 3 == 1 {
                free(guard).await;
            }
        }
    });
    done_all("done", tasks).await;
    client.flush().await;
    until_idle(&client).await;
}

/// All public types can be moved to and used from any thread, and all futures can be spawned.
#[test]
fn everything_is_send_and_sync() {
    fn both<T: Send + Sync>() {}
    both::<Client>();
    both::<Lock>();
    both::<Guard>();
    both::<redlatch::ReadWriteLock>();
    both::<Guard<redlatch::ReadLock>>();
    both::<Guard<redlatch::WriteLock>>();
    both::<ExpirableSemaphore>();
    both::<redlatch::PermitGuard>();
    both::<redlatch::blocking::ExpirableSemaphore>();
    both::<redlatch::blocking::PermitGuard>();
    both::<Embedded>();
    both::<redlatch::inspect::Listing>();
    both::<redlatch::inspect::Watch>();
    both::<Error>();

    fn spawned<T: Send + 'static>(_: T) {}
    let client = Client::embedded();
    let lock = client.lock("a");
    spawned(lock.lock().into_future());
    spawned(lock.try_lock().into_future());
    spawned(async move { lock.run(async {}).await });
    let lock = client.read_write_lock("a");
    spawned(lock.read().lock().into_future());
    spawned(async move { lock.write().lock().await?.downgrade().await });
    let semaphore = client.expirable_semaphore("a");
    spawned(semaphore.acquire().into_future());
    spawned(semaphore.try_acquire().into_future());
    let all = semaphore.clone();
    let id = redlatch::PermitId::from_bytes([1; 16]);
    spawned(async move { all.release_many(&[id]).await });
    spawned(async move { semaphore.run(async {}).await });

    fn is_send<T: Send>(_: &T) {}
    macro_rules! several_are_send {
        ($lock:expr) => {
            let lock = $lock;
            is_send(&lock);
            is_send(&lock.lock().into_future());
            is_send(&lock.run(async {}));
            is_send(&async {
                let guard = held(&lock).await;
                guard.lost().await;
                guard.run(async {}).await.unwrap();
                free(guard).await;
            });
        };
    }
    several_are_send!(MultiLock::new([client.lock("a")]));
    several_are_send!(RedLock::new([client.lock("a")]));
}
