//! Tests of the multi-lock: several locks, all or none.

use redlatch::Member;
use tokio::sync::Barrier;

use crate::common::prelude::*;

async fn is_held(client: &Client, name: &str) -> bool {
    client.lock(name).is_locked().await.unwrap()
}

/// Creates a client, whose holds are renewed soon, and a multi-lock of two names.
async fn two_locks(store: &TestStore, what: &str) -> (Client, [String; 2], MultiLock) {
    let client = store.client_with(renewing()).await;
    let names = ["a", "b"].map(|name| unique(&format!("{what}-{name}")));
    let multi = MultiLock::new(names.each_ref().map(|name| client.lock(name)));
    (client, names, multi)
}

/// Asserts that nothing is left: no background work, no watched hold, no held lock.
async fn assert_nothing_left(client: &Client, names: &[&str]) {
    within_limit("settled", client.flush()).await;
    for name in names {
        assert!(!is_held(client, name).await, "{name} was left");
    }
    assert_idle(client);
}

on_every_store! {
    all_members_are_held_or_none,
    one_of_ten_attempts_wins,
    blocked_member_releases_the_others_before_waiting,
    waiting_ends_at_its_limit,
    blocking_holders_are_awaited_one_after_the_other,
    members_can_have_different_kinds,
    fair_and_read_write_members,
    members_of_several_clients,
    owner_can_reenter,
    owner_does_not_block_itself,
    non_reentrant_member_refuses_its_owner,
    fixed_lease_is_not_renewed,
    failed_attempt_extends_no_lease,
    one_lost_member_means_a_lost_guard,
    all_members_are_released_even_if_one_is_lost,
    dropped_guard_releases_all_members,
    request_dropped_anywhere_leaves_nothing_behind,
    opposite_orders_do_not_deadlock,
    members_of_several_clients_in_any_order,
    single_locks_and_multi_locks_coexist,
    invalid_members_are_rejected,
    foreign_keys_stay_unchanged,
    run_holds_all_locks,
}

async fn all_members_are_held_or_none(store: TestStore) {
    let client = store.client().await;
    let names = [unique("all"), unique("all"), unique("all")];
    let multi = MultiLock::new(names.each_ref().map(|name| client.lock(name)));
    let guard = multi.lock().await.unwrap();
    assert!(guard.is_valid());
    for name in &names {
        let holder = client.lock(name).holder().await.unwrap().unwrap();
        assert_eq!(holder.owner, client.owner_id(guard.owner()));
    }
    assert!(multi.is_held_by(guard.owner()).await.unwrap());
    assert!(!multi.is_held_by(Owner::new()).await.unwrap());
    assert!(multi.try_lock().await.unwrap().is_none());
    assert_eq!(client.status().holds, 3);
    free(guard).await;
    // Whichever member another owner holds, no member is acquired.
    for name in &names {
        let held = client.lock(name).lock().await.unwrap();
        assert!(multi.try_lock().await.unwrap().is_none());
        for other in names.iter().filter(|other| *other != name) {
            assert!(!is_held(&client, other).await);
        }
        free(held).await;
    }
    // All clients acquire the members in the same order.
    let mut order = None;
    for first in 0..3 {
        let mut given = names.clone();
        given.rotate_left(first);
        let multi = MultiLock::new(given.each_ref().map(|name| client.lock(name)));
        assert!(multi.names().eq(&given));
        let guard = multi.lock().await.unwrap();
        let taken: Vec<String> = guard.names().map(str::to_owned).collect();
        assert_eq!(*order.get_or_insert_with(|| taken.clone()), taken);
        free(guard).await;
    }
    assert_nothing_left(&client, &names.each_ref().map(String::as_str)).await;
}

/// Redisson: testWaitAndLeaseTimeouts. Ten attempts run at the same time, over the same locks in
/// all orders.
async fn one_of_ten_attempts_wins(store: TestStore) {
    let (a, b, c) = (unique("ten-a"), unique("ten-b"), unique("ten-c"));
    let clients: [Client; 10] = store.clients().await;
    for _ in 0..5 {
        let start = Arc::new(Barrier::new(clients.len()));
        let tries = clients.iter().enumerate().map(|(n, client)| {
            let mut names = [&a, &b, &c];
            names.rotate_left(n % 3);
            let multi = MultiLock::new(names.map(|name| client.lock(name)));
            let start = start.clone();
            tokio::spawn(async move {
                start.wait().await;
                multi.try_lock().lease(LONG).await.unwrap()
            })
        });
        let mut guards = Vec::new();
        for one in tries.collect::<Vec<_>>() {
            guards.extend(done("answered", one).await);
        }
        assert_eq!(guards.len(), 1);
        free(guards.remove(0)).await;
    }
    for client in &clients {
        assert_nothing_left(client, &[&a, &b, &c]).await;
    }
}

async fn blocked_member_releases_the_others_before_waiting(store: TestStore) {
    let [client, other] = store.clients().await;
    // Members of two clients need two scripts, so one of them really is released here.
    let second = store.client().await;
    let (a, b) = (unique("give-back-a"), unique("give-back-b"));
    for multi in [
        MultiLock::new([client.lock(&a), client.lock(&b)]),
        MultiLock::new([client.lock(&a), second.lock(&b)]),
    ] {
        let held = other.lock(&b).lock().await.unwrap();
        let waiting = tokio::spawn(multi.lock().into_future());
        let subscriptions = |client: &Client| client.status().subscriptions;
        let waits = async || subscriptions(&client) + subscriptions(&second) > 0;
        until("it waits", waits).await;
        // While it waits it holds nothing: other owners can acquire the free member.
        let free = within_limit("the free one", other.lock(&a).lock()).await;
        free.unwrap().unlock().await.unwrap();
        assert!(!waiting.is_finished());
        held.unlock().await.unwrap();
        let guard = joined("woken", waiting).await;
        guard.unlock().await.unwrap();
        for client in [&client, &second] {
            until_subscribed(client, 0).await;
            assert_nothing_left(client, &[&a, &b]).await;
        }
    }
}

async fn waiting_ends_at_its_limit(store: TestStore) {
    let [client, other] = store.clients().await;
    let (a, b) = (unique("patience-a"), unique("patience-b"));
    let held = other.lock(&b).lock().await.unwrap();
    let multi = MultiLock::new([client.lock(&a), client.lock(&b)]);
    let wait = Duration::from_millis(50);
    let begun = std::time::Instant::now();
    let limited = retry_if_late(|| multi.try_lock().wait(wait)).await;
    assert!(limited.is_none());
    assert!(begun.elapsed() >= wait);
    assert_nothing_left(&client, &[&a]).await;
    free(held).await;
    assert!(multi.try_lock().wait(LONG).await.unwrap().is_some());
}

async fn blocking_holders_are_awaited_one_after_the_other(store: TestStore) {
    let [client, other] = store.clients().await;
    let names = [unique("way-a"), unique("way-b"), unique("way-c")];
    let lease = 10 * LONG;
    let mut held = Vec::new();
    for name in &names {
        held.push(other.lock(name).lock().lease(lease).await.unwrap());
    }
    let multi = MultiLock::new(names.each_ref().map(|name| client.lock(name)));
    let waiting = tokio::spawn(multi.lock().into_future());
    // Released one by one, in any order: each release wakes the waiter, which then waits for the
    // next member.
    held.rotate_left(1);
    for guard in held {
        until("it waits", async || client.status().subscriptions > 0).await;
        assert!(!waiting.is_finished());
        free(guard).await;
    }
    free(joined("woken", waiting).await).await;
    assert_nothing_left(&client, &names.each_ref().map(String::as_str)).await;
}

async fn members_can_have_different_kinds(store: TestStore) {
    let [client, other] = store.clients().await;
    let [lock, fenced, spin, strict] =
        ["lock", "fenced", "spin", "strict"].map(|kind| unique(&format!("mix-{kind}")));
    let token = client.fenced_lock(&fenced);
    let multi = MultiLock::new([client.lock(&lock)])
        .and(&token)
        .and(client.spin_lock(&spin))
        .and(client.lock(&strict).non_reentrant());
    assert_eq!(multi.names().count(), 4);
    for expected in 1..4 {
        let guard = multi.lock().await.unwrap();
        assert_eq!(guard.token(&token), Some(expected));
        assert_eq!(guard.token(&other.fenced_lock(&fenced)), None);
        assert_eq!(guard.names().count(), 4);
        free(guard).await;
    }
    // With several clients, one member is acquired before the others. An owner set by the
    // caller that waited for it continues with that acquisition.
    let apart = MultiLock::new([other.lock(&format!("{fenced}-z"))]).and(&token);
    let held = token.lock().await.unwrap();
    let before = held.token();
    let waiting = waiter_of(&client, apart.lock().owner(Owner::new())).await;
    free(held).await;
    let guard = joined("woken", waiting).await;
    assert_eq!(guard.token(&token), Some(before + 1));
    free(guard).await;
    until_subscribed(&client, 0).await;
    // A spin lock publishes nothing when it is released: the waiter polls.
    let held = other.spin_lock(&spin).lock().await.unwrap();
    let mut waiting = Box::pin(multi.lock().into_future());
    poll_until_refused(&client.spin_lock(&spin), &mut waiting).await;
    let waiting = tokio::spawn(waiting);
    free(held).await;
    free(joined("spun", waiting).await).await;
    assert_nothing_left(&client, &[&lock, &fenced, &spin, &strict]).await;
}

/// Members that are acquired one by one, because they have a queue or shared holders.
async fn fair_and_read_write_members(store: TestStore) {
    let [client, other] = store.clients().await;
    let name = unique("kinds");
    let [a, b, c, d] = ["a", "b", "c", "d"].map(|n| format!("{name}-{n}"));
    let (fair, rw) = (client.fair_lock(&b), client.read_write_lock(&c));
    let multi = MultiLock::new([client.lock(&a), client.lock(&d)])
        .and(&fair)
        .and(rw.read())
        .and(rw.write());
    // A writer may also read, whichever side was named first.
    let guard = multi.lock().await.unwrap();
    assert!(multi.is_held_by(guard.owner()).await.unwrap());
    guard.unlock().await.unwrap();
    // Each kind of member blocks in turn.
    let theirs = (other.fair_lock(&b), other.read_write_lock(&c));
    let held = theirs.0.lock().await.unwrap();
    assert!(multi.try_lock().await.unwrap().is_none());
    let waiting = waiter_of(&client, multi.lock()).await;
    // The waiter may be in the middle of an attempt, and hold the first member for that long.
    until("it holds nothing", async || !is_held(&other, &a).await).await;
    let reader = theirs.1.read().lock().await.unwrap();
    held.unlock().await.unwrap();
    // It has left the fair lock's queue, and holds nothing.
    let free = within_limit("the fair lock", theirs.0.lock()).await;
    free.unwrap().unlock().await.unwrap();
    assert!(!waiting.is_finished());
    reader.unlock().await.unwrap();
    let guard = joined("woken", waiting).await;
    guard.unlock().await.unwrap();
    // It also leaves the queue when it times out.
    let held = theirs.0.lock().await.unwrap();
    let wait = Duration::from_millis(50);
    let limited = retry_if_late(|| multi.try_lock().wait(wait)).await;
    assert!(limited.is_none());
    within_limit("settled", client.flush()).await;
    held.unlock().await.unwrap();
    let free = theirs.0.try_lock().await.unwrap();
    assert!(free.is_some(), "a waiter that gave up is still queued");
    drop(free);
    within_limit("settled", other.flush()).await;
    assert_nothing_left(&client, &[&a, &d]).await;
}

async fn members_of_several_clients(store: TestStore) {
    let [one, two] = store.clients().await;
    let elsewhere = Client::embedded();
    let name = unique("clients");
    let [a, b, c, d] = ["a", "b", "c", "d"].map(|n| format!("{name}-{n}"));
    // In the order of keys, the clients alternate.
    let multi = MultiLock::new([one.lock(&a), two.lock(&b), one.lock(&c), elsewhere.lock(&d)]);
    let guard = multi.lock().await.unwrap();
    let owner = guard.owner();
    assert!(one.lock(&a).is_held_by(owner).await.unwrap());
    assert!(two.lock(&b).is_held_by(owner).await.unwrap());
    assert!(one.lock(&c).is_held_by(owner).await.unwrap());
    assert!(elsewhere.lock(&d).is_held_by(owner).await.unwrap());
    free(guard).await;
    let held = elsewhere.lock(&d).lock().await.unwrap();
    assert!(multi.try_lock().await.unwrap().is_none());
    free(held).await;
    for client in [&one, &two] {
        assert_nothing_left(client, &[&a, &b, &c]).await;
    }
    assert_nothing_left(&elsewhere, &[&d]).await;
}

async fn owner_can_reenter(store: TestStore) {
    let client = store.client().await;
    let (a, b, c) = (unique("again-a"), unique("again-b"), unique("again-c"));
    let (owner, other) = (Owner::new(), store.client().await);
    let of = |names: &[&String]| MultiLock::new(names.iter().map(|name| client.lock(name)));
    let outer = of(&[&a, &b]).lock().owner(owner).await.unwrap();
    let inner = of(&[&b, &c]).lock().owner(owner).await.unwrap();
    assert_eq!(client.lock(&b).hold_count(owner).await.unwrap(), 2);
    free(outer).await;
    assert_eq!(client.lock(&b).hold_count(owner).await.unwrap(), 1);
    assert!(!is_held(&client, &a).await);
    // A failed attempt does not change the holds from before.
    let guard = held(&other.lock(&a)).await;
    let again = of(&[&a, &b, &c]).try_lock().owner(owner).await.unwrap();
    assert!(again.is_none());
    assert_eq!(client.lock(&b).hold_count(owner).await.unwrap(), 1);
    assert!(inner.is_valid());
    free(guard).await;
    free(inner).await;
    let scoped = owner.scope(async { of(&[&a]).lock().await });
    assert_eq!(scoped.await.unwrap().owner(), owner);
    assert_nothing_left(&client, &[&a, &b, &c]).await;
}

/// While other waiters queue for a lock that its owner holds, the owner does not wait behind them.
async fn owner_does_not_block_itself(store: TestStore) {
    let client = store.client().await;
    let (a, b) = (unique("own-a"), unique("own-b"));
    let owner = Owner::new();
    let outer = client.lock(&a).lock().owner(owner).await.unwrap();
    let next = waiter_of(&client, client.lock(&a).lock()).await;
    let multi = MultiLock::new([client.lock(&a), client.lock(&b)]);
    let inner = within_limit("re-entered", multi.lock().owner(owner)).await;
    free(inner.unwrap()).await;
    free(outer).await;
    free(joined("the next", next).await).await;
    // The local queue contains the owner, another waiter that is never served, and the owner once
    // more. The owner acquires the lock by its first request, so its second one does not wait for
    // the other waiter.
    let guard = held(&client.lock(&a)).await;
    let mut single = pin!(client.lock(&a).lock().owner(owner).into_future());
    assert!(poll_up_to(50, &mut single).await.is_none());
    let mut stuck = Box::pin(client.lock(&a).lock().into_future());
    assert!(poll_up_to(50, &mut stuck).await.is_none());
    let mut both = pin!(multi.lock().owner(owner).into_future());
    assert!(poll_up_to(50, &mut both).await.is_none());
    free(guard).await;
    let outer = done("the single one", single).await;
    let inner = done("both", both).await;
    drop(stuck);
    assert_eq!(outer.hold_count(), 2);
    free(inner).await;
    free(outer).await;
    assert_nothing_left(&client, &[&a, &b]).await;
}

async fn non_reentrant_member_refuses_its_owner(store: TestStore) {
    let client = store.client().await;
    let (a, b) = (unique("strict-a"), unique("strict-b"));
    let owner = Owner::new();
    let multi = MultiLock::new([client.lock(&a), client.lock(&b).non_reentrant()]);
    let guard = multi.lock().owner(owner).await.unwrap();
    let again = multi.lock().owner(owner).await.unwrap_err();
    assert_matches!(again, Error::AlreadyHeld { .. });
    assert_eq!(client.lock(&a).hold_count(owner).await.unwrap(), 1);
    free(guard).await;
    assert_nothing_left(&client, &[&a, &b]).await;
}

async fn fixed_lease_is_not_renewed(store: TestStore) {
    let (client, [a, b], multi) = two_locks(&store, "lease").await;
    let fixed = retry_if_late(|| multi.lock().lease(Duration::from_millis(300))).await;
    within_limit("lost", fixed.lost()).await;
    assert!(!fixed.is_valid());
    assert_eq!(fixed.valid_for(), Duration::ZERO);
    assert_lost(fixed.unlock().await, Loss::LeaseEnded);
    // Without a fixed lease, it is renewed.
    let renewed = held(&multi).await;
    let lock = client.lock(&b);
    until_rises("the lease", async || lease_left(&lock).await).await;
    assert!(renewed.is_valid());
    free(renewed).await;
    assert_nothing_left(&client, &[&a, &b]).await;
}

/// Members that the owner already holds are re-entered, and released again if another member is
/// blocked: their state is then as before. In a cluster, this requires a common hash tag.
async fn failed_attempt_extends_no_lease(store: TestStore) {
    let [client, other] = store.clients().await;
    let tag = unique("tag");
    let names = [format!("{{{tag}}}:a"), format!("{{{tag}}}:b")];
    let me = Owner::new();
    let mine = client.lock(&names[0]);
    let guard = mine.lock().owner(me).lease(LONG).await.unwrap();
    let _theirs = held(&other.lock(&names[1])).await;
    let both = MultiLock::new(names.each_ref().map(|name| client.lock(name)));
    let again = both.try_lock().owner(me).lease(10 * LONG).await.unwrap();
    assert!(again.is_none());
    let assert_unchanged = async || {
        let left = lease_left(&mine).await;
        let is_unchanged = left <= LONG && left + SECOND > guard.valid_for();
        assert!(is_unchanged, "{left:?}");
    };
    assert_unchanged().await;
    assert_eq!(mine.hold_count(me).await.unwrap(), 1);
    // A shorter lease does not shorten it either.
    let again = both.try_lock().owner(me).lease(SECOND).await.unwrap();
    assert!(again.is_none());
    assert_unchanged().await;
    free(guard).await;
}

async fn one_lost_member_means_a_lost_guard(store: TestStore) {
    let (client, [a, b], multi) = two_locks(&store, "lost").await;
    let guard = held(&multi).await;
    assert!(client.lock(&b).force_unlock().await.unwrap());
    within_limit("the loss is reported", guard.lost()).await;
    assert!(!guard.is_valid());
    assert_lost(guard.run(std::future::pending::<()>()).await, Loss::NotHeld);
    drop(guard);
    assert_nothing_left(&client, &[&a, &b]).await;
}

async fn all_members_are_released_even_if_one_is_lost(store: TestStore) {
    let client = store.client().await;
    let names = ["a", "b", "c"].map(|name| unique(&format!("one-lost-{name}")));
    let multi = MultiLock::new(names.each_ref().map(|name| client.lock(name)));
    for lost in &names {
        let guard = held(&multi).await;
        assert!(client.lock(lost).force_unlock().await.unwrap());
        let error = guard.unlock().await.unwrap_err();
        assert_matches!(error, Error::Lost { ref name, .. } if name == lost);
        for name in &names {
            assert!(!is_held(&client, name).await);
        }
        assert_nothing_left(&client, &[]).await;
    }
}

async fn dropped_guard_releases_all_members(store: TestStore) {
    let (client, [a, b], multi) = two_locks(&store, "drop").await;
    drop(held(&multi).await);
    assert_nothing_left(&client, &[&a, &b]).await;
}

/// Polls up to `polls` times, each time when woken. Returns the output, or `None` if there is none
/// yet.
async fn poll_up_to<F: IntoFuture>(polls: usize, future: F) -> Option<F::Output> {
    // Stop polling once the future sleeps.
    let polled = crate::common::poll_up_to(polls, future);
    let done = tokio::time::timeout(Duration::from_millis(200), polled);
    done.await.ok().flatten()
}

/// Members of one client and of two, free and released meanwhile. The request is dropped after one
/// poll, after two, and so on.
async fn request_dropped_anywhere_leaves_nothing_behind(store: TestStore) {
    let [client, second, other] = store.clients().await;
    let (a, b) = (unique("cancel-a"), unique("cancel-b"));
    for multi in [
        MultiLock::new([client.lock(&a), client.lock(&b)]),
        MultiLock::new([client.lock(&a), second.lock(&b)]),
    ] {
        for held in [None, Some(&a), Some(&b)] {
            drop_after_each_poll(async |polls| {
                let held = match held {
                    Some(name) => Some(other.lock(name).lock().await.unwrap()),
                    None => None,
                };
                let waiter = poll_up_to(polls, multi.lock());
                let (guard, ()) = tokio::join!(waiter, async {
                    if let Some(held) = held {
                        free(held).await;
                    }
                });
                let through = guard.is_some();
                drop(guard);
                // Each client settles its own members; only then everything is released.
                within_limit("settled", second.flush()).await;
                assert_nothing_left(&client, &[&a, &b]).await;
                assert_nothing_left(&second, &[&a, &b]).await;
                through
            })
            .await;
            // The same in the middle of the release.
            drop_after_each_poll(async |polls| {
                let guard = multi.lock().await.unwrap();
                let released = poll_up_to(polls, guard.unlock()).await.is_some();
                // Each client settles its own members; only then everything is released.
                within_limit("settled", second.flush()).await;
                assert_nothing_left(&client, &[&a, &b]).await;
                assert_nothing_left(&second, &[&a, &b]).await;
                released
            })
            .await;
        }
    }
}

/// F18 (redisson#467, #631, #4050): many clients acquire the same locks in different orders.
async fn opposite_orders_do_not_deadlock(store: TestStore) {
    contend(store, 3, |clients, names, n, round| {
        let mut locks = names.map(|name| clients[n % 3].lock(&name));
        locks.rotate_left((n + round) % 3);
        if n % 2 == 0 {
            locks.reverse();
        }
        MultiLock::new(locks)
    })
    .await;
}

/// The same with members of several clients, so that members are acquired and released all the
/// time.
async fn members_of_several_clients_in_any_order(store: TestStore) {
    contend(store, 3, |clients, names, n, round| {
        let [a, b, c] = names;
        let mut locks = [
            Member::from(clients[n % 3].lock(&a)),
            Member::from(clients[(n + 1) % 3].spin_lock(&b)),
            Member::from(clients[(n + round) % 3].fenced_lock(&c)),
        ];
        locks.rotate_left((n + round) % 3);
        MultiLock::new(locks)
    })
    .await;
}

/// Single locks and multi-locks are held and waited for at the same time.
async fn single_locks_and_multi_locks_coexist(store: TestStore) {
    contend(store, 2, |clients, names, n, round| {
        let [a, b, c] = names;
        let (one, two) = (&clients[n % 2], &clients[(n + round) % 2]);
        if n % 3 == 0 {
            // All other multi-locks need this member too, so it stands for all of them.
            return MultiLock::new([one.lock(&b)]);
        }
        MultiLock::new([two.lock(&c), one.lock(&b), two.lock(&a)])
    })
    .await;
}

async fn contend(
    store: TestStore,
    clients: usize,
    multi: impl Fn(&[Client], [String; 3], usize, usize) -> MultiLock + Send + Sync + Copy + 'static,
) {
    const PLAYERS: usize = 9;
    const ROUNDS: usize = 15;
    let mut all = Vec::new();
    for _ in 0..clients {
        // If a wake-up were missed, the test would run into its limit.
        let settings = Client::builder().watchdog_lease(10 * LONG);
        all.push(store.client_with(settings).await);
    }
    let names = ["a", "b", "c"].map(|n| unique(&format!("order-{n}")));
    let inside = [(); 3].map(|()| Arc::new(AtomicBool::new(false)));
    let players = spawn_each(0..PLAYERS, |n| {
        let (clients, names, inside) = (all.clone(), names.clone(), inside.clone());
        async move {
            for round in 0..ROUNDS {
                let guard = held(&multi(&clients, names.clone(), n, round)).await;
                for one in &inside {
                    assert!(!one.swap(true, Ordering::SeqCst), "two at once");
                }
                tokio::task::yield_now().await;
                for one in &inside {
                    one.store(false, Ordering::SeqCst);
                }
                free(guard).await;
            }
        }
    });
    done_all("all get their turns", players).await;
    for client in &all {
        assert_nothing_left(client, &names.each_ref().map(String::as_str)).await;
    }
}

/// The server has one run id. It is known when the first attempt has been answered.
#[tokio::test]
async fn two_addresses_of_one_server_are_one_store() {
    let url = shared().url();
    let same = url.replace("127.0.0.1", "localhost");
    assert_ne!(url, same);
    // Not before they are used.
    let lazy = |url| Client::builder().connect_lazy(url).unwrap();
    let clients = [&*url, &same].map(lazy);
    let name = unique("addresses");
    let both = MultiLock::new(clients.each_ref().map(|client| client.lock(&name)));
    for error in [
        within_limit("refused", both.lock()).await.err(),
        both.try_lock().await.err(),
        RedLock::new([&clients[0], &clients[1]].map(|client| client.lock(&name)))
            .try_lock()
            .await
            .err(),
    ] {
        assert_matches!(error, Some(Error::InvalidMembers { .. }));
    }
    assert!(!clients[0].lock(&name).is_locked().await.unwrap());
    let elsewhere = client_at(&format!("{same}/1")).await;
    let databases = MultiLock::new([clients[0].lock(&name), elsewhere.lock(&name)]);
    free(held(&databases).await).await;
}

/// Its process hangs, and its connection stays open: its turn lasts no longer than it would have waited.
#[tokio::test(start_paused = true)]
async fn wait_limit_is_wait_time_of_fair_members() {
    let [client, hanging, other] = embedded_clients();
    let fair = |client: &Client| client.fair_lock("a");
    let guard = fair(&client).lock().lease(10 * SECOND).await.unwrap();
    let request = MultiLock::new([fair(&hanging)]).try_lock().wait(SECOND);
    let mut waiting = request.into_future();
    // Embedded stores answer immediately: after this, the request is queued.
    assert!(poll_up_to(2, &mut waiting).await.is_none());
    free(guard).await;
    let begun = tokio::time::Instant::now();
    free(held(&fair(&other)).await).await;
    // Its place in the queue lasts for the lease that it waited for, and the wait time.
    assert_took(begun.elapsed(), ..=11 * SECOND);
}

async fn invalid_members_are_rejected(store: TestStore) {
    let [client, other] = store.clients().await;
    let invalid = |error: Error, reason: &str| {
        assert_matches!(error, Error::InvalidMembers { .. });
        assert!(error.to_string().contains(reason), "{error}");
    };
    let none = MultiLock::new(Vec::<Member>::new());
    invalid(none.lock().await.unwrap_err(), "there are none");
    let name = unique("twice");
    let twice = MultiLock::new([client.lock(&name), other.lock(&name)]);
    invalid(twice.try_lock().await.unwrap_err(), "two clients");
    // The same lock twice through one client counts once.
    let once = MultiLock::new([client.lock(&name), client.lock(&name)]);
    let guard = held(&once).await;
    let holds = client.lock(&name).hold_count(guard.owner()).await;
    assert_eq!(holds.unwrap(), 1);
    free(guard).await;
    // The same owner cannot hold it as another kind of lock.
    let kinds = once.clone().and(client.fenced_lock(&name));
    assert_matches!(kinds.lock().await, Err(Error::WrongKind { .. }));

    let unnamed = once.clone().and(client.lock(""));
    assert_matches!(unnamed.lock().await, Err(Error::InvalidName { .. }));
    let fair = once
        .clone()
        .and(client.fair_lock(&name).wait_time(Duration::ZERO));
    assert_matches!(fair.lock().await, Err(Error::InvalidSetting { .. }));
    for lease in [Duration::ZERO, Duration::MAX] {
        let error = once.lock().lease(lease).await.unwrap_err();
        assert_matches!(error, Error::InvalidLease { .. });
    }
    drop(once.try_lock().wait(Duration::MAX).await.unwrap());
    let many = MultiLock::new((0..1000).map(|n| client.lock(&format!("{name}-{n}"))));
    let guard = held(&many).await;
    assert_eq!(client.status().holds, 1000);
    free(guard).await;
    assert_nothing_left(&client, &[&name, &format!("{name}-7")]).await;
}

/// A key of another type fails immediately, and members acquired before it are released.
async fn foreign_keys_stay_unchanged(store: TestStore) {
    let TestStore::Server(server) = &store else {
        return;
    };
    let client = store.client().await;
    let name = unique("kind");
    let [a, b, c] = ["a", "b", "c"].map(|n| format!("{name}-{n}"));
    let multi = MultiLock::new([client.lock(&a), client.lock(&b), client.lock(&c)]);
    for foreign in [
        &["SET", &b, "5"][..],
        &["HSET", &b, "mode", "read", "other:1", "1"],
    ] {
        let _: redis::Value = server.command(foreign);
        let error = multi.lock().await.unwrap_err();
        assert_matches!(error, Error::WrongKind { ref name, .. } if *name == b);
        let _: i64 = server.command(&["DEL", &b]);
    }
    assert_nothing_left(&client, &[&a, &b, &c]).await;
}

async fn run_holds_all_locks(store: TestStore) {
    let (client, [a, b], multi) = two_locks(&store, "run").await;
    let held = multi.run(async { is_held(&client, &a).await && is_held(&client, &b).await });
    assert!(held.await.unwrap());
    assert_nothing_left(&client, &[&a, &b]).await;
    let lost = multi.run(async {
        client.lock(&a).force_unlock().await.unwrap();
    });
    assert_matches!(lost.await, Err(Error::Lost { .. }));
    assert_nothing_left(&client, &[&a, &b]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_of_one_client_are_acquired_in_one_round_trip() {
    let server = Server::start();
    let client = unregistered_client(&server).await;
    let multi = MultiLock::new((0..20).map(|n| client.lock(&format!("one-{n}"))))
        .and(client.fenced_lock("two"))
        .and(client.spin_lock("three"));
    free(multi.lock().await.unwrap()).await;
    let before = server.calls("eval");
    let guard = multi.lock().await.unwrap();
    assert_eq!(server.calls("eval") - before, 1);
    free(guard).await;
    // A blocked member costs no more: the same script releases what it acquired, and publishes
    // nothing, because no other client can have noticed.
    let held = client.lock("one-7").lock().await.unwrap();
    let calls = || [server.calls("eval"), server.calls("publish")];
    let before = calls();
    assert!(multi.try_lock().await.unwrap().is_none());
    assert_eq!(calls(), [before[0] + 1, before[1]]);
    free(held).await;
    // One attempt, one after the subscription, and one after the wake-up.
    let held = client.lock("one-7").lock().await.unwrap();
    let before = server.calls("eval");
    let waiting = tokio::spawn(multi.lock().into_future());
    until("subscribed", async || channels(&server) > 0).await;
    until("asked twice", async || server.calls("eval") - before == 2).await;
    free(held).await;
    let guard = joined("woken", waiting).await;
    assert_eq!(server.calls("eval") - before, 4, "one of them the release");
    drop(guard);
    within_limit("settled", client.flush()).await;
}

/// The answer is lost and the step is repeated: acquired once, released once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repeated_step_is_held_once() {
    let (_server, proxy, client) = proxied_client().await;
    let fenced = client.fenced_lock("b");
    let multi = MultiLock::new([client.lock("a")]).and(&fenced);
    free(held(&multi).await).await;
    let guard = with_lost_answer(&proxy, multi.lock().into_future()).await;
    let guard = guard.unwrap();
    let owner = guard.owner();
    assert_eq!(client.lock("a").hold_count(owner).await.unwrap(), 1);
    assert_eq!(fenced.hold_count(owner).await.unwrap(), 1);
    assert_eq!(guard.token(&fenced), Some(2));
    with_lost_answer(&proxy, guard.unlock()).await.unwrap();
    assert_nothing_left(&client, &["a", "b"]).await;
}

/// One store does not answer: the multi-lock fails, and members on other stores are released.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unresponsive_store_leaves_nothing_behind() {
    let server = Server::start();
    let client = connect(response_timeout(Duration::from_millis(300)), &server.url()).await;
    let here = Client::embedded();
    let multi =
        MultiLock::new([here.lock("a"), client.lock("b"), client.lock("c")]).and(here.lock("d"));
    for dropped in [false, true] {
        server.freeze();
        let mut waiting = multi.lock().into_future();
        if dropped {
            // There is no answer yet, or the response timeout has already passed.
            assert!(!matches!(poll_up_to(3, &mut waiting).await, Some(Ok(_))));
            drop(waiting);
        } else {
            assert_matches!(waiting.await, Err(Error::ResponseTimeout { .. }));
        }
        assert_nothing_left(&here, &["a", "d"]).await;
        server.thaw();
        assert_nothing_left(&client, &["b", "c"]).await;
    }
}

#[tokio::test(start_paused = true)]
async fn renewed_for_hours_and_lost_on_time() {
    let [one, two, other] = embedded_clients();
    let multi = MultiLock::new([one.lock("a"), one.lock("b"), two.lock("c")]);
    let guard = held(&multi).await;
    for _ in 0..24 {
        tokio::time::sleep(3600 * SECOND).await;
        assert!(guard.is_valid());
        assert!(guard.valid_for() >= 19 * SECOND);
        for name in ["a", "b", "c"] {
            assert!(other.lock(name).try_lock().await.unwrap().is_none());
        }
    }
    // A waiter for a member that a dead holder left acquires all members when that lease ends.
    free(guard).await;
    let left = other.lock("b").lock().lease(20 * SECOND).await.unwrap();
    std::mem::forget(left);
    let begun = tokio::time::Instant::now();
    assert!(multi.try_lock().wait(19 * SECOND).await.unwrap().is_none());
    assert_eq!(begun.elapsed(), 19 * SECOND);
    let request = multi.try_lock().wait(19 * SECOND).lease(10 * SECOND);
    let guard = request.await.unwrap().expect("within its limit");
    assert_took(begun.elapsed(), 20 * SECOND..20 * SECOND + SECOND / 100);
    let begun = tokio::time::Instant::now();
    guard.lost().await;
    assert_took(begun.elapsed(), 9 * SECOND..10 * SECOND + SECOND / 100);
    assert!(!guard.is_valid());
    drop(guard);
    one.flush().await;
    two.flush().await;
    for client in [&one, &two] {
        tokio::time::sleep(2 * SECOND).await;
        assert_idle(client);
        assert_eq!(client.status().subscriptions, 0);
    }
}
