use std::future::IntoFuture as _;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::error::{Error, Result};
use crate::hold::HoldKind as _;
use crate::locks::{Acquirable, Acquire, OwnedKind};
use crate::store::embedded::failure_injection::Failure::{
    NoAnswer, NoEffect, NotSent, Repeated, Unconfirmed,
};
use crate::test_prelude::{SECOND, clients, run_others};
use crate::{Embedded, Guard, Lock, MAX_TOKEN, Owner};

/// Starts a request for an owner and lets it sleep in the queue.
async fn waiter<K: OwnedKind>(lock: &Lock<K>, owner: Owner) -> JoinHandle<Result<Guard<Lock<K>>>> {
    let waiter = tokio::spawn(lock.lock().owner(owner).into_future());
    run_others().await;
    waiter
}

async fn is_held_by(lock: &Lock, owner: Owner) -> bool {
    lock.is_held_by(owner).await.unwrap()
}

/// The waiter holds the lock as soon as the release has returned, without having sent a
/// request.
#[tokio::test(start_paused = true)]
async fn release_acquires_for_waiter() {
    let (store, [client, _]) = clients();
    let lock = client.lock("a");
    let [first, second, third] = [(); 3].map(|()| Owner::new());
    let guard = lock.lock().owner(first).await.unwrap();
    let (second_request, third_request) = (waiter(&lock, second).await, waiter(&lock, third).await);
    guard.unlock().await.unwrap();
    // No other step succeeds, so the waiter sends none.
    store.fail([NotSent; 20]);
    let guard = second_request.await.unwrap().unwrap();
    store.recover();
    assert!(is_held_by(&lock, second).await && guard.is_valid());
    drop(guard);
    let guard = third_request.await.unwrap().unwrap();
    assert!(is_held_by(&lock, third).await);
    tokio::time::sleep(60 * SECOND).await;
    assert!(guard.is_valid(), "it is renewed");
    guard.unlock().await.unwrap();
    assert!(!lock.is_locked().await.unwrap());
    assert_eq!(client.status().holds, 0);
}

/// A release in the background passes the lock on after the flush has begun, and again, to
/// requests that are not polled any more.
#[tokio::test(start_paused = true)]
async fn flush_waits_for_what_releases_in_the_background_pass_on() {
    let (_, [client, _]) = clients();
    let lock = client.lock("a");
    let guard = lock.lock().owner(Owner::new()).await.unwrap();
    let mut parked = Vec::new();
    for _ in 0..4 {
        let mut request = Box::pin(lock.lock().owner(Owner::new()).into_future());
        let polls = std::future::poll_fn(|cx| std::task::Poll::Ready(request.as_mut().poll(cx)));
        assert!(polls.await.is_pending());
        parked.push(request);
        run_others().await;
    }
    drop(guard);
    client.flush().await;
    assert!(!lock.is_locked().await.unwrap());
    assert_eq!(client.status().background, 0);
}

/// The lease of the waiter counts from its transfer, and is not renewed if it is fixed.
#[tokio::test(start_paused = true)]
async fn transferred_hold_has_lease_of_waiter() {
    let (_, [client, _]) = clients();
    let lock = client.lock("a");
    let guard = lock.lock().await.unwrap();
    let request = lock.lock().lease(SECOND);
    let waiting = tokio::spawn(request.into_future());
    run_others().await;
    guard.unlock().await.unwrap();
    let guard = waiting.await.unwrap().unwrap();
    assert_eq!(guard.valid_for(), SECOND);
    tokio::time::sleep(SECOND).await;
    assert!(!guard.is_valid() && !lock.is_locked().await.unwrap());
}

/// Starts a request, releases the guard, and returns the guard of the request, for which
/// nothing was sent.
async fn pass_on<K: OwnedKind, L: OwnedKind>(
    store: &Embedded,
    guard: Guard<Lock<K>>,
    lock: &Lock<L>,
) -> Guard<Lock<L>> {
    let waiter = tokio::spawn(lock.lock().owner(Owner::new()).into_future());
    run_others().await;
    guard.unlock().await.unwrap();
    store.fail([NotSent; 20]);
    let guard = waiter.await.unwrap().unwrap();
    store.recover();
    guard
}

/// Each transfer to a request for the fenced lock increments the token.
#[tokio::test(start_paused = true)]
async fn transfer_of_fenced_lock_returns_next_token() {
    let (store, [client, _]) = clients();
    let (plain, fenced) = (client.lock("a"), client.fenced_lock("a"));
    let first = fenced.lock().await.unwrap();
    assert_eq!(first.token(), 1);
    let second = pass_on(&store, first, &fenced).await;
    assert_eq!(second.token(), 2);
    let third = pass_on(&store, second, &plain).await;
    let fourth = pass_on(&store, third, &fenced).await;
    assert_eq!(fourth.token(), 3);
    fourth.unlock().await.unwrap();
    assert_eq!(fenced.lock().await.unwrap().token(), 4);
}

/// If the token cannot be incremented, the lock is released, and only the waiter gets an error.
#[tokio::test(start_paused = true)]
async fn release_ignores_token_that_cannot_be_incremented() {
    let (store, [client, _]) = clients();
    let fenced = client.fenced_lock("a");
    let guard = fenced.lock().await.unwrap();
    fenced.advance_token(MAX_TOKEN).await.unwrap();
    let last = pass_on(&store, guard, &fenced).await;
    assert_eq!(last.token(), MAX_TOKEN + 1);
    let waiter = waiter(&fenced, Owner::new()).await;
    last.unlock().await.unwrap();
    assert!(matches!(
        waiter.await.unwrap(),
        Err(Error::WrongKind { .. })
    ));
    assert!(!fenced.is_locked().await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn writer_that_also_reads_does_not_pass_lock_on() {
    let (store, [client, _]) = clients();
    let lock = client.read_write_lock("a");
    let first = lock.write().lock().owner(Owner::new()).await.unwrap();
    let second = pass_on(&store, first, &lock.write()).await;
    assert!(second.is_valid() && lock.write().is_locked().await.unwrap());
    let reader = second.reenter_read().await.unwrap();
    let next = waiter(&lock.write(), Owner::new()).await;
    second.unlock().await.unwrap();
    run_others().await;
    assert!(!next.is_finished() && reader.is_valid());
    assert!(lock.read().try_lock().await.unwrap().is_some());
    reader.unlock().await.unwrap();
    next.await.unwrap().unwrap().unlock().await.unwrap();
    client.flush().await;
    assert!(!lock.write().is_locked().await.unwrap());
}

/// A writer that blocks new readers while it waits is known to the store, and acquires the lock
/// there.
#[tokio::test(start_paused = true)]
async fn writers_with_priority_leave_no_mark() {
    let (_, [client, _]) = clients();
    let lock = client.read_write_lock("a").prefer_writers();
    let first = lock.write().lock().owner(Owner::new()).await.unwrap();
    let next = waiter(&lock.write(), Owner::new()).await;
    first.unlock().await.unwrap();
    next.await.unwrap().unwrap().unlock().await.unwrap();
    assert!(lock.read().try_lock().await.unwrap().is_some());
}

/// The request that finds the offer has another setting than the one for which it was made, and
/// requests the lock itself.
#[tokio::test(start_paused = true)]
async fn offer_to_another_request_of_the_owner_leaves_no_guard() {
    let (_, [client, _]) = clients();
    let lock = client.read_write_lock("a");
    let me = Owner::new();
    let first = lock.write().lock().owner(Owner::new()).await.unwrap();
    let leaving = waiter(&lock.write(), me).await;
    first.unlock().await.unwrap();
    let with_priority = lock.clone().prefer_writers().write();
    let mut request = with_priority.lock().owner(me).into_future();
    let polled = tokio::time::timeout(Duration::ZERO, &mut request).await;
    assert!(polled.is_err());
    leaving.abort();
    request.await.unwrap().unlock().await.unwrap();
    client.flush().await;
    assert!(!lock.write().is_locked().await.unwrap());
    assert_eq!(client.status().holds, 0);
}

/// The waiter for which the release acquired has left, and the next request of its owner wants another lease.
#[tokio::test(start_paused = true)]
async fn request_with_another_lease_takes_no_offer() {
    let lease = |seconds: u32| (seconds > 0).then_some(seconds * SECOND);
    // 0: it is renewed.
    for (claimed, taken) in [(1, 60), (60, 1), (0, 300), (20, 0)] {
        let [client, _] = clients().1;
        let lock = client.lock("a");
        let [first, me] = [(); 2].map(|()| Owner::new());
        let guard = lock.lock().owner(first).await.unwrap();
        let mut requests = Vec::new();
        for seconds in [claimed, taken] {
            let mut request = lock.lock().owner(me);
            if let Some(lease) = lease(seconds) {
                request = request.lease(lease);
            }
            requests.push(tokio::spawn(request.into_future()));
            run_others().await;
        }
        guard.unlock().await.unwrap();
        requests[0].abort();
        let guard = requests.remove(1).await.unwrap().unwrap();
        let holds_for = lease(taken).unwrap_or(60 * SECOND);
        tokio::time::sleep(holds_for * 9 / 10).await;
        assert!(guard.is_valid() && is_held_by(&lock, me).await);
        tokio::time::sleep(holds_for / 9).await;
        let is_held = is_held_by(&lock, me).await;
        assert_eq!((guard.is_valid(), is_held), (taken == 0, taken == 0));
    }
}

#[tokio::test(start_paused = true)]
async fn waiter_that_leaves_releases_what_it_was_granted() {
    let (_, [client, peer]) = clients();
    let lock = client.lock("a");
    let [first, second] = [(); 2].map(|()| Owner::new());
    for is_last in [true, false] {
        let guard = lock.lock().owner(first).await.unwrap();
        let request = waiter(&lock, second).await;
        let next = match is_last {
            true => None,
            false => Some(waiter(&lock, Owner::new()).await),
        };
        guard.unlock().await.unwrap();
        request.abort();
        assert!(request.await.is_err());
        if let Some(next) = next {
            next.await.unwrap().unwrap().unlock().await.unwrap();
        }
        client.flush().await;
        let theirs = peer.lock("a").try_lock().await.unwrap();
        theirs.expect("it is free").unlock().await.unwrap();
    }
}

/// Whatever becomes of the transfer and its answer, the waiter acquires the lock, and the
/// releasing owner can acquire it again.
#[tokio::test(start_paused = true)]
async fn unanswered_transfer_is_settled_for_both_owners() {
    for failure in [NotSent, NoEffect, NoAnswer, Repeated, Unconfirmed] {
        for is_canceled in [false, true] {
            let (store, [client, peer]) = clients();
            let lock = client.lock("a");
            let [first, second] = [(); 2].map(|()| Owner::new());
            let guard = lock.lock().owner(first).await.unwrap();
            let request = waiter(&lock, second).await;
            store.fail([failure]);
            let released = guard.unlock().await;
            let is_error = matches!(failure, NotSent | NoEffect | NoAnswer);
            assert_eq!(released.is_err(), is_error, "{failure:?}");
            if is_canceled {
                request.abort();
                assert!(request.await.is_err());
            } else {
                let guard = request.await.unwrap().unwrap();
                assert!(is_held_by(&lock, second).await, "{failure:?}");
                client.flush().await;
                assert!(
                    guard.is_valid() && is_held_by(&lock, second).await,
                    "{failure:?}"
                );
                guard.unlock().await.unwrap();
            }
            let begun = Instant::now();
            let again = lock.lock().owner(first).await.unwrap();
            assert!(
                begun.elapsed() < 10 * SECOND,
                "{failure:?}: not after the lease"
            );
            client.flush().await;
            assert!(
                again.is_valid() && is_held_by(&lock, first).await,
                "{failure:?}"
            );
            again.unlock().await.unwrap();
            client.flush().await;
            assert!(!peer.lock("a").is_locked().await.unwrap(), "{failure:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn lost_hold_is_not_transferred() {
    let (_, [client, peer]) = clients();
    let lock = client.lock("a");
    let guard = lock.lock().owner(Owner::new()).await.unwrap();
    let request = waiter(&lock, Owner::new()).await;
    assert!(peer.lock("a").force_unlock().await.unwrap());
    let theirs = peer.lock("a").try_lock().await.unwrap().unwrap();
    assert!(matches!(guard.unlock().await, Err(Error::Lost { .. })));
    run_others().await;
    assert!(!request.is_finished() && theirs.is_valid());
    theirs.unlock().await.unwrap();
    assert!(request.await.unwrap().unwrap().is_valid());
}

/// The waiter's hold is settled only if the step may have acquired the object.
#[tokio::test(start_paused = true)]
async fn refused_transfer_is_settled_only_if_it_was_sent_twice() {
    for (is_lost, is_repeated, settles) in [
        (false, false, false),
        (true, false, false),
        (true, true, true),
    ] {
        let (store, [client, peer]) = clients();
        let (lock, theirs) = (client.lock("a"), peer.lock("a"));
        let guard = lock.lock().owner(Owner::new()).await.unwrap();
        let session = guard.hold_ref().session.clone();
        let ours = waiter(&lock, Owner::new()).await;
        let waiting = waiter(&theirs, Owner::new()).await;
        // From now on the transfer asks whether other clients wait.
        tokio::time::sleep(SECOND / 100).await;
        if is_lost {
            // Without a message, unlike a forced release.
            let hold = guard.hold_ref().hold.clone();
            let step = lock.kind.undo(&hold, 0).unwrap();
            assert!(session.store.run_idempotent(&step).await.unwrap());
        }
        store.fail([is_repeated.then_some(Repeated)]);
        let released = guard.unlock().await;
        assert_eq!(released.is_ok(), !is_lost || is_repeated);
        assert_eq!(session.background.running() > 0, settles);
        ours.abort();
        waiting.abort();
    }
}

/// A request that is kept but not polled does not keep the lock.
#[tokio::test(start_paused = true)]
async fn transferred_hold_that_is_not_taken_in_time_is_released() {
    let (_, [client, peer]) = clients();
    let lock = client.lock("a");
    let guard = lock.lock().owner(Owner::new()).await.unwrap();
    let mut parked = lock.lock().owner(Owner::new()).into_future();
    let polled = tokio::time::timeout(Duration::ZERO, &mut parked).await;
    assert!(polled.is_err());
    guard.unlock().await.unwrap();
    assert!(peer.lock("a").try_lock().await.unwrap().is_none());
    tokio::time::sleep(SECOND / 40).await;
    client.flush().await;
    let theirs = peer.lock("a").try_lock().await.unwrap().unwrap();
    theirs.unlock().await.unwrap();
    parked.await.unwrap().unlock().await.unwrap();
}

/// If another client waits, the lock is released instead.
#[tokio::test(start_paused = true)]
async fn other_clients_get_their_turn() {
    let (_, [client, peer]) = clients();
    let lock = client.lock("a");
    let contend = |lock: Lock| async move {
        loop {
            let guard = lock.lock().owner(Owner::new()).await.unwrap();
            tokio::time::sleep(Duration::from_millis(1)).await;
            guard.unlock().await.unwrap();
        }
    };
    let contenders = [(); 3].map(|()| tokio::spawn(contend(lock.clone())));
    tokio::time::sleep(SECOND / 10).await;
    let other = peer.lock("a");
    for _ in 0..10 {
        let waiting = other.try_lock().wait(SECOND / 10).await.unwrap();
        waiting.expect("in time").unlock().await.unwrap();
    }
    contenders.iter().for_each(JoinHandle::abort);
}

/// They know of the lease of the hold before, and sleep until its end if no message wakes them.
#[tokio::test(start_paused = true)]
async fn other_clients_do_not_wait_for_a_lease_that_a_handoff_has_shortened() {
    let (_, [client, peer]) = clients();
    let (mine, theirs) = (client.read_write_lock("b"), peer.read_write_lock("b"));
    other_client_is_woken(&client.lock("a"), peer.lock("a").lock()).await;
    other_client_is_woken(&mine.write(), theirs.read().lock()).await;
    other_client_is_woken(&client.fenced_lock("c"), peer.fenced_lock("c").lock()).await;
}

/// The other client's request comes just after a hold with a long lease, which then passes to a request with a short one.
async fn other_client_is_woken<K: OwnedKind, L: Acquirable>(lock: &Lock<K>, other: Acquire<L>) {
    let request = |lease| lock.lock().owner(Owner::new()).lease(lease);
    let guard = request(3600 * SECOND).await.unwrap();
    let short = tokio::spawn(request(SECOND).into_future());
    let other = tokio::spawn(other.into_future());
    run_others().await;
    guard.unlock().await.unwrap();
    let begun = Instant::now();
    // The holder of the short lease does not release it.
    let (_short, waited) = tokio::join!(short, async {
        drop(other.await.unwrap().unwrap());
        begun.elapsed()
    });
    assert!(waited <= SECOND, "{waited:?}");
}

/// The repetition finds the waiter in the place of the owner, with its token.
#[tokio::test(start_paused = true)]
async fn repeated_handoff_is_recognized() {
    let (store, [client, _]) = clients();
    let fenced = client.fenced_lock("a");
    let guard = fenced.lock().await.unwrap();
    let request = waiter(&fenced, Owner::new()).await;
    // No other step succeeds.
    store.fail([Repeated].into_iter().chain([NotSent; 20]));
    guard.unlock().await.unwrap();
    let next = request.await.unwrap().unwrap();
    store.recover();
    assert_eq!(
        (next.token(), fenced.current_token().await.unwrap()),
        (2, 2)
    );
    assert!(next.is_valid() && is_held_by(&client.lock("a"), next.owner()).await);
}
