//! The fair lock: first come, first served over all clients, whatever becomes of those who wait.

mod common;

use std::future::IntoFuture as _;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{LONG, Stand, WATCHDOG, soon, until};
use redlatch::{Client, Error, Fair, FairLock, Guard, Loss, Owner, Result};
use redlatch_testkit::{Proxy, Server, shared, unique};
use tokio::task::JoinHandle;

type Waiting = JoinHandle<Result<Guard<Fair>>>;

/// Waits until so many are in the queue.
async fn queued(lock: &FairLock, waiters: usize) {
    until("in the queue", || async {
        lock.queue().await.unwrap().len() == waiters
    })
    .await;
}

/// Waits until those who wait have been told how long, so that only a message can be quicker.
async fn listening(client: &Client, waiters: usize) {
    until("subscribed", || async {
        client.status().subscriptions == waiters
    })
    .await;
}

/// Begins to wait, and returns when it has its place in the queue.
async fn wait_behind(lock: &FairLock, ahead: usize) -> Waiting {
    let waiting = tokio::spawn(lock.lock().into_future());
    queued(lock, ahead + 1).await;
    waiting
}

async fn served(waiting: Waiting) -> Guard<Fair> {
    soon("it is its turn", waiting).await.unwrap().unwrap()
}

/// A client whose subscriptions end soon after their last waiter.
async fn member(stand: &Stand) -> Client {
    stand.client_with(quick()).await
}

fn quick() -> redlatch::ClientBuilder {
    Client::builder().subscription_linger(Duration::from_millis(20))
}

/// Nothing is left in the store or in the client.
async fn nothing_left(clients: &[&Client], lock: &FairLock) {
    for client in clients {
        soon("settled", client.settled()).await;
        let status = client.status();
        assert_eq!((status.holds, status.background), (0, 0), "{status:?}");
        until("no subscription is left", || async {
            client.status().subscriptions == 0
        })
        .await;
    }
    assert!(!lock.is_locked().await.unwrap());
    assert!(lock.queue().await.unwrap().is_empty());
}

fn keys(name: &str) -> [String; 3] {
    [
        name.to_owned(),
        format!("redisson_lock_queue:{{{name}}}"),
        format!("redisson_lock_timeout:{{{name}}}"),
    ]
}

fn keys_left(server: &Server, name: &str) -> usize {
    let [lock, queue, timeouts] = keys(name);
    server.ask(&["EXISTS", &lock, &queue, &timeouts])
}

on_every_store! {
    a_free_lock_is_taken_and_given_back,
    clients_are_served_in_the_order_in_which_they_came,
    crowds_of_several_clients_are_served_in_order,
    try_lock_does_not_queue_and_does_not_overtake,
    waiting_with_a_limit_leaves_the_queue,
    who_gives_up_lets_the_next_one_go,
    a_dropped_waiter_leaves_the_queue,
    the_holder_enters_again_past_the_queue,
    a_non_reentrant_fair_lock_refuses_its_owner,
    force_unlock_calls_the_next_one,
    the_position_in_the_queue_can_be_read,
    leases_that_end_unused_are_followed_in_order,
    an_owner_waits_twice_and_gives_up_once,
    a_place_in_the_queue_is_given_up_at_every_await_point,
    settings_that_cannot_be_used_are_refused,
    it_excludes_the_other_locks_of_the_name,
    who_waits_without_queueing_is_called_when_nobody_queues,
    every_holder_is_alone,
    a_guard_that_lost_its_lock_takes_nothing_from_the_next_one,
}

async fn a_free_lock_is_taken_and_given_back(stand: Stand) {
    let client = member(&stand).await;
    let lock = client.fair_lock(&unique("fair"));
    assert!(!lock.is_locked().await.unwrap());
    for _ in 0..2 {
        let guard = lock.lock().await.unwrap();
        assert!(guard.is_valid() && lock.is_locked().await.unwrap());
        assert!(lock.is_held_by(guard.owner()).await.unwrap());
        assert!(!lock.is_held_by(Owner::new()).await.unwrap());
        assert_eq!(
            lock.holder().await.unwrap().unwrap().owner,
            guard.owner_id()
        );
        assert!(lock.remaining_lease().await.unwrap().unwrap() <= Duration::from_secs(30));
        guard.unlock().await.unwrap();
        assert!(!lock.is_locked().await.unwrap());
    }
    nothing_left(&[&client], &lock).await;
}

async fn clients_are_served_in_the_order_in_which_they_came(stand: Stand) {
    const WAITERS: usize = 30;
    let mut clients = Vec::new();
    for _ in 0..3 {
        clients.push(member(&stand).await);
    }
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
            guard.unlock().await.unwrap();
        }));
        queued(&clients[0].fair_lock(&name), n + 1).await;
    }
    held.unlock().await.unwrap();
    for one in waiting {
        soon("served", one).await.unwrap();
    }
    assert_eq!(*order.lock().unwrap(), Vec::from_iter(0..WAITERS));
    nothing_left(&clients.iter().collect::<Vec<_>>(), &lock).await;
}

/// F9: nobody is left behind, the order is that of the queue, and the timeouts go with it.
async fn crowds_of_several_clients_are_served_in_order(stand: Stand) {
    const EACH: usize = 125;
    let mut clients = Vec::new();
    for _ in 0..4 {
        clients.push(member(&stand).await);
    }
    let name = unique("crowd");
    let lock = clients[0].fair_lock(&name);
    let held = lock.lock().await.unwrap();
    let order: Arc<Mutex<Vec<String>>> = Arc::default();
    let mut waiting = Vec::new();
    for _ in 0..EACH {
        for client in &clients {
            let (lock, order) = (client.fair_lock(&name), order.clone());
            waiting.push(tokio::spawn(async move {
                let guard = lock.lock().await.unwrap();
                order.lock().unwrap().push(guard.owner_id().to_owned());
                guard.unlock().await.unwrap();
            }));
        }
    }
    queued(&lock, 4 * EACH).await;
    let expected = lock.queue().await.unwrap();
    held.unlock().await.unwrap();
    for one in waiting {
        soon("served", one).await.unwrap();
    }
    assert_eq!(*order.lock().unwrap(), expected);
    nothing_left(&clients.iter().collect::<Vec<_>>(), &lock).await;
    if let Stand::Server(server) = stand {
        assert_eq!(keys_left(server, &name), 0);
    }
}

async fn try_lock_does_not_queue_and_does_not_overtake(stand: Stand) {
    let (one, two) = (member(&stand).await, member(&stand).await);
    let name = unique("try");
    let lock = two.fair_lock(&name);
    let held = lock.try_lock().await.unwrap().unwrap();
    assert!(lock.try_lock().await.unwrap().is_none());
    let zero = lock.try_lock().wait(Duration::ZERO);
    assert!(zero.await.unwrap().is_none());
    two.settled().await;
    assert!(lock.queue().await.unwrap().is_empty(), "it does not queue");

    // Somebody waits who does not look at its message yet.
    let mut next = Box::pin(one.fair_lock(&name).lock().into_future());
    {
        let until_queued = queued(&lock, 1);
        tokio::select! {
            _ = &mut next => unreachable!("it is held"),
            () = until_queued => {}
        }
    }
    held.unlock().await.unwrap();
    assert!(!lock.is_locked().await.unwrap());
    assert!(
        lock.try_lock().await.unwrap().is_none(),
        "it overtakes nobody"
    );
    let guard = soon("its turn", next).await.unwrap();
    guard.unlock().await.unwrap();
    assert!(lock.try_lock().await.unwrap().is_some());
    nothing_left(&[&one, &two], &lock).await;
}

async fn waiting_with_a_limit_leaves_the_queue(stand: Stand) {
    let client = member(&stand).await;
    let name = unique("limit");
    let lock = client.fair_lock(&name);
    let held = lock.lock().await.unwrap();
    let wait = Duration::from_millis(30);
    let begun = std::time::Instant::now();
    assert!(lock.try_lock().wait(wait).await.unwrap().is_none());
    assert!(begun.elapsed() >= wait);
    soon("settled", client.settled()).await;
    assert!(lock.queue().await.unwrap().is_empty());
    if let Stand::Server(server) = stand {
        assert_eq!(keys_left(server, &name), 1, "the lock alone");
    }
    let waiting = tokio::spawn(lock.try_lock().wait(LONG).into_future());
    queued(&lock, 1).await;
    held.unlock().await.unwrap();
    let guard = soon("its turn", waiting).await.unwrap().unwrap().unwrap();
    guard.unlock().await.unwrap();
    nothing_left(&[&client], &lock).await;
}

async fn who_gives_up_lets_the_next_one_go(stand: Stand) {
    let (one, two) = (member(&stand).await, member(&stand).await);
    let name = unique("give-up");
    let (lock, other) = (one.fair_lock(&name), two.fair_lock(&name));
    for give_up_first in [true, false] {
        // Ten hours: a call that does not come is not made up for by the end of the lease.
        let held = lock.lock().lease(600 * LONG).await.unwrap();
        let mut head = Box::pin(lock.lock().into_future());
        tokio::select! {
            _ = &mut head => unreachable!("it is held"),
            () = queued(&lock, 1) => {}
        }
        let next = wait_behind(&other, 1).await;
        listening(&two, 1).await;
        if give_up_first {
            drop(head);
            soon("settled", one.settled()).await;
            assert_eq!(lock.queue().await.unwrap().len(), 1);
            held.unlock().await.unwrap();
        } else {
            // It is called, and gives up before it has asked: the call is passed on.
            held.unlock().await.unwrap();
            assert!(!lock.is_locked().await.unwrap());
            drop(head);
        }
        served(next).await.unlock().await.unwrap();
        nothing_left(&[&one, &two], &lock).await;
    }
}

async fn a_dropped_waiter_leaves_the_queue(stand: Stand) {
    let client = member(&stand).await;
    let lock = client.fair_lock(&unique("dropped"));
    let held = lock.lock().await.unwrap();
    let first = wait_behind(&lock, 0).await;
    let middle = wait_behind(&lock, 1).await;
    let last = wait_behind(&lock, 2).await;
    let queue = lock.queue().await.unwrap();
    middle.abort();
    queued(&lock, 2).await;
    assert_eq!(
        lock.queue().await.unwrap(),
        [queue[0].clone(), queue[2].clone()]
    );
    held.unlock().await.unwrap();
    for one in [first, last] {
        served(one).await.unlock().await.unwrap();
    }
    nothing_left(&[&client], &lock).await;
}

async fn the_holder_enters_again_past_the_queue(stand: Stand) {
    let client = member(&stand).await;
    let lock = client.fair_lock(&unique("again"));
    let me = Owner::new();
    let outer = lock.lock().owner(me).await.unwrap();
    let waiting = wait_behind(&lock, 0).await;
    let inner = soon("at once", lock.lock().owner(me).into_future())
        .await
        .unwrap();
    let third = soon("at once", outer.reenter().into_future())
        .await
        .unwrap();
    let tried = lock.try_lock().owner(me).await.unwrap().unwrap();
    assert_eq!(lock.hold_count(me).await.unwrap(), 4);
    assert_eq!(lock.queue().await.unwrap().len(), 1);
    for (guard, left) in [(outer, 3), (inner, 2), (third, 1), (tried, 0)] {
        assert!(!waiting.is_finished());
        guard.unlock().await.unwrap();
        assert_eq!(lock.hold_count(me).await.unwrap(), left);
    }
    served(waiting).await.unlock().await.unwrap();
    nothing_left(&[&client], &lock).await;
}

async fn a_non_reentrant_fair_lock_refuses_its_owner(stand: Stand) {
    let client = member(&stand).await;
    let lock = client.fair_lock(&unique("once")).non_reentrant();
    let me = Owner::new();
    let guard = lock.lock().owner(me).await.unwrap();
    for refused in [
        soon("refused", lock.lock().owner(me).into_future())
            .await
            .err(),
        lock.try_lock().owner(me).wait(LONG).await.err(),
        guard.reenter().await.err(),
    ] {
        let refused = refused.unwrap();
        assert!(matches!(refused, Error::AlreadyHeld { .. }), "{refused}");
    }
    let waiting = wait_behind(&lock, 0).await;
    guard.unlock().await.unwrap();
    served(waiting).await.unlock().await.unwrap();
    nothing_left(&[&client], &lock).await;
}

async fn force_unlock_calls_the_next_one(stand: Stand) {
    let settings = quick().watchdog(WATCHDOG);
    let (holder, other) = (stand.client_with(settings).await, member(&stand).await);
    let name = unique("force");
    let lock = other.fair_lock(&name);
    assert!(!lock.force_unlock().await.unwrap(), "nobody held it");
    let held = holder.fair_lock(&name).lock().await.unwrap();
    let first = wait_behind(&lock, 0).await;
    let second = wait_behind(&lock, 1).await;
    listening(&other, 2).await;
    assert!(lock.force_unlock().await.unwrap());
    let guard = served(first).await;
    assert!(!second.is_finished());
    soon("told at the next renewal", held.lost()).await;
    let lost = held.unlock().await.unwrap_err();
    assert!(
        matches!(
            lost,
            Error::Lost {
                reason: Loss::NotHeld,
                ..
            }
        ),
        "{lost}"
    );
    assert!(guard.is_valid());
    guard.unlock().await.unwrap();
    served(second).await.unlock().await.unwrap();
    nothing_left(&[&holder, &other], &lock).await;
}

async fn the_position_in_the_queue_can_be_read(stand: Stand) {
    let (one, two) = (member(&stand).await, member(&stand).await);
    let name = unique("position");
    let lock = one.fair_lock(&name);
    let held = lock.lock().await.unwrap();
    let mut waiting = Vec::new();
    let owners = [Owner::new(), Owner::new(), Owner::new()];
    for (n, owner) in owners.into_iter().enumerate() {
        assert_eq!(lock.position(owner).await.unwrap(), None);
        waiting.push(tokio::spawn(lock.lock().owner(owner).into_future()));
        queued(&lock, n + 1).await;
        assert_eq!(lock.position(owner).await.unwrap(), Some(n));
    }
    assert_eq!(
        two.fair_lock(&name).position(owners[0]).await.unwrap(),
        None
    );
    let ids = owners.map(|owner| one.owner_id(owner));
    assert_eq!(two.fair_lock(&name).queue().await.unwrap(), ids);
    assert_eq!(lock.position(held.owner()).await.unwrap(), None);
    held.unlock().await.unwrap();
    for one in waiting {
        served(one).await.unlock().await.unwrap();
    }
    nothing_left(&[&one, &two], &lock).await;
}

/// Nobody releases: each turn ends with its lease, and the next one knows when that is.
async fn leases_that_end_unused_are_followed_in_order(stand: Stand) {
    let (one, two) = (member(&stand).await, member(&stand).await);
    let name = unique("leases");
    let lock = one.fair_lock(&name);
    let lease = Duration::from_millis(150);
    let held = lock.lock().lease(lease).await.unwrap();
    let order: Arc<Mutex<Vec<usize>>> = Arc::default();
    let mut waiting = Vec::new();
    for n in 0..8 {
        let client = if n % 2 == 0 { &one } else { &two };
        let (lock, begun) = (client.fair_lock(&name), order.clone());
        let order = order.clone();
        waiting.push(tokio::spawn(async move {
            let guard = lock
                .try_lock()
                .wait(LONG)
                .lease(lease)
                .await
                .unwrap()
                .unwrap();
            order.lock().unwrap().push(n);
            guard
        }));
        let in_time = &one.fair_lock(&name);
        until("it waits or has had it", || async {
            in_time.queue().await.unwrap().len() + begun.lock().unwrap().len() > n
        })
        .await;
    }
    let mut guards = vec![held];
    for one in waiting {
        guards.push(soon("the lease before it ends", one).await.unwrap());
    }
    assert_eq!(*order.lock().unwrap(), Vec::from_iter(0..8));
    drop(guards);
    nothing_left(&[&one, &two], &lock).await;
}

/// The same owner waits in two tasks. Giving up takes it out of the queue; the other one goes back.
async fn an_owner_waits_twice_and_gives_up_once(stand: Stand) {
    let client = member(&stand).await;
    let lock = client.fair_lock(&unique("twice"));
    let held = lock.lock().await.unwrap();
    let me = Owner::new();
    let stays = tokio::spawn(lock.lock().owner(me).into_future());
    queued(&lock, 1).await;
    let leaves = lock.try_lock().owner(me).wait(Duration::from_millis(20));
    assert!(leaves.await.unwrap().is_none());
    soon("settled", client.settled()).await;
    queued(&lock, 1).await;
    held.unlock().await.unwrap();
    served(stays).await.unlock().await.unwrap();
    nothing_left(&[&client], &lock).await;
}

async fn a_place_in_the_queue_is_given_up_at_every_await_point(stand: Stand) {
    use std::future::{Future, poll_fn};
    use std::task::Poll;
    let (client, other) = (member(&stand).await, member(&stand).await);
    let name = unique("cancel");
    let lock = client.fair_lock(&name);
    for released_before in [false, true] {
        for polls in 1..12 {
            let held = other.fair_lock(&name).lock().await.unwrap();
            let mut gone = Box::pin(lock.lock().into_future());
            let mut polled = 0;
            let few = poll_fn(|cx| {
                polled += 1;
                match gone.as_mut().poll(cx) {
                    Poll::Ready(_) => Poll::Ready(()),
                    Poll::Pending if polled >= polls => Poll::Ready(()),
                    Poll::Pending => Poll::Pending,
                }
            });
            // Polled no more when nothing wakes it any more.
            let _ = tokio::time::timeout(Duration::from_millis(5), few).await;
            if released_before {
                held.unlock().await.unwrap();
                drop(gone);
            } else {
                drop(gone);
                held.unlock().await.unwrap();
            }
            let next = soon(
                "nobody stands in the way",
                other.fair_lock(&name).lock().into_future(),
            );
            next.await.unwrap().unlock().await.unwrap();
            soon("settled", client.settled()).await;
            assert!(lock.queue().await.unwrap().is_empty());
        }
    }
    nothing_left(&[&client, &other], &lock).await;
}

async fn settings_that_cannot_be_used_are_refused(stand: Stand) {
    let client = member(&stand).await;
    let lock = client.fair_lock(&unique("settings"));
    for bad in [Duration::ZERO, Duration::from_micros(999), Duration::MAX] {
        let lock = lock.clone().wait_time(bad);
        for refused in [
            lock.lock().await.err(),
            lock.try_lock().await.err(),
            lock.try_lock().wait(Duration::MAX).await.err(),
        ] {
            let refused = refused.unwrap();
            let known = matches!(
                refused,
                Error::InvalidSetting {
                    setting: "wait_time",
                    ..
                }
            );
            assert!(known, "{refused}");
        }
        assert!(!lock.is_locked().await.unwrap());
    }
    // The limits themselves work, with waiters.
    for good in [Duration::from_millis(1), redlatch::MAX_LEASE] {
        let lock = lock.clone().wait_time(good);
        let held = lock.lock().await.unwrap();
        let waiting = tokio::spawn(lock.try_lock().wait(Duration::MAX).into_future());
        listening(&client, 1).await;
        held.unlock().await.unwrap();
        let guard = soon("its turn", waiting).await.unwrap().unwrap().unwrap();
        guard.unlock().await.unwrap();
        nothing_left(&[&client], &lock).await;
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

async fn it_excludes_the_other_locks_of_the_name(stand: Stand) {
    let client = member(&stand).await;
    let name = unique("kinds");
    let (fair, plain) = (client.fair_lock(&name), client.lock(&name));
    let held = plain
        .lock()
        .lease(Duration::from_millis(200))
        .await
        .unwrap();
    assert!(fair.try_lock().await.unwrap().is_none());
    // Its release calls nobody here; the end of its lease is known.
    let waiting = wait_behind(&fair, 0).await;
    held.unlock().await.unwrap();
    let guard = served(waiting).await;
    assert!(plain.try_lock().await.unwrap().is_none());
    guard.unlock().await.unwrap();
    // One owner, two kinds at a time: an error, not a mix.
    let guard = plain.lock().await.unwrap();
    let mixed = fair.try_lock().owner(guard.owner()).await;
    assert!(matches!(mixed, Err(Error::WrongKind { .. })));
    guard.unlock().await.unwrap();
    nothing_left(&[&client], &fair).await;
}

/// Through `Client::lock`: by a release, by force, and when the last one in the queue gives up. The
/// leases end long after all of this.
async fn who_waits_without_queueing_is_called_when_nobody_queues(stand: Stand) {
    let (holder, other) = (member(&stand).await, member(&stand).await);
    let name = unique("unqueued");
    let (fair, plain) = (holder.fair_lock(&name), other.lock(&name));
    let held = || async { fair.lock().lease(10 * LONG).await.unwrap() };
    let refused = || async {
        listening(&other, 1).await;
        // The connection keeps order: this comes after what the waiter has asked.
        assert!(plain.is_locked().await.unwrap());
    };

    let guard = held().await;
    let waiting = tokio::spawn(plain.lock().into_future());
    refused().await;
    guard.unlock().await.unwrap();
    let next = soon("called by a release", waiting).await;
    next.unwrap().unwrap().unlock().await.unwrap();

    let guard = held().await;
    let waiting = tokio::spawn(plain.lock().into_future());
    refused().await;
    assert!(fair.force_unlock().await.unwrap());
    let next = soon("called by force", waiting).await;
    next.unwrap().unwrap().unlock().await.unwrap();
    drop(guard);

    // One that queues goes first. It does not come, and leaves.
    let guard = held().await;
    let mut queues = Box::pin(fair.lock().into_future());
    tokio::select! {
        biased;
        _ = &mut queues => panic!("it is held"),
        () = queued(&fair, 1) => {}
    }
    let waiting = tokio::spawn(plain.lock().into_future());
    refused().await;
    guard.unlock().await.unwrap();
    assert_eq!(fair.queue().await.unwrap().len(), 1);
    assert!(!waiting.is_finished());
    drop(queues);
    let next = soon("called by who gave up", waiting).await;
    next.unwrap().unwrap().unlock().await.unwrap();
    nothing_left(&[&holder, &other], &fair).await;
}

async fn every_holder_is_alone(stand: Stand) {
    let clients = [
        member(&stand).await,
        member(&stand).await,
        member(&stand).await,
    ];
    let name = unique("alone");
    let inside = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let tasks: Vec<_> = (0..12)
        .map(|n| {
            let (lock, inside) = (clients[n % 3].fair_lock(&name), inside.clone());
            tokio::spawn(async move {
                use std::sync::atomic::Ordering::SeqCst;
                for turn in 0..15 {
                    let patience = Duration::from_micros(((n * 15 + turn) * 7919 % 4000) as u64);
                    let guard = match turn % 3 {
                        0 => lock.try_lock().wait(patience).await.unwrap(),
                        1 => tokio::time::timeout(patience, lock.lock().into_future())
                            .await
                            .ok()
                            .map(|guard| guard.unwrap()),
                        _ => Some(lock.lock().await.unwrap()),
                    };
                    if let Some(guard) = guard {
                        assert_eq!(inside.fetch_add(1, SeqCst), 0, "two at once");
                        tokio::task::yield_now().await;
                        inside.fetch_sub(1, SeqCst);
                        guard.unlock().await.unwrap();
                    }
                }
            })
        })
        .collect();
    for task in tasks {
        soon("everybody has their turns", task).await.unwrap();
    }
    let lock = clients[0].fair_lock(&name);
    nothing_left(&clients.iter().collect::<Vec<_>>(), &lock).await;
    if let Stand::Server(server) = stand {
        assert_eq!(keys_left(server, &name), 0);
    }
}

async fn a_guard_that_lost_its_lock_takes_nothing_from_the_next_one(stand: Stand) {
    let client = member(&stand).await;
    let lock = client.fair_lock(&unique("late"));
    let late = lock.lock().lease(Duration::from_millis(100)).await.unwrap();
    let next = served(tokio::spawn(lock.lock().into_future())).await;
    soon("told", late.lost()).await;
    let lost = late.unlock().await.unwrap_err();
    assert!(
        matches!(
            lost,
            Error::Lost {
                reason: Loss::LeaseEnded,
                ..
            }
        ),
        "{lost}"
    );
    assert!(lock.is_held_by(next.owner()).await.unwrap());
    next.unlock().await.unwrap();
    nothing_left(&[&client], &lock).await;
}

// --- in virtual time ---------------------------------------------------------------------------

const SECOND: Duration = Duration::from_secs(1);

fn two_of(store: &redlatch::Embedded) -> (Client, Client) {
    let client = || Client::builder().connect_embedded(store).unwrap();
    (client(), client())
}

/// A holder that is renewed for hours does not cost those who wait their places.
#[tokio::test(start_paused = true)]
async fn places_are_kept_while_the_lock_is_held_for_hours() {
    let (one, two) = two_of(&redlatch::Embedded::new());
    let lock = one.fair_lock("a").wait_time(20 * SECOND);
    let held = lock.lock().await.unwrap();
    let mut waiting = Vec::new();
    for n in 0..10 {
        let lock = if n % 2 == 0 {
            &lock
        } else {
            &two.fair_lock("a").wait_time(20 * SECOND)
        };
        waiting.push(wait_behind(lock, n).await);
    }
    let queue = lock.queue().await.unwrap();
    for _ in 0..12 {
        tokio::time::sleep(600 * SECOND).await;
        // Somebody else asks, who would drop those who were given up.
        assert!(two.fair_lock("a").try_lock().await.unwrap().is_none());
        assert_eq!(lock.queue().await.unwrap(), queue);
    }
    held.unlock().await.unwrap();
    for one in waiting {
        let guard = served(one).await;
        // Also while they have it for long.
        tokio::time::sleep(300 * SECOND).await;
        guard.unlock().await.unwrap();
    }
}

/// F10: a dead holder costs its lease, each dead waiter its own wait time.
#[tokio::test(start_paused = true)]
async fn the_dead_cost_their_own_time_and_no_more() {
    let store = redlatch::Embedded::new();
    let (dying, living) = two_of(&store);
    let lock = living.fair_lock("a").wait_time(30 * SECOND);
    let dead = dying.fair_lock("a").wait_time(5 * SECOND);
    // A holder that says nothing any more, and two who waited: their queue entries stay behind.
    std::mem::forget(dead.lock().lease(20 * SECOND).await.unwrap());
    let begun = tokio::time::Instant::now();
    for n in 0..2 {
        let mut ghost = Box::pin(dead.lock().into_future());
        tokio::select! {
            _ = &mut ghost => unreachable!("it is held"),
            () = queued(&lock, n + 1) => {}
        }
        // Never polled again.
        std::mem::forget(ghost);
    }
    let guard = soon_virtual(lock.lock().into_future()).await;
    let took = begun.elapsed();
    assert!(took >= 29 * SECOND && took < 32 * SECOND, "{took:?}");
    guard.unlock().await.unwrap();
    assert!(lock.queue().await.unwrap().is_empty());
}

async fn soon_virtual<T>(work: impl Future<Output = Result<T>>) -> T {
    let limit = Duration::from_secs(24 * 3600);
    tokio::time::timeout(limit, work).await.unwrap().unwrap()
}

/// Turns are short, and then one of them dies: the next one waits for its lease, not for old times.
#[tokio::test(start_paused = true)]
async fn a_holder_that_dies_in_a_long_queue_costs_its_lease() {
    let (one, two) = two_of(&redlatch::Embedded::new());
    let lock = one.fair_lock("a");
    let lease = 10 * SECOND;
    let held = lock.lock().lease(3600 * SECOND).await.unwrap();
    let mut waiting = Vec::new();
    for n in 0..50 {
        waiting.push(tokio::spawn(
            two.fair_lock("a").lock().lease(lease).into_future(),
        ));
        queued(&lock, n + 1).await;
    }
    held.unlock().await.unwrap();
    for (n, one) in waiting.into_iter().enumerate() {
        let begun = tokio::time::Instant::now();
        let guard = soon_virtual(async { one.await.unwrap() }).await;
        let took = begun.elapsed();
        match n {
            26 => assert!(took >= lease - SECOND && took <= lease + SECOND, "{took:?}"),
            _ => assert!(took < SECOND, "{n}: {took:?}"),
        }
        match n {
            25 => std::mem::forget(guard),
            _ => guard.unlock().await.unwrap(),
        }
    }
}

// --- on a server, with things breaking ---------------------------------------------------------

fn evaluated(server: &Server) -> u64 {
    let statistics: String = server.ask(&["INFO", "commandstats"]);
    let calls = |line: &str| line.split(['=', ',']).nth(1)?.parse::<u64>().ok();
    let evals = statistics
        .lines()
        .filter(|line| line.starts_with("cmdstat_eval"));
    evals.filter_map(calls).sum()
}

async fn client(server: &Server) -> Client {
    quick().connect(&server.url()).await.unwrap()
}

/// A release wakes the next one and nobody else, and who waits does not ask.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_wakes_only_the_next_one() {
    const WAITERS: usize = 60;
    let server = Server::start();
    let (holder, crowd) = (client(&server).await, client(&server).await);
    let lock = holder.fair_lock("a");
    let held = lock.lock().await.unwrap();
    let mut waiting = Vec::new();
    for n in 0..WAITERS {
        waiting.push(wait_behind(&crowd.fair_lock("a"), n).await);
    }
    until("all are subscribed", || async {
        let channels: Vec<String> = server.ask(&["PUBSUB", "CHANNELS", "*"]);
        channels.len() == WAITERS
    })
    .await;
    // Over the same connection, so behind what they asked together with the subscription.
    assert_eq!(crowd.fair_lock("a").queue().await.unwrap().len(), WAITERS);
    let quiet = evaluated(&server);
    let last = Vec::from_iter(waiting.split_off(1));
    held.unlock().await.unwrap();
    let first = served(waiting.remove(0)).await;
    // The release, the acquisition, and the next one, who is told how long that lasts.
    until("the next one has asked", || async {
        evaluated(&server) >= quiet + 3
    })
    .await;
    let asked = evaluated(&server) - quiet;
    assert!(asked <= 4, "{asked} scripts for one turn");
    assert!(last.iter().all(|one| !one.is_finished()));
    first.unlock().await.unwrap();
    for one in last {
        served(one).await.unlock().await.unwrap();
    }
    let per_turn = (evaluated(&server) - quiet) as f64 / WAITERS as f64;
    assert!(per_turn < 3.3, "{per_turn} scripts per turn");
    nothing_left(&[&holder, &crowd], &lock).await;
    assert_eq!(keys_left(&server, "a"), 0);
}

/// F10: processes that are gone: a holder and some who waited, as `kill -9` leaves them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_killed_processes_left_behind_blocks_nobody() {
    let server = Server::start();
    let alive = client(&server).await;
    let lock = alive.fair_lock("a");
    let [hash, queue, timeouts] = keys("a");
    let _: i64 = server.ask(&["HSET", &hash, "dead:1", "1"]);
    let _: i64 = server.ask(&["PEXPIRE", &hash, "300"]);
    let now: Vec<u64> = server.ask(&["TIME"]);
    for (n, owner) in ["dead:2", "dead:3", "dead:4"].into_iter().enumerate() {
        let until = now[0] * 1000 + 500 + 200 * n as u64;
        let _: i64 = server.ask(&["RPUSH", &queue, owner]);
        // The last one has no timeout at all.
        if n < 2 {
            let _: i64 = server.ask(&["ZADD", &timeouts, &until.to_string(), owner]);
        }
    }
    let begun = std::time::Instant::now();
    let guard = soon("the dead are not waited for", lock.lock().into_future())
        .await
        .unwrap();
    assert!(
        begun.elapsed() < Duration::from_secs(20),
        "long after their time"
    );
    assert!(lock.queue().await.unwrap().is_empty());
    guard.unlock().await.unwrap();
    nothing_left(&[&alive], &lock).await;
    assert_eq!(keys_left(&server, "a"), 0);
}

/// F10: of those who wait, one dies; the release is for the next one that is alive.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_that_dies_is_waited_for_and_passed_over() {
    let server = Server::start();
    let (alive, holder) = (client(&server).await, client(&server).await);
    let lock = holder.fair_lock("a");
    // Ten hours: were its end waited for, this would not end.
    let held = lock.lock().lease(600 * LONG).await.unwrap();
    let dead = std::thread::spawn({
        let url = server.url();
        move || {
            // The runtime ends, and with it everything that could give up: as after a kill.
            let runtime = tokio::runtime::Runtime::new().unwrap();
            runtime.block_on(async {
                let client = Client::connect(&url).await.unwrap();
                let lock = client.fair_lock("a").wait_time(Duration::from_millis(1500));
                let waiting = lock.lock().into_future();
                let mut waiting = Box::pin(waiting);
                tokio::select! {
                    _ = &mut waiting => unreachable!("it is held"),
                    () = queued(&lock, 1) => {}
                }
                std::mem::forget(waiting);
            });
        }
    });
    dead.join().unwrap();
    let waiting = wait_behind(&alive.fair_lock("a"), 1).await;
    until("the dead one's connection is closed", || async {
        server.clients() <= 2
    })
    .await;
    let begun = std::time::Instant::now();
    held.unlock().await.unwrap();
    let guard = served(waiting).await;
    assert!(
        begun.elapsed() >= Duration::from_millis(900),
        "it was not waited for"
    );
    guard.unlock().await.unwrap();
    nothing_left(&[&alive, &holder], &lock).await;
    assert_eq!(keys_left(&server, "a"), 0);
}

/// F11: the server does not answer while somebody gives up; the queue is left afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn giving_up_reaches_a_server_that_was_away() {
    let server = Server::start();
    let proxy = Proxy::to(server.port());
    let holder = client(&server).await;
    let settings = quick().response_timeout(Duration::from_millis(200));
    let lock = holder.fair_lock("a");
    for way in ["stalled", "refused", "dropped while stalled"] {
        let away = settings.clone().connect(&proxy.url()).await.unwrap();
        let held = lock.lock().await.unwrap();
        let theirs = away.fair_lock("a");
        let waiting = match way {
            "dropped while stalled" => tokio::spawn(theirs.try_lock().wait(LONG).into_future()),
            _ => tokio::spawn(
                theirs
                    .try_lock()
                    .wait(Duration::from_millis(300))
                    .into_future(),
            ),
        };
        queued(&lock, 1).await;
        match way {
            "refused" => {
                proxy.refuse(true);
                proxy.cut();
            }
            _ => proxy.stall(true),
        }
        if way == "dropped while stalled" {
            waiting.abort();
            let _ = waiting.await;
        } else {
            // Its time is over, or the server away for too long: either way it has given up.
            match soon("gives up", waiting).await.unwrap() {
                Ok(None) => {}
                Ok(Some(_)) => panic!("it is held"),
                Err(error) => assert!(error.is_transient(), "{error}"),
            }
        }
        assert!(away.status().background > 0, "{way}");
        assert_eq!(
            lock.queue().await.unwrap().len(),
            1,
            "{way}: a ghost, for now"
        );
        proxy.refuse(false);
        proxy.stall(false);
        soon("settled", away.settled()).await;
        assert!(lock.queue().await.unwrap().is_empty(), "{way}");
        held.unlock().await.unwrap();
        nothing_left(&[&holder, &away], &lock).await;
        assert_eq!(keys_left(&server, "a"), 0);
    }
}

/// Redisson's own way to provoke it: the server takes no writes for a while.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_paused_server_delays_giving_up_and_prevents_nothing() {
    let server = Server::start();
    let settings = quick().response_timeout(Duration::from_millis(200));
    let waiter = settings.connect(&server.url()).await.unwrap();
    let holder = client(&server).await;
    let lock = holder.fair_lock("a");
    let held = lock.lock().lease(LONG).await.unwrap();
    let theirs = waiter.fair_lock("a");
    let waiting = tokio::spawn(
        theirs
            .try_lock()
            .wait(Duration::from_millis(300))
            .into_future(),
    );
    queued(&lock, 1).await;
    let _: () = server.ask(&["CLIENT", "PAUSE", "60000", "WRITE"]);
    let gave_up = soon("gives up", waiting).await.unwrap();
    assert!(!matches!(gave_up, Ok(Some(_))));
    let _: () = server.ask(&["CLIENT", "UNPAUSE"]);
    soon("settled", waiter.settled()).await;
    assert!(lock.queue().await.unwrap().is_empty());
    held.unlock().await.unwrap();
    nothing_left(&[&holder, &waiter], &lock).await;
}

/// The answers are lost on the way: what is sent again joins once, takes once, leaves once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_sent_again_counts_once() {
    let server = Server::start();
    let proxy = Proxy::to(server.port());
    let holder = client(&server).await;
    let shaky = quick().connect(&proxy.url()).await.unwrap();
    let (lock, theirs) = (holder.fair_lock("a"), shaky.fair_lock("a"));
    // So that the scripts are known, and lost answers are those of the steps themselves.
    theirs.lock().await.unwrap().unlock().await.unwrap();
    let held = lock.lock().await.unwrap();

    proxy.swallow_replies(true);
    let joining = tokio::spawn(theirs.lock().into_future());
    queued(&lock, 1).await;
    let behind = wait_behind(&lock, 1).await;
    proxy.wait_until_swallowed();
    proxy.swallow_replies(false);
    proxy.cut();
    listening(&shaky, 1).await;
    assert_eq!(lock.queue().await.unwrap().len(), 2, "joined once");
    let distances: Vec<f64> = distances(&server);
    assert!((distances[0] - 300_000.0).abs() < 1000.0, "{distances:?}");

    // Called, and takes it; the answer to that is lost, and once more the same.
    proxy.stall(true);
    held.unlock().await.unwrap();
    proxy.stall(false);
    let guard = served(joining).await;
    assert_eq!(
        lock.hold_count(guard.owner()).await.unwrap(),
        0,
        "another client's"
    );
    assert_eq!(theirs.hold_count(guard.owner()).await.unwrap(), 1);
    assert_eq!(lock.queue().await.unwrap().len(), 1);

    proxy.swallow_replies(true);
    let unlocking = tokio::spawn(guard.unlock());
    let next = served(behind).await;
    proxy.wait_until_swallowed();
    proxy.swallow_replies(false);
    proxy.cut();
    soon("unlocked", unlocking).await.unwrap().unwrap();
    assert!(lock.is_held_by(next.owner()).await.unwrap());
    next.unlock().await.unwrap();
    nothing_left(&[&holder, &shaky], &lock).await;
    assert_eq!(keys_left(&server, "a"), 0);
}

/// The distances between those who wait, in milliseconds.
fn distances(server: &Server) -> Vec<f64> {
    let [_, _, timeouts] = keys("a");
    let scores: Vec<(String, f64)> = server.ask(&["ZRANGE", &timeouts, "0", "-1", "WITHSCORES"]);
    scores.windows(2).map(|two| two[1].1 - two[0].1).collect()
}

/// F9: coming, waiting in vain and leaving again and again moves nobody's time away.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_timeouts_of_the_queue_do_not_drift() {
    let server = Server::start();
    let client = client(&server).await;
    let lock = client.fair_lock("a").wait_time(Duration::from_secs(100));
    let mut held = lock.lock().lease(LONG).await.unwrap();
    let mut waiting = Vec::new();
    for n in 0..3 {
        let patient = lock.lock().lease(LONG).into_future();
        waiting.push(tokio::spawn(patient));
        queued(&lock, n + 1).await;
    }
    for round in 0..40 {
        // Four who give up at once, among those who stay.
        let leave = (0..4).map(|_| lock.try_lock().wait(Duration::from_millis(2)).into_future());
        for one in leave.map(tokio::spawn).collect::<Vec<_>>() {
            assert!(one.await.unwrap().unwrap().is_none());
        }
        if round % 10 == 0 {
            // And a turn: the next one has it, and the last holder comes again.
            soon("settled", client.settled()).await;
            held.unlock().await.unwrap();
            held = served(waiting.remove(0)).await;
            // Behind some who leave when it has its place.
            let leave = (0..4).map(|_| tokio::spawn(lock.lock().into_future()));
            let leave: Vec<_> = leave.collect();
            queued(&lock, 6).await;
            let again = tokio::spawn(lock.lock().lease(LONG).into_future());
            waiting.push(again);
            queued(&lock, 7).await;
            for one in leave {
                one.abort();
            }
            queued(&lock, 3).await;
        }
    }
    soon("settled", client.settled()).await;
    queued(&lock, 3).await;
    let [_, _, timeouts] = keys("a");
    let scores: Vec<(String, f64)> = server.ask(&["ZRANGE", &timeouts, "0", "-1", "WITHSCORES"]);
    let now: Vec<f64> = server.ask(&["TIME"]);
    for (place, (_, until)) in scores.iter().enumerate() {
        let left = until / 1000.0 - now[0];
        let most = 60.0 + 100.0 * (place + 1) as f64;
        assert!(
            left <= most + 1.0 && left > most - 70.0,
            "{place}: {left} s"
        );
    }
    held.unlock().await.unwrap();
    for one in waiting {
        served(one).await.unlock().await.unwrap();
    }
    nothing_left(&[&client], &lock).await;
    assert_eq!(keys_left(&server, "a"), 0);
}

/// A server that loses everything (FLUSHALL, a restart): who waits queues again and gets it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_lost_its_data_is_queued_at_again() {
    let mut server = Server::start();
    let (one, two) = (client(&server).await, client(&server).await);
    let lock = one.fair_lock("a").wait_time(Duration::from_secs(2));
    for restarted in [false, true] {
        let held = lock.lock().lease(Duration::from_secs(1)).await.unwrap();
        let mut waiting = Vec::new();
        for n in 0..6 {
            let client = if n % 2 == 0 { &one } else { &two };
            let lock = client.fair_lock("a").wait_time(Duration::from_secs(2));
            waiting.push(wait_behind(&lock, n).await);
        }
        if restarted {
            server.restart();
        } else {
            let _: () = server.ask(&["FLUSHALL"]);
            let _: () = server.ask(&["SCRIPT", "FLUSH"]);
        }
        drop(held);
        // In a new order, so everybody on their own.
        let unlocking = waiting
            .into_iter()
            .map(|one| tokio::spawn(async move { served(one).await.unlock().await.unwrap() }));
        for one in unlocking.collect::<Vec<_>>() {
            soon("served", one).await.unwrap();
        }
        nothing_left(&[&one, &two], &lock).await;
    }
}

/// The connection is cut while all wait: they keep their places.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn places_are_kept_across_reconnection() {
    let server = Server::start();
    let (holder, crowd) = (client(&server).await, client(&server).await);
    let lock = holder.fair_lock("a");
    let held = lock.lock().lease(10 * LONG).await.unwrap();
    let mut waiting = Vec::new();
    for n in 0..20 {
        waiting.push(wait_behind(&crowd.fair_lock("a"), n).await);
    }
    let queue = lock.queue().await.unwrap();
    for _ in 0..3 {
        listening(&crowd, 20).await;
        server.cut_all();
    }
    assert_eq!(lock.queue().await.unwrap(), queue);
    // Released while they may not be connected again yet.
    held.unlock().await.unwrap();
    for (one, owner) in waiting.into_iter().zip(queue) {
        let guard = served(one).await;
        assert_eq!(guard.owner_id(), owner);
        guard.unlock().await.unwrap();
    }
    nothing_left(&[&holder, &crowd], &lock).await;
}

/// Keys of other kinds are an error and stay as they are.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn foreign_keys_are_refused_and_left_alone() {
    let server = shared();
    let client = client(server).await;
    for foreign in 0..3 {
        let name = unique("foreign");
        let lock = client.fair_lock(&name);
        let planted = &keys(&name)[foreign];
        let _: () = server.ask(&["SET", planted, "mine"]);
        if foreign > 0 {
            // Somebody holds it, so that queueing is what fails.
            let _: i64 = server.ask(&["HSET", &name, "other:1", "1"]);
            let _: i64 = server.ask(&["PEXPIRE", &name, "600000"]);
        }
        let refused = lock.try_lock().wait(LONG).await.unwrap_err();
        assert!(
            matches!(refused, Error::WrongKind { .. }),
            "{foreign}: {refused}"
        );
        soon("settled", client.settled()).await;
        assert_eq!(server.ask::<String>(&["GET", planted]), "mine");
    }
    let name = unique("foreign-hash");
    let lock = client.fair_lock(&name);
    let _: i64 = server.ask(&["HSET", &name, "field", "x"]);
    for refused in [lock.lock().await.err(), lock.force_unlock().await.err()] {
        assert!(
            matches!(refused, Some(Error::WrongKind { .. })),
            "{refused:?}"
        );
    }
    let name = unique("read-write");
    let _: i64 = server.ask(&["HSET", &name, "mode", "read", "other:1", "1"]);
    let refused = client.fair_lock(&name).lock().await.unwrap_err();
    assert!(matches!(refused, Error::WrongKind { .. }), "{refused}");
}

/// What Redisson left in the queue is waited behind, and what we leave is as Redisson writes it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_queue_is_redissons() {
    let server = Server::start();
    let settings = Client::builder().client_id("rust");
    let client = settings.connect(&server.url()).await.unwrap();
    let lock = client.fair_lock("a").wait_time(Duration::from_secs(50));
    let [hash, queue, timeouts] = keys("a");
    let held = lock.lock().lease(LONG).await.unwrap();
    let now: Vec<i64> = server.ask(&["TIME"]);
    let until = (now[0] + 500) * 1000;
    let _: i64 = server.ask(&["RPUSH", &queue, "java:7"]);
    let _: i64 = server.ask(&["ZADD", &timeouts, &until.to_string(), "java:7"]);
    let waiting = wait_behind(&lock, 1).await;
    let owner = &lock.queue().await.unwrap()[1];
    assert_eq!(
        server.ask::<Vec<String>>(&["LRANGE", &queue, "0", "-1"]),
        ["java:7", owner]
    );
    let score: f64 = server.ask(&["ZSCORE", &timeouts, owner]);
    assert_eq!(
        score as i64,
        until + 50_000,
        "its own wait time behind the last one"
    );
    // A release is for the head, on the channel of its own.
    let (tell, told) = std::sync::mpsc::channel();
    let mut java = server.connection();
    let (ready, is_ready) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut listening = java.as_pubsub();
        listening
            .subscribe("redisson_lock__channel:{a}:java:7")
            .unwrap();
        ready.send(()).unwrap();
        let _ = tell.send(
            listening
                .get_message()
                .unwrap()
                .get_payload::<String>()
                .unwrap(),
        );
    });
    is_ready.recv().unwrap();
    held.unlock().await.unwrap();
    assert_eq!(told.recv_timeout(LONG).unwrap(), "0");
    assert_eq!(server.ask::<i64>(&["EXISTS", &hash]), 0, "left to the head");
    assert!(!waiting.is_finished());
    // Java takes its turn as its script does, and releases: the next one is called.
    assert_eq!(server.ask::<String>(&["LPOP", &queue]), "java:7");
    let _: i64 = server.ask(&["ZREM", &timeouts, "java:7"]);
    let channel = format!("redisson_lock__channel:{{a}}:{owner}");
    assert_eq!(
        server.ask::<i64>(&["PUBLISH", &channel, "0"]),
        1,
        "it listens"
    );
    served(waiting).await.unlock().await.unwrap();
    nothing_left(&[&client], &lock).await;
}

#[test]
fn threads_are_served_in_order() {
    let client = redlatch::blocking::Client::embedded().unwrap();
    let lock = client.fair_lock("a").wait_time(Duration::from_secs(30));
    let held = lock.lock().unwrap();
    let again = lock.lock().unwrap();
    assert_eq!(lock.hold_count().unwrap(), 2);
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut threads = Vec::new();
    for n in 0..8 {
        let (lock, seen, order) = (lock.clone(), lock.clone(), order.clone());
        let (tell, told) = std::sync::mpsc::channel();
        threads.push(std::thread::spawn(move || {
            tell.send(redlatch::blocking::current_thread()).unwrap();
            let guard = lock.lock().unwrap();
            order.lock().unwrap().push(n);
            guard.unlock().unwrap();
        }));
        let owner = told.recv().unwrap();
        let begun = std::time::Instant::now();
        while seen.position(owner).unwrap() != Some(n) {
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
    let held = once.try_lock().unwrap().unwrap();
    assert!(matches!(once.lock(), Err(Error::AlreadyHeld { .. })));
    held.unlock().unwrap();
    client.settled().unwrap();
}
