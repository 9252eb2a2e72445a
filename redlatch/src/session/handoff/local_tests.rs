use std::future::IntoFuture as _;
use std::time::Duration;

use tokio::task::{JoinHandle, yield_now};
use tokio::time::Instant;

use super::super::HoldRef;
use super::local::{WaiterCounts, check_handoff};
use crate::error::{Error, Result};
use crate::hold::{AcquireParams, CHECK_LIMIT, HoldKind as _, OtherClients};
use crate::keyspace::Keyspace;
use crate::locks::Reentrant;
use crate::step::Outcome;
use crate::step::ScriptReply;
use crate::step::differential;
use crate::store::embedded::failure_injection::Failure::{NoAnswer, NoEffect, NotSent};
use crate::test_prelude::{SECOND, clients, run_others};
use crate::{Client, Embedded, Guard, Lock, Owner, OwnerId};

/// Starts a request and lets it join the queue.
async fn waiter(lock: &Lock) -> JoinHandle<Result<Guard>> {
    let waiter = tokio::spawn(lock.lock().into_future());
    run_others().await;
    waiter
}

/// Returns the owner that the store knows.
async fn owner(lock: &Lock) -> Option<OwnerId> {
    lock.holder().await.unwrap().map(|holder| holder.owner)
}

async fn unlock_for(guard: Guard, waiter: JoinHandle<Result<Guard>>) -> Guard {
    guard.unlock().await.unwrap();
    waiter.await.unwrap().unwrap()
}

#[tokio::test(start_paused = true)]
async fn waiters_take_over_hold_of_released_or_dropped_guard() {
    let [client, _] = clients().1;
    let lock = client.lock("a");
    let first = lock.lock().await.unwrap();
    let known = owner(&lock).await;
    let waiters = [waiter(&lock).await, waiter(&lock).await];
    let [second, third] = waiters;
    let second = unlock_for(first, second).await;
    assert_eq!(owner(&lock).await, known);
    assert!(second.is_valid() && !third.is_finished());
    drop(second);
    let third = third.await.unwrap().unwrap();
    assert_eq!(owner(&lock).await, known);
    third.unlock().await.unwrap();
    assert!(!lock.is_locked().await.unwrap());
    assert_eq!(client.status().holds, 0);
}

/// With one question for each section.
#[tokio::test(start_paused = true)]
async fn hold_passes_on_after_long_sections() {
    for drops in [false, true] {
        let [client, peer] = clients().1;
        let lock = client.lock("a");
        let mut guard = lock.lock().await.unwrap();
        let known = owner(&lock).await;
        for millis in [12, 12, 20, 200, 1] {
            let next = waiter(&lock).await;
            tokio::time::sleep(Duration::from_millis(millis)).await;
            match drops {
                false => guard.unlock().await.unwrap(),
                true => drop(guard),
            }
            guard = next.await.unwrap().unwrap();
            assert_eq!(owner(&lock).await, known, "{millis} {drops}");
        }
        // Another client that waits goes first.
        let next = waiter(&lock).await;
        let theirs = waiter(&peer.lock("a")).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
        guard.unlock().await.unwrap();
        let theirs = theirs.await.unwrap().unwrap();
        assert!(!next.is_finished());
        theirs.unlock().await.unwrap();
        drop(next);
    }
}

/// A release that asks may be canceled, and the store may not answer, or have lost the lock.
#[tokio::test(start_paused = true)]
async fn release_that_asks_first_ends_without_answer() {
    for failures in [vec![], vec![NoAnswer], vec![NoEffect; 2], vec![NotSent; 2]] {
        for ends in ["awaited", "canceled", "dropped", "lost", "late"] {
            let store = Embedded::new();
            let [client, peer] =
                [(); 2].map(|()| Client::builder().connect_embedded(&store).unwrap());
            let lock = client.lock("a");
            let guard = lock.lock().await.unwrap();
            let next = waiter(&lock).await;
            tokio::time::sleep(Duration::from_millis(12)).await;
            if ends == "lost" {
                // Without a message.
                store.remove("a");
            }
            store.fail(failures.clone());
            match ends {
                "dropped" => drop(guard),
                "canceled" => {
                    store.delay_answers([Duration::from_millis(1)]);
                    let mut unlocking = Box::pin(guard.unlock());
                    let waits = poll_once(&mut unlocking).await.is_none();
                    assert!(waits || !failures.is_empty());
                }
                _ => {
                    let delay = if ends == "late" {
                        2 * CHECK_LIMIT
                    } else {
                        Duration::ZERO
                    };
                    store.delay_answers([delay]);
                    let unlocked = guard.unlock().await;
                    if failures.is_empty() {
                        let is_lost = matches!(unlocked, Err(Error::Lost { .. }));
                        assert_eq!(is_lost, ends == "lost", "{unlocked:?}");
                    }
                }
            }
            let next = next.await.unwrap().unwrap();
            assert!(next.is_valid());
            next.unlock().await.unwrap();
            client.flush().await;
            let theirs = peer.lock("a").try_lock().await.unwrap();
            assert!(theirs.is_some(), "{ends} {failures:?}");
            assert_eq!(client.status().holds, 0);
        }
    }
}

/// The hold is released and acquired again, for another owner, if a caller has named its owner,
/// if either request has a fixed lease, if less than half of the lease is left, or if the
/// client does not hand over.
#[tokio::test(start_paused = true)]
async fn other_holds_are_released() {
    async fn is_handed_over(
        lock: &Lock,
        first: impl AsyncFn(&Lock) -> Guard,
        second: impl AsyncFn(&Lock) -> Result<Guard>,
    ) -> bool {
        let guard = first(lock).await;
        let known = owner(lock).await;
        let (released, acquired) = tokio::join!(
            async {
                run_others().await;
                guard.unlock().await
            },
            second(lock)
        );
        released.unwrap();
        let guard = acquired.unwrap();
        let is_same = owner(lock).await == known;
        guard.unlock().await.unwrap();
        is_same
    }
    let plain = async |lock: &Lock| lock.lock().await.unwrap();
    let next = async |lock: &Lock| lock.lock().await;
    let [client, _] = clients().1;
    let lock = client.lock("a");
    assert!(is_handed_over(&lock, plain, next).await);
    let named = async |lock: &Lock| lock.lock().owner(Owner::new()).await.unwrap();
    assert!(!is_handed_over(&lock, named, next).await);
    let shown = async |lock: &Lock| {
        let guard = lock.lock().await.unwrap();
        assert_eq!(guard.owner_id(), lock.session.id.owner_id(guard.owner()));
        guard
    };
    assert!(is_handed_over(&lock, shown, next).await);
    let fixed = async |lock: &Lock| lock.lock().lease(SECOND).await.unwrap();
    assert!(!is_handed_over(&lock, fixed, next).await);
    let next_named = async |lock: &Lock| lock.lock().owner(Owner::new()).await;
    assert!(!is_handed_over(&lock, plain, next_named).await);
    let next_fixed = async |lock: &Lock| lock.lock().lease(SECOND).await;
    assert!(!is_handed_over(&lock, plain, next_fixed).await);
    let client = Client::builder().local_hand_over(false);
    let client = client.connect_embedded(&Embedded::new()).unwrap();
    assert!(!is_handed_over(&client.lock("a"), plain, next).await);
}

/// The answer to the request of the writer says that another owner writes, or that the key is of another kind.
#[tokio::test(start_paused = true)]
async fn writer_that_learns_of_its_loss_does_not_pass_on() {
    for (downgrades, is_foreign) in [(true, false), (true, true), (false, false), (false, true)] {
        let store = Embedded::new();
        let [client, peer] = [(); 2].map(|()| Client::builder().connect_embedded(&store).unwrap());
        let (lock, theirs) = (client.read_write_lock("a"), peer.read_write_lock("a"));
        let writer = lock.write().lock().await.unwrap();
        let next = tokio::spawn(lock.write().lock().into_future());
        run_others().await;
        store.remove("a");
        let other = match is_foreign {
            true => {
                assert!(peer.semaphore("a").try_set_permits(1).await.unwrap());
                None
            }
            false => theirs.write().try_lock().await.unwrap(),
        };
        assert_eq!(other.is_some(), !is_foreign);
        match downgrades {
            true => assert!(writer.downgrade().await.is_err()),
            false => {
                assert!(writer.reenter_read().await.is_err());
                drop(writer);
            }
        }
        run_others().await;
        if next.is_finished() {
            assert!(next.await.unwrap().is_err(), "{downgrades} {is_foreign}");
        }
        drop(other);
    }
}

#[tokio::test(start_paused = true)]
async fn owner_of_released_guard_cannot_reenter_hold_that_has_passed_on() {
    let [client, _] = clients().1;
    let lock = client.lock("a");
    let guard = lock.lock().await.unwrap();
    let (owner, next) = (guard.owner(), waiter(&lock).await);
    let next = unlock_for(guard, next).await;
    assert_eq!(next.owner(), owner);
    let refused = lock.try_lock().owner(owner).await;
    assert!(matches!(refused, Err(Error::InvalidSetting { .. })));
    assert_eq!(next.hold_count(), 1);
}

/// The store lets the owner of the write hold read, whichever task has the hold.
#[tokio::test(start_paused = true)]
async fn writer_does_not_pass_on_while_its_owner_reads() {
    let [client, _] = clients().1;
    let lock = client.read_write_lock("a");
    let owner = async || lock.write().holder().await.unwrap().map(|one| one.owner);
    for way in ["request", "reader", "downgraded", "released"] {
        let writer = lock.write().lock().await.unwrap();
        let known = owner().await;
        let next = tokio::spawn(lock.write().lock().into_future());
        run_others().await;
        let (mut request, mut reader) = (None, None);
        if way == "downgraded" {
            reader = Some(writer.downgrade().await.unwrap());
        } else {
            request = Some(writer.reenter_read());
            if way != "request" {
                reader = Some(request.take().unwrap().await.unwrap());
            }
            if way == "released" {
                reader.take().unwrap().unlock().await.unwrap();
            }
            writer.unlock().await.unwrap();
        }
        run_others().await;
        assert_eq!(next.is_finished(), reader.is_none(), "{way}");
        if let Some(reader) = reader {
            reader.unlock().await.unwrap();
        }
        let next = next.await.unwrap().unwrap();
        assert_eq!(owner().await == known, way == "released", "{way}");
        if let Some(request) = request {
            assert!(matches!(request.await, Err(Error::Lost { .. })));
        }
        assert!(next.is_valid(), "{way}");
        next.unlock().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn hold_with_another_guard_or_request_stays() {
    let [client, _] = clients().1;
    let lock = client.lock("a");
    let outer = lock.lock().await.unwrap();
    let inner = outer.reenter().await.unwrap();
    let next = waiter(&lock).await;
    outer.unlock().await.unwrap();
    run_others().await;
    assert!(!next.is_finished() && inner.is_valid());
    let next = unlock_for(inner, next).await;
    let again = next.reenter();
    let third = waiter(&lock).await;
    next.unlock().await.unwrap();
    let third = third.await.unwrap().unwrap();
    // The owner has released everything, so its request waits like others.
    let mut again = again.into_future();
    assert!(poll_once(&mut again).await.is_none());
    third.unlock().await.unwrap();
    again.await.unwrap().unlock().await.unwrap();
}

/// Polls a future once.
async fn poll_once<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
    tokio::time::timeout(Duration::ZERO, future).await.ok()
}

/// The task that asks the store runs late.
#[tokio::test(start_paused = true)]
async fn guard_that_was_dropped_in_time_is_not_lost_at_its_limit() {
    let [client, _] = clients().1;
    let lock = client.lock("a");
    let limited = lock.lock().at_most(Duration::from_millis(20));
    let guard = limited.await.unwrap();
    let (known, mut lost) = (owner(&lock).await, Box::pin(guard.lost()));
    let next = waiter(&lock).await;
    tokio::time::sleep(Duration::from_millis(15)).await;
    drop(guard);
    tokio::time::advance(Duration::from_millis(10)).await;
    assert!(next.await.unwrap().unwrap().is_valid());
    assert_eq!(owner(&lock).await, known, "it has passed on");
    assert!(poll_once(&mut lost).await.is_none());
}

/// There is an offer at almost any time, but not the same one.
#[tokio::test(start_paused = true)]
async fn flush_does_not_wait_until_tasks_stop_competing() {
    let [client, _] = clients().1;
    let tasks = ["a", "a", "b", "b"].map(|name| {
        let lock = client.lock(name);
        tokio::spawn(async move {
            loop {
                lock.lock().await.unwrap().unlock().await.unwrap();
                yield_now().await;
            }
        })
    });
    run_others().await;
    let long = async {
        for _ in 0..10_000 {
            yield_now().await;
        }
    };
    tokio::select! {
        biased;
        () = client.flush() => {}
        () = long => panic!("flush did not return"),
    }
    tasks.iter().for_each(JoinHandle::abort);
}

#[tokio::test(start_paused = true)]
async fn canceled_waiter_passes_offer_on() {
    let [client, peer] = clients().1;
    let lock = client.lock("a");
    let guard = lock.lock().await.unwrap();
    let (first, second) = (waiter(&lock).await, waiter(&lock).await);
    drop(guard);
    first.abort();
    let guard = second.await.unwrap().unwrap();
    assert!(guard.is_valid() && first.await.is_err());
    let last = waiter(&lock).await;
    drop(guard);
    last.abort();
    assert!(last.await.is_err());
    client.flush().await;
    assert!(peer.lock("a").try_lock().await.unwrap().is_some());
}

/// The registry of clients shows the request that holds the lock, not the one from which it has the hold.
#[tokio::test(start_paused = true)]
async fn registered_hold_that_passes_on_is_registered_anew() {
    let [client, _] = clients().1;
    let lock = client.lock("a");
    let first = lock.lock().note("first").await.unwrap();
    let known = owner(&lock).await;
    let next = tokio::spawn(lock.lock().note("second").into_future());
    tokio::time::sleep(SECOND * 3 / 2).await;
    let entry = || async {
        let state = client.inspect("a").await.unwrap().unwrap();
        state.holders()[0].registered.clone()
    };
    assert_eq!(entry().await.unwrap().note.as_deref(), Some("first"));
    let next = unlock_for(first, next).await;
    assert_eq!(owner(&lock).await, known, "it has passed on");
    for (waited, note) in [(SECOND / 2, None), (SECOND * 9 / 2, Some("second"))] {
        tokio::time::sleep(waited).await;
        let entry = entry().await;
        assert_eq!(entry.as_ref().and_then(|entry| entry.note.as_deref()), note);
        assert!(entry.is_none_or(|entry| entry.age <= 5 * SECOND));
    }
    drop(next);
}

#[tokio::test(start_paused = true)]
async fn loss_is_reported_only_to_guard_that_has_the_hold() {
    let [client, peer] = clients().1;
    let lock = client.lock("a");
    let first = lock.lock().await.unwrap();
    let mut first_lost = std::pin::pin!(first.lost());
    assert!(poll_once(&mut first_lost).await.is_none());
    let second = waiter(&lock).await;
    let second = unlock_for(first, second).await;
    let mut second_lost = std::pin::pin!(second.lost());
    assert!(poll_once(&mut second_lost).await.is_none());
    assert!(peer.lock("a").force_unlock().await.unwrap());
    tokio::time::sleep(20 * SECOND).await;
    assert!(poll_once(&mut second_lost).await.is_some());
    assert!(poll_once(&mut first_lost).await.is_none());
    assert!(matches!(second.unlock().await, Err(Error::Lost { .. })));
    assert!(poll_once(&mut first_lost).await.is_none());
}

/// A lost hold is not handed over: the next waiter asks the store.
#[tokio::test(start_paused = true)]
async fn lost_hold_is_not_handed_over() {
    let [client, peer] = clients().1;
    let lock = client.lock("a");
    let first = lock.lock().await.unwrap();
    let known = owner(&lock).await;
    let hold = first.hold_ref().hold.clone();
    let second = waiter(&lock).await;
    // While it is offered.
    drop(first);
    assert!(peer.lock("a").force_unlock().await.unwrap());
    hold.mark_lost(crate::error::Loss::NotHeld);
    let second = second.await.unwrap().unwrap();
    assert!(second.is_valid());
    assert_ne!(owner(&lock).await, known);
    // Before.
    let hold = second.hold_ref().hold.clone();
    let third = waiter(&lock).await;
    assert!(peer.lock("a").force_unlock().await.unwrap());
    hold.mark_lost(crate::error::Loss::NotHeld);
    assert!(matches!(second.unlock().await, Err(Error::Lost { .. })));
    assert!(third.await.unwrap().unwrap().is_valid());
}

/// A request that joins after the offer may not take it, although those before it left.
#[tokio::test(start_paused = true)]
async fn request_for_own_owner_takes_no_offer() {
    let [client, _] = clients().1;
    let (lock, me) = (client.lock("a"), Owner::new());
    let first = lock.lock().await.unwrap();
    let next = waiter(&lock).await;
    drop(first);
    let mut named = lock.lock().owner(me).into_future();
    assert!(poll_once(&mut named).await.is_none());
    next.abort();
    let guard = named.await.unwrap();
    assert_eq!(guard.owner(), me);
    let again = lock.lock().owner(me).await.unwrap();
    assert_eq!(again.hold_count(), 2);
}

/// The waiter learns of it by the message, and the guard by its release, as without handoffs.
#[tokio::test(start_paused = true)]
async fn hold_that_was_released_by_force_is_not_handed_over() {
    let [client, peer] = clients().1;
    let lock = client.lock("a");
    let first = lock.lock().await.unwrap();
    let second = waiter(&lock).await;
    assert!(peer.lock("a").force_unlock().await.unwrap());
    let theirs = peer.lock("a").try_lock().await.unwrap().unwrap();
    assert!(matches!(first.unlock().await, Err(Error::Lost { .. })));
    run_others().await;
    assert!(!second.is_finished());
    theirs.unlock().await.unwrap();
    let second = second.await.unwrap().unwrap();
    // While it is offered.
    let third = waiter(&lock).await;
    drop(second);
    assert!(peer.lock("a").force_unlock().await.unwrap());
    let theirs = peer.lock("a").try_lock().await.unwrap().unwrap();
    run_others().await;
    assert!(!third.is_finished());
    theirs.unlock().await.unwrap();
    third.await.unwrap().unwrap().unlock().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn check_reports_hold_that_the_store_has_lost() {
    let [client, peer] = clients().1;
    let guard = client.lock("a").lock().await.unwrap();
    let hold_ref = guard.hold_ref();
    let (session, hold) = (&hold_ref.session, &hold_ref.hold);
    session.check_handoff(&hold.object, hold).await;
    assert!(guard.is_valid());
    peer.lock("a").force_unlock().await.unwrap();
    session.check_handoff(&hold.object, hold).await;
    assert!(!guard.is_valid());
}

/// Out of turn, the store did not have the hold: a step of the owner was in flight, and has
/// acquired it again. A doubt that is newer than the check in turn stays.
#[tokio::test(start_paused = true)]
async fn refuted_doubt_is_cleared_and_a_newer_one_stays() {
    for is_doubted_again in [false, true] {
        let (store, [client, peer]) = clients();
        let guard = client.lock("a").lock().await.unwrap();
        let HoldRef { session, hold, .. } = guard.hold_ref();
        let in_flight = hold.turn().await.unwrap();
        assert!(peer.lock("a").force_unlock().await.unwrap());
        let (checking, checked) = (session.clone(), hold.clone());
        let checking = async move { checking.check_hold(&checked.object, Some(&checked)).await };
        let checking = tokio::spawn(checking);
        run_others().await;
        assert!(hold.state().needs_check());
        let kind = Reentrant::new("", "a");
        let lease = session.watchdog.lease();
        let step = kind.acquire(AcquireParams::without_waiting(hold, 1, lease));
        let acquired = session.store.run_idempotent(&step).await;
        assert!(matches!(acquired, Ok(Outcome::ACQUIRED)));
        // Before the watchdog wakes to register the hold, and checks it, too.
        store.delay_answers([SECOND / 10]);
        drop(in_flight);
        tokio::time::sleep(SECOND / 20).await;
        if is_doubted_again {
            let granted_in = hold.state().period.granted_in;
            assert!(hold.state().doubt(granted_in));
        }
        assert!(checking.await.unwrap().is_some());
        assert!(guard.is_valid());
        assert_eq!(hold.state().needs_check(), is_doubted_again);
    }
}

#[tokio::test(start_paused = true)]
async fn check_in_background_reports_lost_hold() {
    let [client, peer] = clients().1;
    let guard = client.lock("a").lock().await.unwrap();
    peer.lock("a").force_unlock().await.unwrap();
    guard.hold_ref().check_hold_in_background();
    // Long before the watchdog would notice it.
    let limit = Duration::from_secs(1);
    tokio::time::timeout(limit, guard.lost()).await.unwrap();
    assert!(!guard.is_valid());
}

#[tokio::test(start_paused = true)]
async fn check_counts_other_clients_that_wait() {
    let store = Embedded::new();
    let clients = [(); 3].map(|()| Client::builder().connect_embedded(&store).unwrap());
    let locks = clients.each_ref().map(|client| client.lock("a"));
    let guard = locks[0].lock().await.unwrap();
    let HoldRef { hold, session, .. } = guard.hold_ref();
    let _own = waiter(&locks[0]).await;
    let counted = async || {
        session.check_handoff(&hold.object, hold).await;
        let yields = hold.state().period.chain.yields(Instant::now());
        (yields.to.count, yields.to.in_queue)
    };
    assert_eq!(counted().await, (0, false));
    let lease = session.watchdog.lease().duration();
    let is_handed_over = || {
        hold.state()
            .local_handoff(lease, true, Instant::now(), Instant::now())
            .is_ok()
    };
    assert!(is_handed_over());
    let _others = [waiter(&locks[1]).await, waiter(&locks[2]).await];
    assert_eq!(counted().await, (2, false));
    assert!(!is_handed_over());
    let _in_queue = tokio::spawn(clients[2].fair_lock("a").lock().into_future());
    run_others().await;
    assert_eq!(counted().await, (3, true));
}

#[tokio::test(start_paused = true)]
async fn check_covers_permits_and_publishes_nothing() {
    let semaphore = Client::embedded().expirable_semaphore("a");
    semaphore.try_set_permits(1).await.unwrap();
    let permit = semaphore.acquire().await.unwrap();
    let HoldRef { session, hold, .. } = permit.hold_ref();
    let found = session.check_hold(&hold.object, Some(hold)).await;
    let none = WaiterCounts {
        subscribers: 0,
        queued: 0,
    };
    assert_eq!(found, Some(none));
    let hold = differential::hold(1, Reentrant::new("", "name"));
    let step = check_handoff(&hold.object, Some(&hold));
    let mut keyspace = Keyspace::new(Instant::now());
    assert_eq!(step.apply(&mut keyspace).unwrap(), (false, none));
    assert!(keyspace.take_published().is_empty());
}

#[test]
fn check_names_lock_owner_channel_and_requests() {
    let hold = differential::hold(1, Reentrant::new("", "name"));
    let step = check_handoff(&hold.object, Some(&hold));
    let requests = hold.object.requests_key();
    assert_eq!(
        differential::arg_texts(&step),
        [hold.object.channel(), "lock", &*hold.field, &*requests]
    );
    assert_eq!(step.keys()[..], [hold.object.key()]);
    for (is_held, subscribers, queued) in [(true, 3, 0), (false, 2, 1)] {
        let reply = [i64::from(is_held), subscribers, queued].map(ScriptReply::Integer);
        let decoded = step.decode(ScriptReply::List(reply.into())).unwrap();
        let waiting = WaiterCounts {
            subscribers: subscribers as u64,
            queued: queued as u64,
        };
        assert_eq!(decoded, (is_held, waiting));
    }
}

/// Without a handoff, each other client that waits has a millisecond to send its request first.
#[tokio::test(start_paused = true)]
async fn local_waiter_lets_other_clients_go_first_after_release() {
    let [client, _] = clients().1;
    let lock = client.lock("a");
    let two = OtherClients {
        count: 2,
        in_queue: false,
    };
    for (others, delay) in [(None, 0), (Some(two), 2)] {
        let guard = lock.lock().await.unwrap();
        let next = waiter(&lock).await;
        let begun = Instant::now();
        let hold = guard.hold_ref().hold.clone();
        hold.state().period.chain.answered(begun, others, begun);
        let next = unlock_for(guard, next).await;
        assert_eq!(begun.elapsed(), Duration::from_millis(delay));
        next.unlock().await.unwrap();
    }
}

/// The task that releases the lock hangs while it asks whether other clients wait: the lock is free when the lease ends.
#[tokio::test(start_paused = true)]
async fn hold_that_passes_on_is_not_renewed() {
    let (store, [client, peer]) = clients();
    let lock = client.lock("a");
    let guard = lock.lock().at_most(60 * SECOND).await.unwrap();
    let mut parked = lock.lock().into_future();
    assert!(poll_once(&mut parked).await.is_none());
    tokio::time::sleep(SECOND / 50).await;
    store.delay_answers([SECOND]);
    let mut unlocking = Box::pin(guard.unlock());
    assert!(poll_once(&mut unlocking).await.is_none());
    let theirs = peer.lock("a").lock().into_future();
    let theirs = tokio::time::timeout(31 * SECOND, theirs).await;
    let theirs = theirs.expect("it is not kept longer").unwrap();
    let lost = unlocking.await;
    assert!(matches!(lost, Err(Error::Lost { .. })), "{lost:?}");
    assert!(theirs.is_valid());
}

/// A request that is kept but not polled does not keep the lock.
#[tokio::test(start_paused = true)]
async fn offer_that_is_not_taken_in_time_is_released() {
    let [client, peer] = clients().1;
    let lock = client.lock("a");
    let guard = lock.lock().await.unwrap();
    let mut parked = lock.lock().into_future();
    assert!(poll_once(&mut parked).await.is_none());
    guard.unlock().await.unwrap();
    assert!(peer.lock("a").try_lock().await.unwrap().is_none());
    tokio::time::sleep(Duration::from_millis(25)).await;
    client.flush().await;
    let theirs = peer.lock("a").try_lock().await.unwrap().unwrap();
    theirs.unlock().await.unwrap();
    parked.await.unwrap().unlock().await.unwrap();
}

/// A writer does not pass the lock on while readers wait.
#[tokio::test(start_paused = true)]
async fn writers_hand_over_unless_readers_wait() {
    let [client, _] = clients().1;
    let lock = client.read_write_lock("a");
    let first = lock.write().lock().await.unwrap();
    let known = lock.write().holder().await.unwrap();
    let second = tokio::spawn(lock.write().lock().into_future());
    run_others().await;
    drop(first);
    let second = second.await.unwrap().unwrap();
    assert_eq!(lock.write().holder().await.unwrap(), known);
    let reading = lock.read().lock().into_future();
    let reader = tokio::spawn(async { reading.await?.unlock().await });
    let third = tokio::spawn(lock.write().lock().into_future());
    run_others().await;
    second.unlock().await.unwrap();
    let third = third.await.unwrap().unwrap();
    assert_ne!(lock.write().holder().await.unwrap(), known);
    third.unlock().await.unwrap();
    reader.await.unwrap().unwrap();
}

/// A lock that passes from task to task is free for a few milliseconds now and then, for requests that nobody can count.
#[tokio::test(start_paused = true)]
async fn local_waiters_pause_after_a_chain() {
    for owners in [false, true] {
        let [client, peer] = clients().1;
        let lock = client.lock("a");
        let contenders = [(); 3].map(|()| {
            let lock = lock.clone();
            tokio::spawn(async move {
                loop {
                    let request = lock.lock();
                    let guard = match owners {
                        true => request.owner(Owner::new()).await,
                        false => request.await,
                    };
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    guard.unwrap().unlock().await.unwrap();
                }
            })
        });
        let observer = peer.lock("a");
        let (mut free, begun) = (0, Instant::now());
        while begun.elapsed() < 10 * SECOND {
            tokio::time::sleep(Duration::from_micros(500)).await;
            free += u32::from(!observer.is_locked().await.unwrap());
        }
        // 1.3 to 10 % of the time.
        assert!((260..2000).contains(&free), "{free}");
        contenders.iter().for_each(JoinHandle::abort);
    }
}

/// An owner in the queue of a fair lock has the object as soon as the chain has ended, although it sleeps.
#[tokio::test(start_paused = true)]
async fn queue_of_fair_lock_is_served_behind_the_release() {
    for grants in [false, true] {
        let store = Embedded::new();
        let client = Client::builder().connect_embedded(&store).unwrap();
        let peer = Client::builder().fair_grants(grants);
        let peer = peer.connect_embedded(&store).unwrap();
        let lock = client.lock("a");
        let contenders = [(); 3].map(|()| {
            let lock = lock.clone();
            tokio::spawn(async move {
                loop {
                    let guard = lock.lock().await.unwrap();
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    guard.unlock().await.unwrap();
                }
            })
        });
        tokio::time::sleep(SECOND).await;
        for _ in 0..20 {
            let waiting = peer.fair_lock("a").try_lock().wait(SECOND / 50).await;
            waiting.unwrap().expect("in time").unlock().await.unwrap();
        }
        contenders.iter().for_each(JoinHandle::abort);
    }
}

/// The owner changes when the hold was released and acquired again.
#[tokio::test(start_paused = true)]
async fn hold_is_released_soon_if_other_clients_wait_and_else_after_a_chain() {
    let [client, peer] = clients().1;
    let lock = client.lock("a");
    let contend = |lock: Lock| async move {
        loop {
            let guard = lock.lock().await.unwrap();
            tokio::time::sleep(Duration::from_millis(1)).await;
            guard.unlock().await.unwrap();
        }
    };
    let contenders = [(); 3].map(|()| tokio::spawn(contend(lock.clone())));
    let changes_in_a_second = async || {
        let (mut known, mut changes) = (owner(&lock).await, 0);
        for _ in 0..1000 {
            tokio::time::sleep(Duration::from_millis(1)).await;
            let now = owner(&lock).await;
            changes += u32::from(now != known);
            known = now;
        }
        changes
    };
    tokio::time::sleep(SECOND).await;
    // A chain and a pause last 52 to 155 ms. There is no owner during the pause.
    let changes = changes_in_a_second().await;
    assert!((12..=40).contains(&changes), "{changes}");
    let other = tokio::spawn(contend(peer.lock("a")));
    assert!(changes_in_a_second().await >= 1000 / 20);
    other.abort();
    contenders.iter().for_each(JoinHandle::abort);
}
