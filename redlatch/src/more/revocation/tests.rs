//! Requests to release a lock, with the paused clock.

use std::future::IntoFuture as _;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use crate::error::{Error, Loss, Result};
use crate::hold::{HoldKind as _, Renewed};
use crate::session::check_handoff;
use crate::store::embedded::failure_injection::Failure::{Repeated, Unconfirmed};
use crate::test_prelude::{SECOND, clients, run_others};
use crate::{Guard, Lock, MultiLock, Owner};

/// The lease of the watchdog.
const LEASE: Duration = Duration::from_secs(30);

/// Acquires a lock. Returns its handle and guard, and the handle of another client.
async fn held() -> (Lock, Guard, Lock) {
    let (_, [client, other]) = clients();
    let (lock, theirs) = (client.lock("a"), other.lock("a"));
    let guard = lock.lock().await.unwrap();
    (lock, guard, theirs)
}

/// Returns whether the holder is asked now.
async fn is_asked(guard: &Guard) -> bool {
    timeout(SECOND / 1000, guard.asked()).await.is_ok()
}

/// Starts a request of another client, which waits without a limit. It returns when it has acquired
/// the lock, and keeps it.
fn waiter(lock: &Lock) -> JoinHandle<(Instant, Guard)> {
    let request = lock.lock().into_future();
    tokio::spawn(async move {
        let guard = request.await.unwrap();
        (Instant::now(), guard)
    })
}

fn is_revoked<T>(result: Result<T>) -> bool {
    matches!(
        result,
        Err(Error::Lost {
            reason: Loss::Revoked,
            ..
        })
    )
}

/// Returns the remaining lease in the store.
async fn remaining(lock: &Lock) -> Duration {
    let left = lock.remaining_lease().await.unwrap();
    left.unwrap().duration().unwrap()
}

#[tokio::test(start_paused = true)]
async fn request_completes_asked_at_once_and_later() {
    let (_, guard, theirs) = held().await;
    let before = tokio::spawn(guard.asked());
    run_others().await;
    assert!(!before.is_finished() && !is_asked(&guard).await);
    let asked = theirs.ask().await.unwrap();
    assert_eq!(asked, Some(guard.owner_id()));
    run_others().await;
    assert!(before.is_finished() && is_asked(&guard).await);
    // Without a limit the hold lasts.
    sleep(10 * LEASE).await;
    assert!(guard.is_valid() && is_asked(&guard).await);
    guard.unlock().await.unwrap();
    assert_eq!(theirs.ask().await.unwrap(), None);
    assert_eq!(theirs.revoke(SECOND).await.unwrap(), None);
}

/// The subscription has ended when the request is made, and the message is missed.
#[tokio::test(start_paused = true)]
async fn request_before_asked_is_polled_is_found() {
    let (_, guard, theirs) = held().await;
    let asked = guard.asked();
    theirs.ask().await.unwrap();
    timeout(SECOND / 1000, asked).await.unwrap();
}

/// Without a subscription, the next renewal reports it.
#[tokio::test(start_paused = true)]
async fn renewal_reports_request() {
    let (_, guard, theirs) = held().await;
    let hold = guard.hold_ref().hold.clone();
    theirs.ask().await.unwrap();
    assert!(!hold.state().period.is_asked());
    sleep(LEASE / 3).await;
    run_others().await;
    assert!(hold.state().period.is_asked());
}

#[tokio::test(start_paused = true)]
async fn revoked_hold_ends_at_limit_and_only_then_the_next_begins() {
    for limit in [0, 1, 5, 29, 30, 31, 90] {
        let (_, guard, theirs) = held().await;
        let hold = guard.hold_ref().hold.clone();
        let request = theirs.lock().into_future();
        let next = tokio::spawn(async move {
            let next = request.await.unwrap();
            assert!(hold.valid_for().is_zero(), "two valid holders");
            (Instant::now(), next)
        });
        sleep(SECOND).await;
        let begun = Instant::now();
        theirs.revoke(limit * SECOND).await.unwrap();
        guard.lost().await;
        let lost_after = begun.elapsed();
        // Its client learns of the limit from the first renewal.
        let expected = (limit * SECOND).max(LEASE / 3 - SECOND);
        let late = lost_after.checked_sub(expected);
        assert!(
            late.is_some_and(|late| late < SECOND),
            "{limit}: {lost_after:?}"
        );
        let (acquired_at, _) = next.await.unwrap();
        let waited = acquired_at - begun;
        assert!(
            waited >= lost_after && waited < lost_after + SECOND,
            "{limit}: {waited:?}"
        );
        assert!(is_revoked(guard.unlock().await));
    }
}

/// The holder is cut off: its renewals are not answered, and no message arrives.
#[tokio::test(start_paused = true)]
async fn revoked_hold_of_silent_client_ends_with_its_lease() {
    let (store, [client, other]) = clients();
    let guard = client.lock("a").lock().await.unwrap();
    let begun = Instant::now();
    let hold = guard.hold_ref().hold.clone();
    sleep(SECOND).await;
    other.lock("a").revoke(2 * SECOND).await.unwrap();
    // The turn is taken, so the watchdog renews nothing.
    let turn = hold.turn().await.unwrap();
    let next = waiter(&other.lock("a"));
    let (acquired_at, _) = next.await.unwrap();
    assert!(acquired_at >= begun + LEASE && !guard.is_valid());
    assert_eq!(hold.loss(), Some(Loss::LeaseEnded));
    drop((turn, store));
}

/// A renewal before the limit extends the lease until the limit, not beyond. The client then does
/// nothing.
#[tokio::test(start_paused = true)]
async fn renewal_extends_lease_until_limit_at_most() {
    let (_, guard, theirs) = held().await;
    theirs.revoke(35 * SECOND).await.unwrap();
    let limit = Instant::now() + 35 * SECOND;
    sleep(12 * SECOND).await;
    run_others().await;
    let (left, valid) = (remaining(&theirs).await, guard.valid_for());
    assert!(
        left > 22 * SECOND && left <= limit - Instant::now(),
        "{left:?}"
    );
    assert!(valid <= left, "{valid:?} {left:?}");
}

/// The earliest limit counts, also if it is not the last.
#[tokio::test(start_paused = true)]
async fn earliest_limit_of_several_counts() {
    for (limits, knows_first) in [([20, 60], false), ([20, 60], true), ([60, 20], false)] {
        let (lock, guard, theirs) = held().await;
        let begun = Instant::now();
        theirs.revoke(limits[0] * SECOND).await.unwrap();
        assert!(!knows_first || is_asked(&guard).await);
        theirs.revoke(limits[1] * SECOND).await.unwrap();
        lock.ask().await.unwrap();
        guard.lost().await;
        assert_eq!(begun.elapsed().as_secs(), 20);
    }
}

/// The feared interleaving: the request meets a later holder, or a later hold of the same owner.
/// Neither is asked, and neither loses its lease.
#[tokio::test(start_paused = true)]
async fn later_holds_are_not_asked() {
    for is_same_owner in [false, true] {
        for is_known in [false, true] {
            let (_, [client, other]) = clients();
            let lock = client.lock("a");
            let [first, second] = [(); 2].map(|()| Owner::new());
            let second = if is_same_owner { first } else { second };
            let guard = lock.lock().owner(first).await.unwrap();
            other.lock("a").revoke(SECOND).await.unwrap();
            assert!(!is_known || is_asked(&guard).await);
            guard.unlock().await.unwrap();
            let next = lock.lock().owner(second).await.unwrap();
            assert!(!is_asked(&next).await);
            sleep(10 * LEASE).await;
            assert!(next.is_valid() && !is_asked(&next).await);
            assert!(!next.hold_ref().hold.state().period.is_asked());
        }
    }
}

/// The same for a hold that was lost, and for a request that re-enters after the release.
#[tokio::test(start_paused = true)]
async fn hold_after_loss_is_not_asked() {
    let (_, [client, other]) = clients();
    let (lock, me) = (client.lock("a"), Owner::new());
    let guard = lock.lock().owner(me).await.unwrap();
    other.lock("a").revoke(SECOND).await.unwrap();
    guard.lost().await;
    let next = lock.lock().owner(me).await.unwrap();
    assert!(!is_asked(&next).await);
    let request = next.reenter();
    other.lock("a").revoke(SECOND).await.unwrap();
    next.unlock().await.unwrap();
    let again = request.await.unwrap();
    sleep(10 * LEASE).await;
    assert!(again.is_valid() && !is_asked(&again).await);
}

/// A waiting request of the same client takes over the hold of a released guard, unless its owner
/// was asked.
#[tokio::test(start_paused = true)]
async fn asked_hold_is_released_to_all_instead_of_handed_over() {
    for knows in [false, true] {
        let (lock, guard, theirs) = held().await;
        let asked = lock.holder().await.unwrap().unwrap().owner;
        let next = waiter(&lock);
        run_others().await;
        theirs.revoke(10 * LEASE).await.unwrap();
        assert!(!knows || is_asked(&guard).await);
        guard.unlock().await.unwrap();
        let (_, next) = next.await.unwrap();
        let holder = theirs.holder().await.unwrap().unwrap().owner;
        assert_ne!(holder, asked, "the hold was handed over");
        assert!(!is_asked(&next).await);
    }
}

/// The request was sent in a long section, after which the store is asked again.
#[tokio::test(start_paused = true)]
async fn hold_that_was_asked_in_long_section_is_released_to_all() {
    let (_, [client, other]) = clients();
    let (lock, theirs) = (client.lock("a"), other.lock("a"));
    let section = Duration::from_millis(20);
    let first = lock.lock().await.unwrap();
    let known = lock.holder().await.unwrap().unwrap().owner;
    let second = waiter(&lock);
    tokio::time::sleep(section).await;
    first.unlock().await.unwrap();
    let (_, second) = second.await.unwrap();
    let asked = lock.holder().await.unwrap().unwrap().owner;
    assert_eq!(asked, known, "it passed on");
    let third = waiter(&lock);
    run_others().await;
    theirs.revoke(10 * LEASE).await.unwrap();
    // The message of the request wakes the waiter, which asks once more.
    tokio::time::sleep(section).await;
    second.unlock().await.unwrap();
    let (_, third) = third.await.unwrap();
    let holder = theirs.holder().await.unwrap().unwrap().owner;
    assert_ne!(holder, asked, "the hold was handed over");
    assert!(!is_asked(&third).await);
}

/// The check beside handoffs counts a request as a client that waits.
#[tokio::test(start_paused = true)]
async fn check_of_hand_over_counts_request() {
    let (_, guard, theirs) = held().await;
    let (session, hold) = (&guard.hold_ref().session, &guard.hold_ref().hold);
    let check = check_handoff(&hold.object, Some(hold));
    let waiting = async || {
        let (is_held, waiting) = session.store.run_idempotent(&check).await.unwrap();
        assert!(is_held);
        (waiting.subscribers, waiting.queued)
    };
    assert_eq!(waiting().await, (0, 0));
    theirs.ask().await.unwrap();
    assert_eq!(waiting().await, (1, 0));
}

/// Without a request, its client passes the hold on for 50 to 150 ms. No task polls `asked`.
#[tokio::test(start_paused = true)]
async fn hand_overs_end_soon_after_request() {
    let (_, [client, other]) = clients();
    let contend = |lock: Lock| async move {
        loop {
            let guard = lock.lock().await.unwrap();
            sleep(SECOND / 1000).await;
            guard.unlock().await.unwrap();
        }
    };
    let contenders = [(); 3].map(|()| tokio::spawn(contend(client.lock("a"))));
    sleep(SECOND / 10).await;
    let lock = other.lock("a");
    for _ in 0..5 {
        // After a chain of handoffs, the client leaves the lock free for a moment.
        let asked = loop {
            match lock.revoke(LEASE).await.unwrap() {
                Some(asked) => break asked,
                None => sleep(SECOND / 1000).await,
            }
        };
        sleep(SECOND / 40).await;
        let holder = lock.holder().await.unwrap();
        assert!(holder.is_none_or(|holder| holder.owner != asked));
    }
    contenders.iter().for_each(JoinHandle::abort);
}

/// As above, for a release that would acquire the lock for a named owner of the same client.
#[tokio::test(start_paused = true)]
async fn asked_hold_is_released_to_all_instead_of_transferred() {
    for knows in [false, true] {
        let (_, [client, other]) = clients();
        let lock = client.lock("a");
        let guard = lock.lock().owner(Owner::new()).await.unwrap();
        let request = lock.lock().owner(Owner::new()).into_future();
        let next = tokio::spawn(request);
        run_others().await;
        other.lock("a").revoke(SECOND).await.unwrap();
        assert!(!knows || is_asked(&guard).await);
        // The message has woken the waiter. Its refusal is current now, so a release could transfer
        // the lock.
        run_others().await;
        guard.unlock().await.unwrap();
        let is_locked = other.lock("a").is_locked().await.unwrap();
        assert!(!is_locked, "it was transferred without a request");
        let next = next.await.unwrap().unwrap();
        assert!(!is_asked(&next).await);
        sleep(10 * LEASE).await;
        assert!(next.is_valid());
    }
}

/// A release that would acquire the lock for a waiter is repeated, and finds that the hold has ended.
/// Its owner has no unsettled change then, so its next acquisition sends no release first.
#[tokio::test(start_paused = true)]
async fn hold_after_repeated_transfer_is_not_asked() {
    let (store, [client, other]) = clients();
    let (lock, me) = (client.lock("a"), Owner::new());
    let guard = lock.lock().owner(me).await.unwrap();
    let next = tokio::spawn(lock.lock().owner(Owner::new()).into_future());
    run_others().await;
    other.lock("a").revoke(SECOND).await.unwrap();
    // Until the waiter has been refused once more.
    run_others().await;
    // The hold ends in the store as its lease does: without a message, and the request remains.
    let hold = guard.hold_ref().hold.clone();
    hold.state().acquires_again = false;
    let end = lock.kind.undo(&hold, 0).unwrap();
    let session = &guard.hold_ref().session;
    assert!(session.store.run_idempotent(&end).await.unwrap());
    hold.state().acquires_again = true;
    store.fail([Repeated]);
    guard.unlock().await.unwrap();
    next.await.unwrap().unwrap().unlock().await.unwrap();
    let again = lock.lock().owner(me).await.unwrap();
    sleep(10 * LEASE).await;
    assert!(again.is_valid() && !is_asked(&again).await);
}

/// A hold was lost, and a guard of it is dropped before the next request of its owner has sent
/// anything: its release settles the next hold.
#[tokio::test(start_paused = true)]
async fn hold_that_a_guard_of_a_lost_one_settles_is_not_asked() {
    let (_, [client, other]) = clients();
    let (lock, me) = (client.lock("a"), Owner::new());
    let guard = lock.lock().owner(me).await.unwrap();
    other.lock("a").revoke(SECOND).await.unwrap();
    assert!(other.lock("a").force_unlock().await.unwrap());
    guard.lost().await;
    let next = lock.erased().hold_ref(me).unwrap();
    drop(guard);
    client.flush().await;
    let again = lock.lock().owner(me).await.unwrap();
    drop(next);
    sleep(10 * LEASE).await;
    assert!(again.is_valid() && !is_asked(&again).await);
}

/// Replicas do not confirm an acquisition in time. It is released, and the request tries again for
/// the same owner, which another client has asked meanwhile.
#[tokio::test(start_paused = true)]
async fn request_that_tries_again_is_not_asked() {
    let (store, [client, other]) = clients();
    let (lock, semaphore) = (client.lock("a"), client.expirable_semaphore("s"));
    semaphore.try_set_permits(1).await.unwrap();
    let unconfirmed = || {
        store.fail([Unconfirmed]);
        store.delay_answers([SECOND]);
    };
    unconfirmed();
    let request = lock.lock().outage_limit(None).into_future();
    let request = tokio::spawn(request);
    run_others().await;
    assert!(other.lock("a").revoke(SECOND).await.unwrap().is_some());
    let guard = request.await.unwrap().unwrap();
    unconfirmed();
    let request = semaphore.acquire().outage_limit(None).into_future();
    let request = tokio::spawn(request);
    run_others().await;
    let theirs = other.expirable_semaphore("s");
    let held = theirs.held_permits().await.unwrap();
    assert!(theirs.revoke(held[0].id, SECOND).await.unwrap());
    let permit = request.await.unwrap().unwrap();
    sleep(10 * LEASE).await;
    assert!(guard.is_valid());
    assert!(permit.is_valid());
}

/// The store grants a fair lock to a request that is not polled, a peer revokes this hold, and it
/// ends.
#[tokio::test(start_paused = true)]
async fn request_whose_unseen_grant_was_revoked_is_not_asked_again() {
    let (_, [client, other]) = clients();
    let (lock, theirs) = (client.fair_lock("a"), other.fair_lock("a"));
    let guard = theirs.lock().await.unwrap();
    let mut parked = lock.lock().into_future();
    assert!(timeout(Duration::ZERO, &mut parked).await.is_err());
    guard.unlock().await.unwrap();
    assert!(theirs.revoke(SECOND).await.unwrap().is_some());
    sleep(2 * LEASE).await;
    let guard = parked.await.unwrap();
    sleep(10 * LEASE).await;
    assert!(guard.is_valid());
}

/// An offer of the hold may be open when the request arrives.
#[tokio::test(start_paused = true)]
async fn offered_hold_that_was_asked_is_not_taken() {
    let (lock, guard, theirs) = held().await;
    let hold = guard.hold_ref().hold.clone();
    let asked = lock.holder().await.unwrap().unwrap().owner;
    let mut parked = lock.lock().into_future();
    assert!(timeout(Duration::ZERO, &mut parked).await.is_err());
    guard.unlock().await.unwrap();
    assert_eq!(theirs.holder().await.unwrap().unwrap().owner, asked);
    let granted_in = hold.state().period.granted_in;
    hold.mark_asked(granted_in, None);
    let next = parked.await.unwrap();
    assert_ne!(next.owner_id(), asked);
}

/// Re-entries extend the lease, but the watchdog checks the hold as often as without them.
#[tokio::test(start_paused = true)]
async fn re_entries_do_not_keep_revoked_hold() {
    for lease in [None, Some(LEASE)] {
        let (_, [client, other]) = clients();
        let (lock, me) = (client.lock("a"), Owner::new());
        let request = || {
            let request = lock.lock().owner(me);
            match lease {
                Some(lease) => request.lease(lease),
                None => request,
            }
        };
        let outer = request().await.unwrap();
        let begun = Instant::now();
        other.lock("a").revoke(35 * SECOND).await.unwrap();
        let next = waiter(&other.lock("a"));
        while outer.is_valid() {
            sleep(5 * SECOND).await;
            if let Ok(inner) = timeout(SECOND, request()).await {
                let _ = inner.unwrap().unlock().await;
            }
            assert!(begun.elapsed() < 10 * LEASE);
        }
        assert!(is_revoked(outer.unlock().await));
        let (acquired_at, _) = next.await.unwrap();
        let waited = acquired_at - begun;
        assert!(waited >= 35 * SECOND && waited < 37 * SECOND, "{waited:?}");
    }
}

/// A guard with a long lease postpones no renewal of its owner's hold, whether it is acquired before or after the guard that is renewed.
#[tokio::test(start_paused = true)]
async fn long_lease_of_a_re_entry_delays_no_renewal() {
    for (is_first, is_revoked_then) in [(false, true), (false, false), (true, true), (true, false)]
    {
        let (_, [client, other]) = clients();
        let (lock, theirs) = (client.lock("a"), other.lock("a"));
        let me = Owner::new();
        let long = || lock.lock().owner(me).lease(120 * LEASE);
        let (guard, long) = match is_first {
            false => (lock.lock().owner(me).await.unwrap(), long().await.unwrap()),
            true => {
                let long = long().await.unwrap();
                (lock.lock().owner(me).await.unwrap(), long)
            }
        };
        sleep(LEASE / 2).await;
        long.unlock().await.unwrap();
        if is_revoked_then {
            theirs.revoke(LEASE).await.unwrap();
            sleep(LEASE).await;
            assert!(is_revoked(guard.unlock().await));
        } else {
            assert!(theirs.force_unlock().await.unwrap());
            let _next = theirs.lock().await.unwrap();
            sleep(LEASE / 3 + SECOND).await;
            assert!(!guard.is_valid());
        }
    }
}

/// The same if the hold passes on, and is checked meanwhile.
#[tokio::test(start_paused = true)]
async fn check_of_a_hold_that_passes_on_delays_no_renewal() {
    let (_, [client, other]) = clients();
    let lock = client.lock("a");
    let guard = lock.lock().await.unwrap();
    let long = guard.reenter().lease(120 * LEASE).await.unwrap();
    long.unlock().await.unwrap();
    let hold = guard.hold_ref().hold.clone();
    let next = tokio::spawn(lock.lock().into_future());
    run_others().await;
    guard.unlock().await.unwrap();
    assert!(!hold.state().is_renewed());
    hold.renewed(Instant::now(), None, Renewed::Held);
    let next = next.await.unwrap().unwrap();
    assert!(hold.state().is_renewed());
    other.lock("a").revoke(LEASE).await.unwrap();
    sleep(LEASE).await;
    assert!(is_revoked(next.unlock().await));
}

/// A client that has learned of the limit gives a re-entry no longer lease.
#[tokio::test(start_paused = true)]
async fn re_entry_into_revoked_hold_does_not_extend_it() {
    let (_, [client, other]) = clients();
    let me = Owner::new();
    let guard = client.lock("a").lock().owner(me).await.unwrap();
    sleep(8 * SECOND).await;
    other.lock("a").revoke(25 * SECOND).await.unwrap();
    assert!(is_asked(&guard).await);
    let theirs = other.lock("a");
    let left = async || remaining(&theirs).await;
    let inner = guard.reenter().await.unwrap();
    assert!(left().await <= 25 * SECOND, "{:?}", left().await);
    inner.unlock().await.unwrap();
    assert!(left().await <= 25 * SECOND && guard.valid_for() <= 25 * SECOND);
    // Also as the member of a multi-lock, and with a lease of its own.
    let both = MultiLock::new(["a", "b"].map(|name| client.lock(name)));
    let both = both.lock().owner(me).lease(100 * SECOND).await.unwrap();
    assert!(left().await <= 25 * SECOND, "{:?}", left().await);
    assert!(guard.hold_ref().hold.state().period.end <= Instant::now() + 25 * SECOND);
    both.unlock().await.unwrap();
}

/// The client that has asked is gone.
#[tokio::test(start_paused = true)]
async fn request_outlives_client_that_asks() {
    let (_, [client, other]) = clients();
    let guard = client.lock("a").lock().await.unwrap();
    other.lock("a").revoke(5 * SECOND).await.unwrap();
    drop(other);
    assert!(is_asked(&guard).await);
    guard.lost().await;
    assert_eq!(guard.hold_ref().hold.loss(), Some(Loss::Revoked));
}

/// A request leaves no key behind, or one that expires.
#[tokio::test(start_paused = true)]
async fn request_leaves_nothing_behind() {
    let (store, [client, other]) = clients();
    for owner in [None, Some(Owner::new())] {
        let mut request = client.lock("a").lock();
        if let Some(owner) = owner {
            request = request.owner(owner);
        }
        let guard = request.await.unwrap();
        other.lock("a").revoke(SECOND).await.unwrap();
        assert_eq!(store.keys(), ["a", "redlatch_lock_asked:{a}"]);
        drop(guard);
        client.flush().await;
        assert_eq!(store.keys().len(), usize::from(owner.is_none()));
    }
    sleep(2 * Duration::from_secs(3600)).await;
    assert!(store.keys().is_empty());
}

#[tokio::test(start_paused = true)]
async fn run_until_asked_drops_work_and_releases() {
    let (_, [client, other]) = clients();
    let lock = client.lock("a");
    let running = lock.lock().run_until_asked(std::future::pending::<()>());
    let running = tokio::spawn(running);
    run_others().await;
    other.lock("a").ask().await.unwrap();
    assert_eq!(running.await.unwrap().unwrap(), None);
    assert!(!lock.is_locked().await.unwrap());
    // Plain `run` continues until the limit.
    let running = lock.lock().run(std::future::pending::<()>());
    let running = tokio::spawn(running);
    run_others().await;
    other.lock("a").revoke(20 * SECOND).await.unwrap();
    sleep(19 * SECOND).await;
    assert!(!running.is_finished());
    assert!(is_revoked(running.await.unwrap()));
    client.flush().await;
    assert!(!lock.is_locked().await.unwrap());
    let guard = lock.lock().await.unwrap();
    assert_eq!(guard.run_until_asked(async { 42 }).await.unwrap(), Some(42));
    other.lock("a").ask().await.unwrap();
    let endless = guard.run_until_asked(std::future::pending::<()>());
    assert_eq!(endless.await.unwrap(), None);
    assert!(guard.is_valid());
}

#[tokio::test(start_paused = true)]
async fn released_by_waits_for_owner() {
    let (lock, guard, theirs) = held().await;
    let owner = theirs.ask().await.unwrap().unwrap();
    let released = theirs.released_by(owner.clone(), 10 * SECOND);
    assert!(!released.await.unwrap());
    let begun = Instant::now();
    let release = async {
        sleep(SECOND).await;
        guard.unlock().await.unwrap();
    };
    let (released, ()) = tokio::join!(theirs.released_by(owner.clone(), LEASE), release);
    assert!(released.unwrap() && begun.elapsed() < 2 * SECOND);
    let _later = lock.lock().await.unwrap();
    assert!(theirs.released_by(owner, Duration::ZERO).await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn limit_that_is_too_long_is_refused() {
    let (_, [client, _]) = clients();
    let refused = client.lock("a").revoke(Duration::MAX).await;
    let Err(Error::InvalidSetting { setting, .. }) = refused else {
        panic!("{refused:?}");
    };
    assert_eq!(setting, "limit");
}

/// The check of a hold that is gone must not wake itself.
#[tokio::test(start_paused = true)]
async fn asked_neither_completes_nor_spins_after_the_end_of_the_hold() {
    for is_forced in [false, true] {
        let (lock, guard, theirs) = held().await;
        let asked = tokio::spawn(guard.asked());
        run_others().await;
        if is_forced {
            assert!(theirs.force_unlock().await.unwrap());
            // Found by the check, not by the next renewal.
            timeout(SECOND, guard.lost()).await.unwrap();
        } else {
            guard.unlock().await.unwrap();
        }
        // The next holder is asked, not the former one.
        let next = theirs.lock().await.unwrap();
        lock.ask().await.unwrap();
        timeout(SECOND, next.asked()).await.unwrap();
        assert!(!asked.is_finished(), "forced: {is_forced}");
        asked.abort();
    }
}

#[tokio::test(start_paused = true)]
async fn calls_of_asked_leave_no_queue_behind() {
    let (_, [client, _]) = clients();
    let guard = client.lock("a").lock().await.unwrap();
    let waiting = waiter(&client.lock("a"));
    run_others().await;
    for _ in 0..10 {
        assert!(!is_asked(&guard).await);
    }
    let sizes = guard.hold_ref().session.waiting.sizes();
    assert_eq!(sizes, [("channels", 1), ("objects", 1)]);
    guard.unlock().await.unwrap();
    waiting.await.unwrap().1.unlock().await.unwrap();
}

/// The second look of `asked` finds that the hold has ended, and sends nothing: neither a step nor
/// a subscription.
#[tokio::test(start_paused = true)]
async fn asked_that_ends_before_it_subscribes_leaves_later_waiters_awake() {
    let (store, [client, other]) = clients();
    let guard = client.lock("a").lock().await.unwrap();
    store.delay_answers([SECOND]);
    let _asked = tokio::spawn(guard.asked());
    run_others().await;
    guard.unlock().await.unwrap();
    let held = other.lock("a").lock().await.unwrap();
    sleep(SECOND + SECOND / 10).await;
    let waiting = waiter(&client.lock("a"));
    run_others().await;
    let released = Instant::now();
    held.unlock().await.unwrap();
    let (acquired, _guard) = waiting.await.unwrap();
    assert_eq!(acquired, released, "no message woke the waiter");
}

/// The loss that was reported first, also if the store says later that the owner does not hold the
/// lock.
#[tokio::test(start_paused = true)]
async fn release_in_flight_at_the_limit_reports_the_revocation() {
    let (store, [client, other]) = clients();
    let guard = client.lock("a").lock().await.unwrap();
    let inner = guard.reenter().await.unwrap();
    other.lock("a").revoke(10 * SECOND).await.unwrap();
    assert!(is_asked(&guard).await);
    sleep(9 * SECOND).await;
    other.lock("a").force_unlock().await.unwrap();
    store.delay_answers([2 * SECOND]);
    assert!(is_revoked(inner.unlock().await));
    assert!(is_revoked(guard.unlock().await));
}

/// The last release waits for the turn of another one until the limit has passed.
#[tokio::test(start_paused = true)]
async fn last_release_sent_after_the_limit_reports_the_revocation() {
    let (_, guard, theirs) = held().await;
    theirs.revoke(10 * SECOND).await.unwrap();
    assert!(is_asked(&guard).await);
    let hold = guard.hold_ref().hold.clone();
    let turn = hold.turn().await.unwrap();
    let releasing = tokio::spawn(guard.unlock());
    run_others().await;
    sleep(11 * SECOND).await;
    theirs.force_unlock().await.unwrap();
    drop(turn);
    assert!(is_revoked(releasing.await.unwrap()));
}

/// The request waits for its turn while the hold that was revoked ends.
#[tokio::test(start_paused = true)]
async fn acquisition_behind_revoked_hold_has_its_whole_lease() {
    let (_, [client, other]) = clients();
    let owner = Owner::new();
    let lock = client.lock("a");
    let guard = lock.lock().owner(owner).await.unwrap();
    other.lock("a").revoke(10 * SECOND).await.unwrap();
    assert!(is_asked(&guard).await);
    let hold = guard.hold_ref().hold.clone();
    let turn = hold.turn().await.unwrap();
    let request = lock.lock().owner(owner).lease(LEASE).into_future();
    let again = tokio::spawn(request);
    run_others().await;
    let releasing = tokio::spawn(guard.unlock());
    run_others().await;
    drop(turn);
    releasing.await.unwrap().unwrap();
    let again = again.await.unwrap().unwrap();
    assert_eq!(again.valid_for(), LEASE);
}
