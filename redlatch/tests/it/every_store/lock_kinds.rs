//! Behavior that all kinds of exclusive lock share: one suite that runs for every kind on every
//! store. The cases are those of Redisson's own tests for its locks (see docs/redisson-parity.md).

use tokio::time::Instant;

use crate::common::prelude::*;

/// Creates a lock of the kind under test.
type Make<K> = fn(&Client, &str) -> Lock<K>;

macro_rules! on_store_with {
    ($store:ident $make:expr; $($name:ident,)*) => {
        mod $store {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                crate::every_store::lock_kinds::$name(crate::common::TestStore::$store(), $make).await;
            })*
        }
    };
}

macro_rules! in_virtual_time_with {
    ($make:expr; $($name:ident,)*) => {
        mod virtual_time {
            $(#[tokio::test(start_paused = true)]
            async fn $name() {
                crate::every_store::lock_kinds::$name(redlatch::Client::embedded(), $make).await;
            })*
        }
    };
}

macro_rules! on_a_server_of_its_own_with {
    ($make:expr; $($name:ident,)*) => {
        mod own_server {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                crate::every_store::lock_kinds::$name(redlatch_testkit::Server::start(), $make).await;
            })*
        }
    };
}

macro_rules! kinds {
    ($($kind:ident: $make:expr,)*) => {$(
        mod $kind {
            for_each_store! { on_store_with! $make;
                holds_are_counted,
                lock_is_held_only_by_its_owner,
                owner_can_reenter_with_try_lock,
                late_unlock_does_not_release_the_next_hold,
                release_passes_the_lock_on,
                force_unlock_wakes_a_waiter,
                clients_exclude_each_other_in_turn,
                attempts_of_many_tasks_leave_nothing_behind,
                dropped_try_lock_leaves_nothing_behind,
                lock_of_dead_client_is_free_when_its_lease_ends,
                waiters_of_one_client_are_served_in_order,
                unusual_names_work,
                non_reentrant_lock_passes_on_after_release,
                non_reentrant_lock_refuses_its_owner,
            }
            in_virtual_time_with! { $make;
                wait_limit_ends_on_time,
                long_enough_wait_acquires_the_lock,
                next_waiter_acquires_when_fixed_lease_ends,
                remaining_lease_is_reported,
                partial_release_keeps_a_fixed_lease,
                hold_after_a_reentered_one_is_renewed,
            }
            on_a_server_of_its_own_with! { $make;
                unreachable_server_is_an_error,
                restart_reports_loss_and_renews_new_hold,
                many_waiters_on_five_names_leave_no_subscription,
            }
        }
    )*};
}

// Add a line for each new kind.
kinds! {
    reentrant: |client, name| client.lock(name),
    spin: |client, name| client.spin_lock(name),
    fenced: |client, name| client.fenced_lock(name),
    fair: |client, name| client.fair_lock(name),
    group: |client, name| client.group_lock(name, "value"),
    write: |client, name| client.read_write_lock(name).write(),
    fair_write: |client, name| client.fair_read_write_lock(name).write(),
}

/// Adds a waiter to the queue. When this returns, its first attempt was refused and it keeps
/// waiting.
async fn spawn_waiter<K, W>(lock: &Lock<K>, waiting: W) -> JoinHandle<W::Output>
where
    K: OwnedKind,
    W: IntoFuture,
    W::IntoFuture: Send + 'static,
    W::Output: Send + 'static,
{
    let mut waiting = Box::pin(waiting.into_future());
    poll_until_refused(lock, &mut waiting).await;
    tokio::spawn(waiting)
}

/// Asserts that the lock is free, and that the client has no holds and no background work.
async fn assert_nothing_left<K: OwnedKind>(client: &Client, lock: &Lock<K>) {
    within_limit("settled", client.flush()).await;
    assert!(!lock.is_locked().await.unwrap(), "a key was left");
    assert_idle(client);
}

/// Redisson: testLockUnlock, testIsLocked, testIsHeldByCurrentThread, testGetHoldCount.
async fn holds_are_counted<K: OwnedKind>(store: TestStore, make: Make<K>) {
    let (_client, lock) = store.object(make, "count").await;
    let me = Owner::new();
    let counted = async |expected: u32| {
        assert_eq!(lock.hold_count(me).await.unwrap(), expected);
        assert_eq!(lock.is_held_by(me).await.unwrap(), expected > 0);
        assert_eq!(lock.is_locked().await.unwrap(), expected > 0);
    };
    counted(0).await;
    for _ in 0..2 {
        let outer = lock.lock().owner(me).await.unwrap();
        counted(1).await;
        let inner = lock.lock().owner(me).await.unwrap();
        counted(2).await;
        free(inner).await;
        counted(1).await;
        free(outer).await;
        counted(0).await;
    }
}

/// Redisson: testIsHeldByCurrentThreadOtherThread, testIsLockedOtherThread. A number identifies an
/// owner only together with its client.
async fn lock_is_held_only_by_its_owner<K: OwnedKind>(store: TestStore, make: Make<K>) {
    let [client, other] = store.clients().await;
    let name = unique("alone");
    let (lock, theirs) = (make(&client, &name), make(&other, &name));
    let me = Owner::new();
    let guard = lock.lock().owner(me).await.unwrap();
    assert!(lock.is_held_by(me).await.unwrap());
    assert!(!lock.is_held_by(Owner::new()).await.unwrap());
    assert!(theirs.is_locked().await.unwrap());
    assert!(!theirs.is_held_by(me).await.unwrap());
    assert_eq!(theirs.hold_count(me).await.unwrap(), 0);
    assert!(theirs.try_lock().owner(me).await.unwrap().is_none());
    let holder = theirs.holder().await.unwrap().unwrap();
    assert_eq!(holder.owner, client.owner_id(me));
    free(guard).await;
    assert!(!theirs.is_locked().await.unwrap());
    assert!(!lock.is_held_by(me).await.unwrap());
}

/// Redisson: testReentrancy, testTryLockAsyncSucceed, testTryLockAsyncFailed.
async fn owner_can_reenter_with_try_lock<K: OwnedKind>(store: TestStore, make: Make<K>) {
    let (_client, lock) = store.object(make, "try-again").await;
    let me = Owner::new();
    let outer = lock.try_lock().owner(me).await.unwrap().unwrap();
    let inner = lock.try_lock().owner(me).await.unwrap().unwrap();
    free(inner).await;
    assert!(lock.try_lock().await.unwrap().is_none());
    free(outer).await;
    let next = lock.try_lock().await.unwrap().expect("it is free");
    free(next).await;
}

/// Redisson: testUnlockFail. Only a guard can unlock here. So the case is a guard whose hold was
/// removed and now belongs to another owner.
async fn late_unlock_does_not_release_the_next_hold<K: OwnedKind>(store: TestStore, make: Make<K>) {
    let [client, other] = store.clients().await;
    let name = unique("late");
    let (lock, theirs) = (make(&client, &name), make(&other, &name));
    let late = held(&lock).await;
    assert!(theirs.force_unlock().await.unwrap());
    let next = held(&theirs).await;
    assert_lost(late.unlock().await, Loss::NotHeld);
    client.flush().await;
    assert!(theirs.is_held_by(next.owner()).await.unwrap());
    free(next).await;
    assert_nothing_left(&other, &theirs).await;
}

/// Redisson: testTryLockAsync, testConcurrency_SingleInstance.
async fn release_passes_the_lock_on<K: OwnedKind>(store: TestStore, make: Make<K>) {
    let [client, other] = store.clients().await;
    let name = unique("hand-over");
    let (lock, theirs) = (make(&client, &name), make(&other, &name));
    for dropped in [false, true] {
        let guard = held(&lock).await;
        let here = spawn_waiter(&lock, lock.lock()).await;
        let there = spawn_waiter(&theirs, theirs.try_lock().wait(LONG)).await;
        if dropped {
            drop(guard);
        } else {
            free(guard).await;
        }
        // In any order: each releases the lock to the other.
        let here = async {
            free(joined("served here", here).await).await;
        };
        let there = async {
            let guard = joined("served there", there).await;
            free(guard.expect("within its limit")).await;
        };
        tokio::join!(here, there);
    }
    assert_nothing_left(&client, &lock).await;
}

/// Redisson: testForceUnlock.
async fn force_unlock_wakes_a_waiter<K: OwnedKind>(store: TestStore, make: Make<K>) {
    let client = store.client().await;
    let name = unique("force");
    let lock = make(&client, &name);
    assert!(!lock.force_unlock().await.unwrap(), "it was not held");
    let guard = held(&lock).await;
    assert!(lock.force_unlock().await.unwrap());
    assert!(!lock.is_locked().await.unwrap());
    assert!(!make(&client, &name).is_locked().await.unwrap());
    assert_lost(guard.unlock().await, Loss::NotHeld);

    let guard = held(&lock).await;
    let waiting = spawn_waiter(&lock, lock.lock()).await;
    assert!(lock.force_unlock().await.unwrap());
    let next = joined("admitted", waiting).await;
    assert_lost(guard.unlock().await, Loss::NotHeld);
    assert!(lock.is_held_by(next.owner()).await.unwrap());
    free(next).await;
}

/// Redisson: testConcurrency_SingleInstance, testConcurrencyLoop_MultiInstance,
/// testConcurrency_MultiInstance.
async fn clients_exclude_each_other_in_turn<K: OwnedKind>(store: TestStore, make: Make<K>) {
    const CLIENTS: u32 = 12;
    const TURNS: u32 = 15;
    let name = unique("turns");
    // The increment is not atomic: the sum is correct only if holders exclude each other.
    let counter = Arc::new(AtomicU32::new(0));
    let mut tasks = Vec::new();
    for _ in 0..CLIENTS {
        let lock = make(&store.client().await, &name);
        let counter = counter.clone();
        tasks.push(tokio::spawn(async move {
            for _ in 0..TURNS {
                let guard = held(&lock).await;
                let counted = counter.load(Ordering::SeqCst);
                tokio::task::yield_now().await;
                counter.store(counted + 1, Ordering::SeqCst);
                free(guard).await;
            }
        }));
    }
    done_all("all have their turns", tasks).await;
    assert_eq!(counter.load(Ordering::SeqCst), CLIENTS * TURNS);
}

/// Redisson: testConcurrencyTryLockUnLock. The watchdog tracks each hold while it exists, and
/// nothing afterwards.
async fn attempts_of_many_tasks_leave_nothing_behind<K: OwnedKind>(
    store: TestStore,
    make: Make<K>,
) {
    let (client, lock) = store.object(make, "tries").await;
    let acquired = Arc::new(AtomicU32::new(0));
    let tasks = spawn_each(0..16, |_| {
        let (client, lock, acquired) = (client.clone(), lock.clone(), acquired.clone());
        async move {
            for _ in 0..100 {
                if let Some(guard) = lock.try_lock().await.unwrap() {
                    assert!(client.status().holds >= 1, "held and not watched");
                    free(guard).await;
                    acquired.fetch_add(1, Ordering::SeqCst);
                }
            }
        }
    });
    done_all("tried", tasks).await;
    let acquired = acquired.load(Ordering::SeqCst);
    assert!(acquired >= 16, "only {acquired} times");
    assert_nothing_left(&client, &lock).await;
}

/// Redisson: testLockIsNotRenewedAfterInterruptedTryLock, at every point where the future can be
/// dropped.
async fn dropped_try_lock_leaves_nothing_behind<K: OwnedKind>(store: TestStore, make: Make<K>) {
    let (client, lock) = store.object(make, "dropped").await;
    drop_result_after_each_poll(
        async |polls| poll_up_to(polls, lock.try_lock()).await,
        async || assert_nothing_left(&client, &lock).await,
    )
    .await;
}

/// Redisson: testAutoExpire. The client dies with its runtime: it neither renews nor releases.
async fn lock_of_dead_client_is_free_when_its_lease_ends<K: OwnedKind>(
    store: TestStore,
    make: Make<K>,
) {
    let store = Arc::new(store);
    let name = unique("dead");
    let dying = {
        let (store, name) = (store.clone(), name.clone());
        move || {
            runtime().block_on(async {
                let settings = Client::builder().watchdog_lease(SECOND);
                let client = store.client_with(settings).await;
                let lock = make(&client, &name);
                retry_if_late(|| async {
                    let guard = lock.lock().await?;
                    guard.run(renewed(&lock)).await?;
                    std::mem::forget(guard);
                    Ok(())
                })
                .await;
            });
        }
    };
    tokio::task::spawn_blocking(dying).await.unwrap();
    let lock = make(&store.client().await, &name);
    free(done("its lease ends", lock.lock()).await).await;
}

/// Waits until the lease has become longer.
async fn renewed<K: OwnedKind>(lock: &Lock<K>) {
    let left = || async { lock.remaining_lease().await.unwrap() };
    until_rises("the lease", left).await;
}

/// Redisson's fair lock promises this across all clients; here every kind promises it within a
/// client.
async fn waiters_of_one_client_are_served_in_order<K: OwnedKind>(store: TestStore, make: Make<K>) {
    let (_client, lock) = store.object(make, "order").await;
    let order = Arc::new(std::sync::Mutex::new(Vec::new()));
    let guard = held(&lock).await;
    let mut waiters = Vec::new();
    for n in 0..10 {
        let (lock, order) = (lock.clone(), order.clone());
        let handle = lock.clone();
        let turn = async move {
            let guard = held(&lock).await;
            order.lock().unwrap().push(n);
            free(guard).await;
        };
        waiters.push(spawn_waiter(&handle, turn).await);
    }
    free(guard).await;
    done_all("served", waiters).await;
    assert_eq!(*order.lock().unwrap(), (0..10).collect::<Vec<_>>());
}

/// Redisson: testName, testNameMapper. Any name works, also with a prefix; but braces must enclose
/// a hash tag.
async fn unusual_names_work<K: OwnedKind>(store: TestStore, make: Make<K>) {
    for client in [
        store.client().await,
        store.client_with_prefix("test::").await,
    ] {
        for sort in [
            "{tag}:abc:key",
            "a:{b}",
            "with a space",
            "größe",
            "*?[a]",
            "}{",
            "{}",
        ] {
            let lock = make(&client, &format!("{sort}{}", unique("sort")));
            if ["}{", "{}"].contains(&sort) {
                assert_matches!(lock.lock().await, Err(Error::InvalidName { .. }));
                continue;
            }
            let guard = held(&lock).await;
            let inner = guard.reenter().await.unwrap();
            let waiting = spawn_waiter(&lock, lock.lock()).await;
            free(inner).await;
            free(guard).await;
            let next = joined(sort, waiting).await;
            assert_eq!(next.name(), lock.name());
            free(next).await;
            assert_nothing_left(&client, &lock).await;
        }
    }
}

/// Redisson: testContendingThreadBlocksAndAcquiresOnRelease (both non-reentrant tests).
async fn non_reentrant_lock_passes_on_after_release<K: OwnedKind>(store: TestStore, make: Make<K>) {
    let client = store.client().await;
    let lock = make(&client, &unique("strict-hand-over")).non_reentrant();
    let guard = held(&lock).await;
    let waiting = spawn_waiter(&lock, lock.lock()).await;
    free(guard).await;
    free(joined("handed over", waiting).await).await;
    assert_nothing_left(&client, &lock).await;
}

/// Redisson: testSameThreadReacquireThrows, testCrossInstanceSameThreadReentryThrows (both
/// non-reentrant tests).
async fn non_reentrant_lock_refuses_its_owner<K: OwnedKind>(store: TestStore, make: Make<K>) {
    let client = store.client().await;
    let name = unique("strict");
    let lock = make(&client, &name).non_reentrant();
    let again = make(&client, &name).non_reentrant();
    let me = Owner::new();
    let guard = lock.lock().owner(me).await.unwrap();
    for handle in [&lock, &again] {
        let waiting = handle.try_lock().owner(me).wait(Duration::MAX);
        for refused in [
            within_limit("at once", handle.lock().owner(me)).await.err(),
            handle.try_lock().owner(me).await.err(),
            within_limit("at once", waiting).await.err(),
        ] {
            assert_matches!(refused, Some(Error::AlreadyHeld { .. }));
        }
        assert!(handle.is_held_by(me).await.unwrap());
        assert_eq!(handle.hold_count(me).await.unwrap(), 1);
    }
    assert_matches!(guard.reenter().await, Err(Error::AlreadyHeld { .. }));
    assert!(guard.is_valid());
    free(guard).await;
    assert!(!again.is_locked().await.unwrap());
    free(again.lock().owner(me).await.unwrap()).await;
}

/// Redisson: testTryLockWait, testTryLockAsyncWaitTime.
async fn wait_limit_ends_on_time<K: OwnedKind>(client: Client, make: Make<K>) {
    let lock = make(&client, "a");
    let guard = held(&lock).await;
    let begun = Instant::now();
    let refused = lock.try_lock().wait(3 * SECOND).await.unwrap();
    let took = begun.elapsed();
    assert!(refused.is_none());
    assert_took(took, 3 * SECOND..=3 * SECOND + SECOND / 3);
    free(guard).await;
}

/// Redisson: testTimedTryLockAsync.
async fn long_enough_wait_acquires_the_lock<K: OwnedKind>(client: Client, make: Make<K>) {
    let lock = make(&client, "a");
    let guard = held(&lock).await;
    let begun = Instant::now();
    let waiting = lock.try_lock().wait(SECOND).lease(30 * SECOND);
    let waiting = tokio::spawn(waiting.into_future());
    sleep(SECOND / 2).await;
    assert!(!waiting.is_finished());
    free(guard).await;
    let next = waiting.await.unwrap().unwrap().expect("in time");
    // A waiter of a spin lock retries every 128 ms.
    assert!(begun.elapsed() <= SECOND / 2 + SECOND / 7);
    let left = next.valid_for();
    assert!(left > 29 * SECOND && left <= 30 * SECOND, "{left:?}");
    free(next).await;
}

/// Redisson: testExpire.
async fn next_waiter_acquires_when_fixed_lease_ends<K: OwnedKind>(client: Client, make: Make<K>) {
    let lock = make(&client, "a");
    let begun = Instant::now();
    let late = lock.lock().lease(2 * SECOND).await.unwrap();
    let next = held(&lock).await;
    assert_took(begun.elapsed(), 2 * SECOND..=2 * SECOND + SECOND / 7);
    assert!(!late.is_valid());
    assert_lost(late.unlock().await, Loss::LeaseEnded);
    client.flush().await;
    assert!(lock.is_held_by(next.owner()).await.unwrap());
    free(next).await;
}

/// Redisson: testRemainTimeToLive, testRemainTimeToLive2.
async fn remaining_lease_is_reported<K: OwnedKind>(client: Client, make: Make<K>) {
    let lock = make(&client, "a");
    let left = async || {
        let expiry = lock.remaining_lease().await.unwrap();
        expiry.and_then(Expiry::duration)
    };
    assert_eq!(left().await, None);
    let guard = lock.lock().lease(3600 * SECOND).await.unwrap();
    assert_eq!(left().await, Some(3600 * SECOND));
    sleep(600 * SECOND).await;
    let after = left().await.unwrap();
    assert!(after <= 3000 * SECOND && after > 2999 * SECOND, "{after:?}");
    free(guard).await;
    assert_eq!(left().await, None);
    let renewed = held(&lock).await;
    assert_eq!(left().await, Some(30 * SECOND));
    free(renewed).await;
    assert_eq!(left().await, None);
}

/// Redisson: testRemainTimeToLive2. In Redisson each release restarts the lease; here a fixed lease
/// stays as requested.
async fn partial_release_keeps_a_fixed_lease<K: OwnedKind>(client: Client, make: Make<K>) {
    let lock = make(&client, "a");
    let me = Owner::new();
    let mut guards = Vec::new();
    for _ in 0..3 {
        guards.push(lock.lock().owner(me).lease(10 * SECOND).await.unwrap());
    }
    sleep(4 * SECOND).await;
    for guard in guards.drain(1..) {
        free(guard).await;
        let left = lease_left(&lock).await;
        assert!(left <= 6 * SECOND && left > 5 * SECOND, "{left:?}");
    }
    sleep(6 * SECOND).await;
    assert!(!lock.is_locked().await.unwrap());
    assert!(!guards[0].is_valid());
}

/// Redisson: testLockReentrantRenew.
async fn hold_after_a_reentered_one_is_renewed<K: OwnedKind>(client: Client, make: Make<K>) {
    let lock = make(&client, "a");
    for me in [Owner::new(), Owner::new()] {
        let outer = lock.lock().owner(me).await.unwrap();
        free(outer.reenter().await.unwrap()).await;
        free(outer).await;
        for next in [me, Owner::new()] {
            let guard = lock.lock().owner(next).await.unwrap();
            sleep(600 * SECOND).await;
            assert!(guard.is_valid());
            assert!(lock.is_held_by(next).await.unwrap());
            free(guard).await;
        }
    }
    sleep(60 * SECOND).await;
    assert_eq!(client.status().holds, 0);
}

/// Redisson: testRedisFailed.
async fn unreachable_server_is_an_error<K: OwnedKind>(mut server: Server, make: Make<K>) {
    let client = Client::connect(&server.url()).await.unwrap();
    let lock = make(&client, "a");
    free(held(&lock).await).await;
    server.kill();
    let waiting = lock.try_lock().wait(5 * SECOND).lease(10 * SECOND);
    for refused in [
        within_limit("an answer", waiting).await.err(),
        within_limit("an answer", lock.lock()).await.err(),
    ] {
        let error = refused.expect("there is no server");
        assert_matches!(error, Error::Unavailable { .. });
        assert!(error.is_transient());
    }
    server.restart();
    // A request that was never sent needs no settling either.
    free(held(&lock).await).await;
    assert_nothing_left(&client, &lock).await;
}

/// Redisson: testLockAfterTimeout.
async fn restart_reports_loss_and_renews_new_hold<K: OwnedKind>(mut server: Server, make: Make<K>) {
    let client = connect(renewing(), &server.url()).await;
    let lock = make(&client, "a");
    let forgotten = held(&lock).await;
    server.restart();
    within_limit("the loss is reported", forgotten.lost()).await;
    assert!(matches!(forgotten.unlock().await, Err(Error::Lost { .. })));
    for _ in 0..2 {
        let guard = held(&lock).await;
        renewed(&lock).await;
        assert!(guard.is_valid());
        free(guard).await;
    }
    assert_nothing_left(&client, &lock).await;
}

/// Redisson: testSubscriptionsPerConnection, testSinglePubSub. No setting has to match the number
/// of waiters.
async fn many_waiters_on_five_names_leave_no_subscription<K: OwnedKind>(
    server: Server,
    make: Make<K>,
) {
    let client = connect(short_linger(), &server.url()).await;
    let tasks = spawn_each(0..32, |task| {
        let client = client.clone();
        async move {
            for turn in 0..10 {
                let lock = make(&client, &format!("lock-{}", (task + turn) % 5));
                let guard = held(&lock).await;
                tokio::task::yield_now().await;
                free(guard).await;
            }
        }
    });
    done_all("every turn", tasks).await;
    until_subscribed(&client, 0).await;
    until("no channel is left", async || channels(&server) == 0).await;
}

/// A Java process holds the lock, as the server sees it: redlatch waits for it, and its release
/// wakes the waiter. Its data stays unchanged.
async fn hold_of_redisson_is_respected<K: OwnedKind>(server: Server, make: Make<K>) {
    let client = Client::connect(&server.url()).await.unwrap();
    let lock = make(&client, "orders:42");
    let theirs = "285475da-9152-4c83-822a-67ee2f116a79:52";
    let _: () = server.command(&["HSET", "orders:42", theirs, "2"]);
    let _: () = server.command(&["PEXPIRE", "orders:42", "600000"]);
    assert!(lock.try_lock().await.unwrap().is_none());
    let holder = lock.holder().await.unwrap().unwrap();
    assert_eq!((holder.owner.as_str(), holder.holds), (theirs, 2));
    assert!(!lock.is_held_by(Owner::new()).await.unwrap());

    let waiting = spawn_waiter(&lock, lock.lock()).await;
    let holds: Vec<u32> = server.command(&["HVALS", "orders:42"]);
    assert_eq!(holds, [2]);
    let _: i64 = server.command(&["DEL", "orders:42"]);
    let _: i64 = server.command(&["PUBLISH", "redisson_lock__channel:{orders:42}", "0"]);
    let guard = joined("woken", waiting).await;

    // This is what Java sees then.
    let held: Vec<String> = server.command(&["HGETALL", "orders:42"]);
    assert_eq!(held, [guard.owner_id().as_str(), "1"]);
    let left: i64 = server.command(&["PTTL", "orders:42"]);
    assert!(left > 0 && left <= 30_000, "{left}");
    free(guard).await;
    assert_eq!(server.command::<i64>(&["EXISTS", "orders:42"]), 0);
}

/// The kinds whose data consists only of the lock's own hash.
mod shared_with_redisson {
    mod reentrant {
        on_a_server_of_its_own_with! { |client, name| client.lock(name);
            hold_of_redisson_is_respected,
        }
    }
    mod spin {
        on_a_server_of_its_own_with! { |client, name| client.spin_lock(name);
            hold_of_redisson_is_respected,
        }
    }
    mod fenced {
        on_a_server_of_its_own_with! { |client, name| client.fenced_lock(name);
            hold_of_redisson_is_respected,
        }
    }
}
