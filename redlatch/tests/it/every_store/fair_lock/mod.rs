//! Tests of the fair lock: first come, first served across all clients, even when waiters give up
//! or die.

mod dead_waiters;
mod grants;
mod in_virtual_time;
mod on_a_server;

use redlatch::{FairLock, OwnerId, Result};

use crate::common::prelude::*;

type WaiterTask = JoinHandle<Result<Guard<FairLock>>>;

/// Waits until this many waiters are in the queue.
async fn until_queued(lock: &FairLock, waiters: usize) {
    let queued = async || lock.queue().await.unwrap().len() == waiters;
    until("in the queue", queued).await;
}

async fn queued_owners(lock: &FairLock) -> Vec<OwnerId> {
    let queue = lock.queue().await.unwrap().into_iter();
    queue.map(|waiter| waiter.owner).collect()
}

/// Starts a waiter, and returns once it has its position in the queue.
async fn spawn_waiter(lock: &FairLock, ahead: usize) -> WaiterTask {
    let waiting = tokio::spawn(lock.lock().into_future());
    until_queued(lock, ahead + 1).await;
    waiting
}

async fn await_turn(waiting: WaiterTask) -> Guard<FairLock> {
    joined("it is its turn", waiting).await
}

/// Creates clients whose subscriptions end soon after their last waiter.
async fn short_linger_clients<const N: usize>(store: &TestStore) -> [Client; N] {
    store.clients_with(short_linger()).await
}

async fn fair_lock(store: &TestStore, what: &str) -> (Client, FairLock) {
    let [client] = short_linger_clients(store).await;
    let lock = client.fair_lock(&unique(what));
    (client, lock)
}

/// Asserts that nothing is left in the store or in the clients.
async fn assert_nothing_left(clients: &[&Client], lock: &FairLock) {
    for client in clients {
        within_limit("settled", client.flush()).await;
        // Releases of holds whose lease has ended continue behind a flush.
        until("nothing is left in the client", async || {
            let status = client.status();
            (status.holds, status.background) == (0, 0)
        })
        .await;
        until_subscribed(client, 0).await;
    }
    assert!(!lock.is_locked().await.unwrap());
    assert!(lock.queue().await.unwrap().is_empty());
}

/// The same for a lock on a server of its own, of clients without a prefix.
async fn assert_no_keys_left(clients: &[&Client], lock: &FairLock, server: &Server) {
    assert_nothing_left(clients, lock).await;
    assert_eq!(keys_left(server, lock.name()), 0);
}

fn keys(name: &str) -> [String; 4] {
    [
        name.to_owned(),
        format!("redisson_lock_queue:{{{name}}}"),
        format!("redisson_lock_timeout:{{{name}}}"),
        format!("redlatch_lock_announced:{{{name}}}"),
    ]
}

fn keys_left(server: &Server, name: &str) -> usize {
    let [lock, queue, timeouts, announced] = keys(name);
    server.command(&["EXISTS", &lock, &queue, &timeouts, &announced])
}

on_every_store! {
    free_lock_is_acquired_and_released,
    clients_are_served_in_arrival_order,
    many_waiters_of_several_clients_are_served_in_order,
    try_lock_does_not_queue_and_does_not_overtake,
    waiting_with_a_limit_leaves_the_queue,
    waiter_that_gives_up_passes_its_turn,
    dropped_waiter_leaves_the_queue,
    holder_reenters_without_queueing,
    reentering_a_lost_lock_does_not_queue,
    force_unlock_wakes_the_next_waiter,
    queue_position_can_be_read,
    expired_leases_pass_the_lock_in_order,
    owner_waits_twice_and_gives_up_once,
    waiter_dropped_at_any_await_point_leaves_the_queue,
    invalid_settings_are_rejected,
    fair_lock_excludes_other_locks_of_the_same_name,
    plain_waiter_is_woken_when_queue_is_empty,
    holders_are_exclusive,
    lost_guard_does_not_release_the_next_hold,
}

async fn free_lock_is_acquired_and_released(store: TestStore) {
    let (client, lock) = fair_lock(&store, "fair").await;
    assert!(!lock.is_locked().await.unwrap());
    for _ in 0..2 {
        let guard = held(&lock).await;
        assert!(guard.is_valid() && lock.is_locked().await.unwrap());
        assert!(lock.is_held_by(guard.owner()).await.unwrap());
        assert!(!lock.is_held_by(Owner::new()).await.unwrap());
        let holder = lock.holder().await.unwrap().unwrap();
        assert_eq!(holder.owner, guard.owner_id());
        assert!(lease_left(&lock).await <= Duration::from_secs(30));
        free(guard).await;
        assert!(!lock.is_locked().await.unwrap());
    }
    assert_nothing_left(&[&client], &lock).await;
}

async fn clients_are_served_in_arrival_order(store: TestStore) {
    const WAITERS: usize = 30;
    let clients: [Client; 3] = short_linger_clients(&store).await;
    let name = unique("order");
    let lock = clients[0].fair_lock(&name);
    let held = lock.lock().await.unwrap();
    let order: Arc<Mutex<Vec<usize>>> = Arc::default();
    let mut waiting = Vec::new();
    for n in 0..WAITERS {
        let (lock, order) = (clients[n * 7 % 3].fair_lock(&name), order.clone());
        waiting.push(tokio::spawn(async move {
            let guard = lock.lock().await.unwrap();
            order.lock().unwrap().push(n);
            free(guard).await;
        }));
        until_queued(&clients[0].fair_lock(&name), n + 1).await;
    }
    free(held).await;
    done_all("served", waiting).await;
    assert_eq!(*order.lock().unwrap(), Vec::from_iter(0..WAITERS));
    assert_nothing_left(&clients.each_ref(), &lock).await;
}

/// F9: no waiter is left behind, waiters are served in queue order, and their timeouts are in the
/// same order.
async fn many_waiters_of_several_clients_are_served_in_order(store: TestStore) {
    const EACH: usize = 125;
    let clients: [Client; 4] = short_linger_clients(&store).await;
    let name = unique("crowd");
    let lock = clients[0].fair_lock(&name);
    let held = lock.lock().await.unwrap();
    let order: Arc<Mutex<Vec<OwnerId>>> = Arc::default();
    let mut waiting = Vec::new();
    for _ in 0..EACH {
        for client in &clients {
            let (lock, order) = (client.fair_lock(&name), order.clone());
            waiting.push(tokio::spawn(async move {
                let guard = lock.lock().await.unwrap();
                order.lock().unwrap().push(guard.owner_id());
                free(guard).await;
            }));
        }
    }
    until_queued(&lock, 4 * EACH).await;
    let expected = queued_owners(&lock).await;
    free(held).await;
    done_all("served", waiting).await;
    assert_eq!(*order.lock().unwrap(), expected);
    assert_nothing_left(&clients.each_ref(), &lock).await;
    if let TestStore::Server(server) = store {
        assert_eq!(keys_left(server, &name), 0);
    }
}

async fn try_lock_does_not_queue_and_does_not_overtake(store: TestStore) {
    let [one, two] = short_linger_clients(&store).await;
    let name = unique("try");
    let lock = two.fair_lock(&name);
    let held = lock.try_lock().await.unwrap().unwrap();
    assert!(lock.try_lock().await.unwrap().is_none());
    let zero = lock.try_lock().wait(Duration::ZERO);
    assert!(zero.await.unwrap().is_none());
    two.flush().await;
    assert!(lock.queue().await.unwrap().is_empty(), "it does not queue");

    // Starts a waiter that does not process its message yet.
    let next = one.fair_lock(&name).lock().lease(10 * LONG);
    let mut next = next.into_future();
    poll_until(&mut next, until_queued(&lock, 1)).await;
    // The waiter has no further request in flight: everything that it has sent is answered before
    // this attempt.
    assert!(one.fair_lock(&name).try_lock().await.unwrap().is_none());
    free(held).await;
    assert!(!lock.is_locked().await.unwrap());
    // It overtakes no waiter.
    assert!(lock.try_lock().await.unwrap().is_none());
    free(done("its turn", next).await).await;
    assert!(lock.try_lock().await.unwrap().is_some());
    assert_nothing_left(&[&one, &two], &lock).await;
}

async fn waiting_with_a_limit_leaves_the_queue(store: TestStore) {
    let [client] = short_linger_clients(&store).await;
    let name = unique("limit");
    let lock = client.fair_lock(&name);
    let held = lock.lock().await.unwrap();
    let wait = Duration::from_millis(30);
    let begun = std::time::Instant::now();
    assert!(retry_if_late(|| lock.try_lock().wait(wait)).await.is_none());
    assert!(begun.elapsed() >= wait);
    within_limit("settled", client.flush()).await;
    assert!(lock.queue().await.unwrap().is_empty());
    if let TestStore::Server(server) = store {
        assert_eq!(keys_left(server, &name), 1, "the lock alone");
    }
    let waiting = tokio::spawn(lock.try_lock().wait(LONG).into_future());
    until_queued(&lock, 1).await;
    free(held).await;
    free(joined("its turn", waiting).await.unwrap()).await;
    assert_nothing_left(&[&client], &lock).await;
}

async fn waiter_that_gives_up_passes_its_turn(store: TestStore) {
    let [one, two] = short_linger_clients(&store).await;
    let name = unique("give-up");
    let (lock, other) = (one.fair_lock(&name), two.fair_lock(&name));
    for give_up_first in [true, false] {
        // Ten hours, so that the end of the lease cannot replace a missing wake-up message.
        let held = lock.lock().lease(600 * LONG).await.unwrap();
        let mut head = lock.lock().into_future();
        poll_until(&mut head, until_queued(&lock, 1)).await;
        let next = spawn_waiter(&other, 1).await;
        until_subscribed(&two, 1).await;
        if give_up_first {
            drop(head);
            within_limit("settled", one.flush()).await;
            assert_eq!(lock.queue().await.unwrap().len(), 1);
            free(held).await;
        } else {
            // The waiter is granted the lock or woken, and gives up before it processes the message.
            free(held).await;
            drop(head);
        }
        free(await_turn(next).await).await;
        assert_nothing_left(&[&one, &two], &lock).await;
    }
}

async fn dropped_waiter_leaves_the_queue(store: TestStore) {
    let (client, lock) = fair_lock(&store, "dropped").await;
    let guard = held(&lock).await;
    let first = spawn_waiter(&lock, 0).await;
    let middle = spawn_waiter(&lock, 1).await;
    let last = spawn_waiter(&lock, 2).await;
    let mut queue = queued_owners(&lock).await;
    middle.abort();
    until_queued(&lock, 2).await;
    queue.remove(1);
    assert_eq!(queued_owners(&lock).await, queue);
    free(guard).await;
    for one in [first, last] {
        free(await_turn(one).await).await;
    }
    assert_nothing_left(&[&client], &lock).await;
}

async fn holder_reenters_without_queueing(store: TestStore) {
    let (client, lock) = fair_lock(&store, "again").await;
    let me = Owner::new();
    let outer = lock.lock().owner(me).await.unwrap();
    let waiting = spawn_waiter(&lock, 0).await;
    let inner = done("at once", lock.lock().owner(me)).await;
    let third = done("at once", outer.reenter()).await;
    let tried = lock.try_lock().owner(me).await.unwrap().unwrap();
    assert_eq!(lock.hold_count(me).await.unwrap(), 4);
    assert_eq!(lock.queue().await.unwrap().len(), 1);
    for (guard, left) in [(outer, 3), (inner, 2), (third, 1), (tried, 0)] {
        assert!(!waiting.is_finished());
        free(guard).await;
        assert_eq!(lock.hold_count(me).await.unwrap(), left);
    }
    free(await_turn(waiting).await).await;
    assert_nothing_left(&[&client], &lock).await;
}

async fn reentering_a_lost_lock_does_not_queue(store: TestStore) {
    let [client, other] = short_linger_clients(&store).await;
    let name = unique("lost");
    let lock = client.fair_lock(&name);
    let guard = held(&lock).await;
    assert!(lock.force_unlock().await.unwrap());
    let next = held(&other.fair_lock(&name)).await;
    let lost = within_limit("at once", guard.reenter()).await;
    assert_lost(lost, Loss::NotHeld);
    assert!(lock.queue().await.unwrap().is_empty());
    assert_lost(guard.unlock().await, Loss::NotHeld);
    free(next).await;
    assert_nothing_left(&[&client, &other], &lock).await;
}

async fn force_unlock_wakes_the_next_waiter(store: TestStore) {
    let settings = short_linger().watchdog_lease(WATCHDOG);
    let holder = store.client_with(settings).await;
    let [other] = short_linger_clients(&store).await;
    let name = unique("force");
    let lock = other.fair_lock(&name);
    assert!(!lock.force_unlock().await.unwrap(), "it was not held");
    let held = holder.fair_lock(&name).lock().await.unwrap();
    let first = spawn_waiter(&lock, 0).await;
    let second = spawn_waiter(&lock, 1).await;
    until_subscribed(&other, 2).await;
    assert!(lock.force_unlock().await.unwrap());
    let guard = await_turn(first).await;
    assert!(!second.is_finished());
    within_limit("the loss is reported at the next renewal", held.lost()).await;
    assert_lost(held.unlock().await, Loss::NotHeld);
    assert!(guard.is_valid());
    free(guard).await;
    free(await_turn(second).await).await;
    assert_nothing_left(&[&holder, &other], &lock).await;
}

async fn queue_position_can_be_read(store: TestStore) {
    let [one, two] = short_linger_clients(&store).await;
    let name = unique("position");
    let lock = one.fair_lock(&name);
    let guard = held(&lock).await;
    let mut waiting = Vec::new();
    let owners = [Owner::new(), Owner::new(), Owner::new()];
    for (n, owner) in owners.into_iter().enumerate() {
        assert_eq!(lock.position(owner).await.unwrap(), None);
        waiting.push(tokio::spawn(lock.lock().owner(owner).into_future()));
        until_queued(&lock, n + 1).await;
        assert_eq!(lock.position(owner).await.unwrap(), Some(n));
    }
    let theirs = two.fair_lock(&name);
    assert_eq!(theirs.position(owners[0]).await.unwrap(), None);
    let ids = owners.map(|owner| one.owner_id(owner));
    assert_eq!(queued_owners(&theirs).await, ids);
    assert_eq!(lock.position(guard.owner()).await.unwrap(), None);
    free(guard).await;
    for one in waiting {
        free(await_turn(one).await).await;
    }
    assert_nothing_left(&[&one, &two], &lock).await;
}

/// No holder releases: each turn ends with its lease, and the next waiter knows when that is.
async fn expired_leases_pass_the_lock_in_order(store: TestStore) {
    let begun = std::time::Instant::now();
    // A process that paused for a whole turn cannot tell when its own turn was, so the test is
    // repeated.
    while !leases_end_in_order(&store).await {
        assert!(begun.elapsed() < LONG, "the machine is too slow");
    }
}

/// Returns `false` if a waiter learned of its turn after the turn had ended.
async fn leases_end_in_order(store: &TestStore) -> bool {
    let [one, two] = short_linger_clients(store).await;
    let name = unique("leases");
    let lock = one.fair_lock(&name);
    let held = lock.lock().lease(LONG).await.unwrap();
    let order: Arc<Mutex<Vec<usize>>> = Arc::default();
    let mut waiting = Vec::new();
    for n in 0..8 {
        let client = if n % 2 == 0 { &one } else { &two };
        let theirs = client.fair_lock(&name);
        let turn = theirs.try_lock().wait(LONG);
        let turn = turn.lease(Duration::from_millis(250)).into_future();
        let order = order.clone();
        waiting.push(tokio::spawn(async move {
            let guard = match turn.await {
                Err(Error::Lost { .. }) => return None,
                acquired => acquired.unwrap().expect("within its limit"),
            };
            order.lock().unwrap().push(n);
            guard.is_valid().then_some(guard)
        }));
        until_queued(&lock, n + 1).await;
    }
    free(held).await;
    let mut guards = Vec::new();
    for one in waiting {
        guards.push(done("the lease before it ends", one).await);
    }
    let in_time = guards.iter().all(Option::is_some);
    if in_time {
        assert_eq!(*order.lock().unwrap(), Vec::from_iter(0..8));
    }
    drop(guards);
    assert_nothing_left(&[&one, &two], &lock).await;
    in_time
}

/// The same owner waits in two tasks. When one gives up, the owner leaves the queue; the other task
/// queues again.
async fn owner_waits_twice_and_gives_up_once(store: TestStore) {
    let (client, lock) = fair_lock(&store, "twice").await;
    let guard = held(&lock).await;
    let me = Owner::new();
    let stays = tokio::spawn(lock.lock().owner(me).into_future());
    until_queued(&lock, 1).await;
    let wait = Duration::from_millis(20);
    let leaves = retry_if_late(|| lock.try_lock().owner(me).wait(wait)).await;
    assert!(leaves.is_none());
    within_limit("settled", client.flush()).await;
    until_queued(&lock, 1).await;
    free(guard).await;
    free(await_turn(stays).await).await;
    assert_nothing_left(&[&client], &lock).await;
}

async fn waiter_dropped_at_any_await_point_leaves_the_queue(store: TestStore) {
    let [client, other] = short_linger_clients(&store).await;
    let name = unique("cancel");
    let lock = client.fair_lock(&name);
    for released_before in [false, true] {
        for polls in 1..12 {
            let guard = held(&other.fair_lock(&name)).await;
            let mut gone = lock.lock().into_future();
            let few = poll_up_to(polls, &mut gone);
            // Stop polling once nothing wakes the future any more.
            let _ = tokio::time::timeout(Duration::from_millis(5), few).await;
            if released_before {
                free(guard).await;
                drop(gone);
            } else {
                drop(gone);
                free(guard).await;
            }
            let next = within_limit("no other owner blocks it", other.fair_lock(&name).lock());
            free(next.await.unwrap()).await;
            within_limit("settled", client.flush()).await;
            assert!(lock.queue().await.unwrap().is_empty());
        }
    }
    assert_nothing_left(&[&client, &other], &lock).await;
}

async fn invalid_settings_are_rejected(store: TestStore) {
    let (client, lock) = fair_lock(&store, "settings").await;
    for bad in [Duration::ZERO, Duration::from_micros(999), Duration::MAX] {
        let lock = lock.clone().wait_time(bad);
        for refused in [
            lock.lock().await.err(),
            lock.try_lock().await.err(),
            lock.try_lock().wait(Duration::MAX).await.err(),
        ] {
            let Some(Error::InvalidSetting { setting, .. }) = refused else {
                panic!("{refused:?}");
            };
            assert_eq!(setting, "wait_time");
        }
        assert!(!lock.is_locked().await.unwrap());
    }
    // The limits themselves are valid, with waiters.
    for good in [Duration::from_millis(1), redlatch::MAX_LEASE] {
        let lock = lock.clone().wait_time(good);
        let held = lock.lock().await.unwrap();
        let waiting = waiter_of(&client, lock.try_lock().wait(Duration::MAX)).await;
        free(held).await;
        free(joined("its turn", waiting).await.unwrap()).await;
        assert_nothing_left(&[&client], &lock).await;
    }
    for bad in ["", "a\0b", &"x".repeat(600)] {
        let lock = client.fair_lock(bad);
        assert!(matches!(lock.lock().await, Err(Error::InvalidName { .. })));
        assert!(matches!(lock.queue().await, Err(Error::InvalidName { .. })));
        let position = lock.position(Owner::new()).await;
        assert!(matches!(position, Err(Error::InvalidName { .. })));
    }
    let too_long = lock.lock().lease(Duration::MAX).await;
    assert!(matches!(too_long, Err(Error::InvalidLease { .. })));
}

async fn fair_lock_excludes_other_locks_of_the_same_name(store: TestStore) {
    let [client] = short_linger_clients(&store).await;
    let name = unique("kinds");
    let (fair, plain) = (client.fair_lock(&name), client.lock(&name));
    let held = plain.lock().lease(SHORT).await.unwrap();
    assert!(fair.try_lock().await.unwrap().is_none());
    // The release of the other lock notifies no fair waiter; the waiter knows the end of its lease.
    let waiting = spawn_waiter(&fair, 0).await;
    free(held).await;
    let guard = await_turn(waiting).await;
    assert!(plain.try_lock().await.unwrap().is_none());
    free(guard).await;
    // One owner that holds two kinds at the same time causes an error.
    let me = Owner::new();
    let guard = plain.lock().owner(me).await.unwrap();
    let mixed = fair.try_lock().owner(me).await;
    assert!(matches!(mixed, Err(Error::WrongKind { .. })));
    free(guard).await;
    assert_nothing_left(&[&client], &fair).await;
}

/// Through `Client::lock`: by a release, by force, and when the last waiter in the queue gives up.
/// The leases end long after all of this.
async fn plain_waiter_is_woken_when_queue_is_empty(store: TestStore) {
    let [holder, other] = short_linger_clients(&store).await;
    let name = unique("unqueued");
    let (fair, plain) = (holder.fair_lock(&name), other.lock(&name));
    let held = || async { fair.lock().lease(10 * LONG).await.unwrap() };
    let guard = held().await;
    let mut waiting = plain.lock().into_future();
    poll_until_refused(&plain, &mut waiting).await;
    let waiting = tokio::spawn(waiting);
    free(guard).await;
    let next = within_limit("woken by a release", waiting).await;
    free(next.unwrap().unwrap()).await;

    let guard = held().await;
    let mut waiting = plain.lock().into_future();
    poll_until_refused(&plain, &mut waiting).await;
    let waiting = tokio::spawn(waiting);
    assert!(fair.force_unlock().await.unwrap());
    let next = within_limit("woken by a forced unlock", waiting).await;
    free(next.unwrap().unwrap()).await;
    drop(guard);

    // A queued waiter goes first. It does not take its turn, and leaves. Meanwhile the other one must not ask a second time:
    // its client has subscribed before, for a lock with the same channel, whose leases end without a message.
    let third = store
        .client_with(long_timeout().subscription_linger(LONG))
        .await;
    let (plain, same_channel) = (third.lock(&name), format!("{{{name}}}"));
    let mut expired = Vec::new();
    while third.status().subscriptions == 0 {
        for client in [&holder, &third] {
            let lock = client.lock(&same_channel);
            let brief = retry_if_late(|| lock.lock().lease(Duration::from_millis(500)));
            expired.push(brief.await);
        }
    }
    let guard = held().await;
    let me = Owner::new();
    let mut queues = Box::pin(fair.lock().owner(me).lease(10 * LONG).into_future());
    poll_until(&mut queues, until_queued(&fair, 1)).await;
    let mut waiting = plain.lock().into_future();
    poll_until_refused(&plain, &mut waiting).await;
    let waiting = tokio::spawn(waiting);
    free(guard).await;
    // With replicas, the queued waiter's next attempt goes over another connection than the release, and may acquire.
    assert!(fair.queue().await.unwrap().len() == 1 || fair.is_held_by(me).await.unwrap());
    assert!(!waiting.is_finished());
    drop(queues);
    let next = within_limit("woken by the waiter that gave up", waiting).await;
    free(next.unwrap().unwrap()).await;
    drop(expired);
    assert_nothing_left(&[&holder, &other], &fair).await;
    until("only the subscription is left", async || {
        let status = third.status();
        (status.holds, status.background) == (0, 0)
    })
    .await;
}

async fn holders_are_exclusive(store: TestStore) {
    let clients: [Client; 3] = short_linger_clients(&store).await;
    let name = unique("alone");
    let inside = Arc::new(AtomicUsize::new(0));
    let tasks = spawn_each(0..12, |n| {
        let (lock, inside) = (clients[n % 3].fair_lock(&name), inside.clone());
        async move {
            for turn in 0..15 {
                let limit = Duration::from_micros(((n * 15 + turn) * 7919 % 4000) as u64);
                let guard = match turn % 3 {
                    // Such a short limit may end before the first answer.
                    0 => match lock.try_lock().wait(limit).await {
                        Err(error) if error.is_transient() => None,
                        answer => answer.unwrap(),
                    },
                    1 => timeout(limit, held(&lock)).await.ok(),
                    _ => Some(held(&lock).await),
                };
                if let Some(guard) = guard {
                    assert!(inside.fetch_add(1, Ordering::SeqCst) == 0, "two at once");
                    tokio::task::yield_now().await;
                    inside.fetch_sub(1, Ordering::SeqCst);
                    free(guard).await;
                }
            }
        }
    });
    done_all("every task has its turns", tasks).await;
    let lock = clients[0].fair_lock(&name);
    assert_nothing_left(&clients.each_ref(), &lock).await;
    if let TestStore::Server(server) = store {
        assert_eq!(keys_left(server, &name), 0);
    }
}

async fn lost_guard_does_not_release_the_next_hold(store: TestStore) {
    let (client, lock) = fair_lock(&store, "late").await;
    let late = retry_if_late(|| lock.lock().lease(Duration::from_millis(100))).await;
    let next = await_turn(tokio::spawn(lock.lock().into_future())).await;
    within_limit("the loss is reported", late.lost()).await;
    assert_lost(late.unlock().await, Loss::LeaseEnded);
    assert!(lock.is_held_by(next.owner()).await.unwrap());
    free(next).await;
    assert_nothing_left(&[&client], &lock).await;
}

#[test]
fn threads_are_served_in_order() {
    let client = redlatch::blocking::Client::embedded().unwrap();
    let lock = client.fair_lock("a").wait_time(Duration::from_secs(30));
    let held = lock.lock().block().unwrap();
    let again = lock.lock().block().unwrap();
    assert_eq!(held.hold_count(), 2);
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut threads = Vec::new();
    for n in 0..8 {
        let (lock, observer, order) = (lock.clone(), lock.clone(), order.clone());
        let (sender, receiver) = std::sync::mpsc::channel();
        threads.push(std::thread::spawn(move || {
            sender.send(redlatch::blocking::current_thread()).unwrap();
            let guard = lock.lock().block().unwrap();
            order.lock().unwrap().push(n);
            guard.unlock().unwrap();
        }));
        let owner = receiver.recv().unwrap();
        let begun = std::time::Instant::now();
        while observer.position(owner).unwrap() != Some(n) {
            assert!(begun.elapsed() < LONG, "never in the queue");
            std::thread::yield_now();
        }
    }
    assert_eq!(lock.queue().unwrap().len(), 8);
    again.unlock().unwrap();
    held.unlock().unwrap();
    for thread in threads {
        thread.join().unwrap();
    }
    assert_eq!(*order.lock().unwrap(), Vec::from_iter(0..8));
    let once = lock.non_reentrant();
    let held = once.try_lock().block().unwrap().unwrap();
    assert_matches!(once.lock().block(), Err(Error::AlreadyHeld { .. }));
    held.unlock().unwrap();
    client.flush().unwrap();
}
