//! Acquiring, losing and settling on a stopped clock, with the embedded store.

use std::collections::HashSet;
use std::future::IntoFuture as _;
use std::hash::{BuildHasher as _, BuildHasherDefault};

use super::registry::MixHasher;
use super::settle::{OpenAttempt, PendingRelease, SETTLE_GRACE, WarnIfDropped};
use super::*;
use crate::error::{Error, Loss};
use crate::hold::PeriodId;
use crate::kind::LockKind;
use crate::locks::fair::Fair;
use crate::owner::Owner;
use crate::step::Outcome;
use crate::store::embedded::failure_injection::Failure::{
    self, NoAnswer, NoEffect, NotSent, Refused, Repeated, Unconfirmed,
};
use crate::test_prelude::{SECOND, clients, run_others};
use crate::{Client, Embedded, FairLock, Guard, Lock, Member, MultiLock, RedLock};

/// A client of a store that can fail.
fn client() -> (Embedded, Client) {
    let store = Embedded::new();
    let client = Client::builder().connect_embedded(&store).unwrap();
    (store, client)
}

/// Returns how long it takes until no background work is left.
async fn flush_duration(client: &Client) -> Duration {
    let begun = Instant::now();
    client.flush().await;
    begun.elapsed()
}

fn session<K: LockKind>(guard: &Guard<Lock<K>>) -> &Arc<Session> {
    &guard.hold_ref().session
}

/// Returns the numbers of references to all holds.
fn refs(session: &Session) -> Vec<usize> {
    session.holds.lock().values().map(|one| one.refs).collect()
}

/// Lets another owner acquire a held lock. The guard of the earlier owner has not noticed it yet.
async fn stolen(theirs: &Lock) -> Guard {
    assert!(theirs.force_unlock().await.unwrap());
    theirs.lock().await.unwrap()
}

#[track_caller]
fn assert_not_held<T: std::fmt::Debug>(answer: Result<T>) {
    let reason = Loss::NotHeld;
    let is_lost = matches!(&answer, Err(Error::Lost { reason: r, .. }) if *r == reason);
    assert!(is_lost, "{answer:?}");
}

#[test]
fn different_keys_have_different_hashes() {
    let mix = BuildHasherDefault::<MixHasher>::default();
    let mut hashes = HashSet::new();
    let mut is_new = |hash| hashes.insert(hash);
    for a in 0..64_u64 {
        assert!((0..64_u64).all(|b| is_new(mix.hash_one((a, b)))));
    }
    assert_ne!(mix.hash_one("ab"), mix.hash_one("ba"));
}

#[tokio::test(start_paused = true)]
async fn hold_refs_share_hold_until_last_is_dropped() {
    let client = Client::embedded();
    let lock = client.lock("a");
    let outer = lock.lock().await.unwrap();
    let session = session(&outer).clone();
    assert_eq!(refs(&session), [1]);
    let inner = outer.reenter().await.unwrap();
    assert_eq!((refs(&session), outer.hold_count()), (vec![2], 2));
    let other = client.lock("b").lock().await.unwrap();
    assert_eq!(session.holds.lock().len(), 2);
    other.unlock().await.unwrap();
    inner.unlock().await.unwrap();
    assert_eq!(refs(&session), [1]);
    let third = outer.reenter().await.unwrap();
    drop(third);
    // The background has a reference of its own until the store has answered.
    assert_eq!(refs(&session), [2]);
    client.flush().await;
    assert_eq!((refs(&session), outer.hold_count()), (vec![1], 1));
    drop(outer);
    client.flush().await;
    assert!(refs(&session).is_empty());
    assert!(!lock.is_locked().await.unwrap());
    assert_eq!(client.status().holds, 0);
}

#[tokio::test(start_paused = true)]
async fn refused_request_leaves_nothing_behind() {
    let [client, other] = clients().1;
    let held = other.lock("a").lock().await.unwrap();
    let locks = [client.lock("a"), client.lock("b")];
    let both = MultiLock::new(&locks);
    let own = client.lock("c").lock().await.unwrap();
    assert!(locks[0].try_lock().await.unwrap().is_none());
    assert!(both.try_lock().await.unwrap().is_none());
    assert_eq!(refs(session(&own)), [1]);
    assert_eq!(client.status().background, 0);
    // A key of another type: nothing was done, so there is nothing to settle.
    client.semaphore("d").try_set_permits(1).await.unwrap();
    let odd = client.lock("d");
    let refused = odd.try_lock().await.map(drop);
    assert!(matches!(refused, Err(Error::WrongKind { .. })));
    let refused = MultiLock::new([&odd, &locks[1]]).try_lock().await;
    assert!(refused.is_err());
    assert_eq!(client.status().background, 0);
    assert_eq!(refs(session(&own)), [1]);
    held.unlock().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn owner_cannot_use_name_as_two_lock_kinds() {
    let client = Client::embedded();
    let me = Owner::new();
    let _held = client.lock("a").lock().owner(me).await.unwrap();
    let other = client.fenced_lock("a").try_lock().owner(me).await;
    let other = other.map(drop);
    assert!(matches!(other, Err(Error::WrongKind { .. })), "{other:?}");
}

/// Also while its guard exists, and before anything is sent.
#[tokio::test(start_paused = true)]
async fn anonymous_owner_cannot_be_named() {
    #[track_caller]
    fn refused<T>(answer: Result<T>) {
        let error = answer.err().expect("it is refused").to_string();
        assert!(error.contains("`owner`") && error.contains("`Guard::reenter`"));
    }
    let (store, client) = client();
    let [lock, ticketed, member] = ["a", "b", "c"].map(|name| client.lock(name));
    let read_write = client.read_write_lock("a");
    let several = MultiLock::new([&lock, &member]);
    let majority = RedLock::new([&lock, &member]);
    let permits = client.expirable_semaphore("d");
    assert!(permits.try_set_permits(1).await.unwrap());
    let ticket = ticketed.lock().await.unwrap().into_ticket().await.unwrap();
    let adopted = ticketed.adopt(&ticket).await.unwrap();
    let guard = lock.lock().await.unwrap();
    let all = MultiLock::new([&member]).lock().await.unwrap();
    let most = RedLock::new([client.lock("e")]).lock().await.unwrap();
    // It stays if no step is sent.
    store.fail([NotSent]);
    for owner in [adopted.owner(), guard.owner(), all.owner(), most.owner()] {
        refused(lock.lock().owner(owner).await);
        refused(lock.try_lock().owner(owner).await);
        refused(read_write.read().lock().owner(owner).await);
        refused(read_write.write().try_lock().owner(owner).await);
        refused(client.fair_lock("a").lock().owner(owner).await);
        refused(client.spin_lock("a").lock().owner(owner).await);
        refused(client.fenced_lock("a").lock().owner(owner).await);
        refused(several.lock().owner(owner).await);
        refused(majority.lock().owner(owner).await);
        refused(owner.scope(lock.lock().into_future()).await);
        refused(owner.scope(several.try_lock().into_future()).await);
        refused(owner.scope(majority.try_lock().into_future()).await);
    }
    let next_step = lock.try_lock().await;
    assert!(matches!(next_step, Err(Error::Unavailable { .. })));
    // Permits have no owner, and a guard re-enters what it holds.
    let permit = guard.owner().scope(permits.acquire().into_future()).await;
    permit.unwrap().release().await.unwrap();
    let again = guard.owner().scope(guard.reenter().into_future()).await;
    assert_eq!(again.unwrap().owner(), guard.owner());
    assert_eq!(adopted.reenter().await.unwrap().hold_count(), 2);
}

#[cfg(feature = "blocking")]
#[test]
fn anonymous_owner_cannot_be_named_in_blocking_request() {
    let lock = crate::blocking::Client::embedded().unwrap().lock("a");
    let refused = lock.lock().owner(Owner::anonymous()).block();
    assert!(matches!(refused, Err(Error::InvalidSetting { .. })));
    let outer = lock.lock().block().unwrap();
    let inner = lock.try_lock().owner(outer.owner()).block().unwrap();
    assert_eq!(inner.unwrap().hold_count(), 2);
}

#[tokio::test(start_paused = true)]
async fn only_non_reentrant_lock_refuses_its_holder() {
    let client = Client::embedded();
    let lock = client.lock("a").non_reentrant();
    let me = Owner::new();
    let held = lock.lock().owner(me).await.unwrap();
    let again = lock.lock().owner(me).await.map(drop);
    assert!(matches!(again, Err(Error::AlreadyHeld { .. })), "{again:?}");
    held.unlock().await.unwrap();
    let held = lock.lock().owner(me).await.unwrap();
    assert_eq!((held.hold_count(), held.valid_for()), (1, 30 * SECOND));
}

#[tokio::test(start_paused = true)]
async fn store_has_same_count_and_lease_as_client() {
    let client = Client::embedded();
    let lock = client.lock("a");
    let count = async |guard: &Guard| lock.hold_count(guard.owner()).await.unwrap();
    let outer = lock.lock().lease(20 * SECOND).await.unwrap();
    assert_eq!((count(&outer).await, outer.valid_for()), (1, 20 * SECOND));
    let inner = outer.reenter().lease(5 * SECOND).await.unwrap();
    assert_eq!((count(&outer).await, outer.valid_for()), (2, 20 * SECOND));
    tokio::time::advance(SECOND).await;
    inner.unlock().await.unwrap();
    assert_eq!((count(&outer).await, outer.valid_for()), (1, 19 * SECOND));
    let renewed = outer.reenter().await.unwrap();
    let again = outer.reenter().await.unwrap();
    tokio::time::advance(2 * SECOND).await;
    // A release that keeps some holds renews their lease, too.
    again.unlock().await.unwrap();
    assert_eq!((count(&outer).await, outer.valid_for()), (2, 30 * SECOND));
    renewed.unlock().await.unwrap();
    outer.unlock().await.unwrap();
    assert!(!lock.is_locked().await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn stolen_hold_cannot_be_released_or_reentered() {
    let [client, other] = clients().1;
    let (lock, theirs) = (client.lock("a"), other.lock("a"));
    let guard = lock.lock().await.unwrap();
    let next = stolen(&theirs).await;
    assert_not_held(guard.unlock().await);
    next.unlock().await.unwrap();

    let outer = lock.lock().await.unwrap();
    let inner = outer.reenter().await.unwrap();
    let fixed = client.lock("b").lock().lease(100 * SECOND).await.unwrap();
    assert!(other.lock("b").force_unlock().await.unwrap());
    let next = stolen(&theirs).await;
    assert_not_held(inner.unlock().await);
    assert!(!outer.is_valid());
    // The other holds are checked as well: they may be missing too.
    tokio::time::timeout(SECOND, fixed.lost()).await.unwrap();
    assert_not_held(outer.unlock().await);
    assert!(next.is_valid() && theirs.is_locked().await.unwrap());
    next.unlock().await.unwrap();

    let outer = lock.lock().await.unwrap();
    let next = stolen(&theirs).await;
    let begun = Instant::now();
    assert_not_held(outer.reenter().await.map(drop));
    assert_eq!(
        begun.elapsed(),
        Duration::ZERO,
        "it does not wait for itself"
    );
    assert!(!outer.is_valid());
    next.unlock().await.unwrap();

    let me = Owner::new();
    let outer = lock.lock().owner(me).await.unwrap();
    let next = stolen(&theirs).await;
    let both = MultiLock::new([&lock, &client.lock("c")]);
    // A request with the same owner starts a new hold, which waits for the other owner's.
    let again = both.try_lock().owner(me).await.unwrap();
    assert!(again.is_none() && !outer.is_valid() && next.is_valid());
}

#[tokio::test(start_paused = true)]
async fn owner_can_acquire_again_after_loss() {
    let [client, other] = clients().1;
    let lock = client.fenced_lock("a");
    let me = Owner::new();
    let first = lock.lock().owner(me).await.unwrap();
    assert!(other.fenced_lock("a").force_unlock().await.unwrap());
    first.lost().await;
    let second = lock.lock().owner(me).await.unwrap();
    assert!(second.token() > first.token());
    // The late release of the lost hold does not affect the later hold.
    assert_not_held(first.unlock().await);
    assert!(second.is_valid() && lock.is_locked().await.unwrap());
    second.unlock().await.unwrap();
    assert!(!lock.is_locked().await.unwrap());
    assert_eq!(client.status().holds, 0);
}

#[tokio::test(start_paused = true)]
async fn multi_lock_extends_lease_of_each_member() {
    let client = Client::embedded();
    let locks = [client.lock("a"), client.lock("b")];
    let both = MultiLock::new(&locks);
    let me = Owner::new();
    let fixed = both.try_lock().owner(me).lease(20 * SECOND);
    let guard = fixed.await.unwrap().unwrap();
    assert_eq!(guard.valid_for(), 20 * SECOND);
    assert_eq!(client.status().holds, 2);
    let again = both.try_lock().owner(me).await.unwrap().unwrap();
    assert_eq!(again.valid_for(), 30 * SECOND);
    assert_eq!(locks[0].hold_count(me).await.unwrap(), 2);
    again.unlock().await.unwrap();
    guard.unlock().await.unwrap();
    assert_eq!(client.status().holds, 0);
    assert!(!locks[1].is_locked().await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn waiter_notices_later_hold_period_of_sibling() {
    let client = Client::embedded();
    // Only kinds with a sibling are waited for in this way.
    let lock = client.read_write_lock("a").write();
    let me = Owner::new();
    let guard = lock.lock().owner(me).await.unwrap();
    let (session, object) = (
        session(&guard).clone(),
        guard.hold_ref().hold.object.clone(),
    );
    let first = session.hold_period(me, &object);
    assert!(first.is_some());
    session.wait_until_held(me, &object, None).await;
    let early = tokio::time::timeout(SECOND, session.wait_until_held(me, &object, first)).await;
    assert!(early.is_err(), "it is the same hold period");
    guard.unlock().await.unwrap();
    assert_eq!(session.hold_period(me, &object), None);
    for several in [false, true] {
        let before = Some(PeriodId::latest());
        let acquire = async {
            tokio::task::yield_now().await;
            let (one, many) = match several {
                false => (lock.try_lock().owner(me).await.unwrap(), None),
                true => (
                    None,
                    MultiLock::new([&lock]).try_lock().owner(me).await.unwrap(),
                ),
            };
            tokio::time::sleep(SECOND).await;
            drop((one, many));
        };
        let noticed = session.wait_until_held(me, &object, before);
        tokio::select! {
            biased;
            () = noticed => {}
            () = acquire => panic!("not noticed"),
        }
        client.flush().await;
    }
}

#[tokio::test(start_paused = true)]
async fn guard_dropped_on_one_side_does_not_block_other_side() {
    let client = Client::embedded();
    let lock = client.read_write_lock("a");
    let me = Owner::new();
    drop(lock.read().lock().owner(me).await.unwrap());
    let writer = lock.write().try_lock().owner(me).await.unwrap().unwrap();
    writer.unlock().await.unwrap();
    client.flush().await;
    let reader = lock.read().lock().owner(me).await.unwrap();
    assert_eq!(refs(&reader.hold_ref().session), [1]);
}

#[tokio::test(start_paused = true)]
async fn concurrent_releases_are_sent_once() {
    let client = Client::embedded();
    let lock = client.lock("a");
    let owner = Owner::new();
    let outer = lock.lock().owner(owner).await.unwrap();
    let inner = outer.reenter().await.unwrap();
    let held = outer.hold_ref().hold.clone();
    let turn = held.turn().await.unwrap();
    let leave = async {
        tokio::task::yield_now().await;
        drop(turn);
    };
    let (one, two, ()) = tokio::join!(outer.unlock(), inner.unlock(), leave);
    one.unwrap();
    two.unwrap();
    assert_eq!(lock.hold_count(owner).await.unwrap(), 0);
    let next = lock.lock().owner(owner).await.unwrap();
    assert!(next.is_valid() && client.status().holds == 1);
}

#[tokio::test(start_paused = true)]
async fn concurrent_releases_both_report_loss() {
    let [client, other] = clients().1;
    let lock = client.lock("a");
    let outer = lock.lock().await.unwrap();
    let inner = outer.reenter().await.unwrap();
    assert!(other.lock("a").force_unlock().await.unwrap());
    let held = outer.hold_ref().hold.clone();
    let turn = held.turn().await.unwrap();
    let leave = async {
        tokio::task::yield_now().await;
        drop(turn);
    };
    let (one, two, ()) = tokio::join!(outer.unlock(), inner.unlock(), leave);
    assert_not_held(one);
    assert_not_held(two);
}

/// The store's state of the owner belongs to the later hold, whose request may have been canceled.
#[tokio::test(start_paused = true)]
async fn release_of_lost_hold_first_settles_its_successor() {
    let (store, client) = client();
    let lock = client.lock("a");
    let me = Owner::new();
    let lost = lock.lock().owner(me).await.unwrap();
    assert!(lock.force_unlock().await.unwrap());
    lost.lost().await;
    // The first step releases what the lost hold may have left.
    store.fail([None, Some(NoAnswer)]);
    assert!(lock.try_lock().owner(me).await.is_err());
    assert!(lock.is_locked().await.unwrap());
    assert_not_held(lost.hold_ref().settle().await);
    // The background has had no chance to do so.
    assert_eq!(client.status().background, 1);
    assert!(!lock.is_locked().await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn unanswered_release_makes_next_one_a_repetition() {
    let client = Client::embedded();
    let guard = client.lock("a").lock().await.unwrap();
    let hold = &guard.hold_ref().hold;
    for (keep, sent, repeated) in [(1, true, false), (0, false, false), (0, true, true)] {
        let release = PendingRelease::new(hold, keep);
        if sent {
            release.progress.mark_sent();
        }
        drop(release);
        assert_eq!(hold.state().ledger.maybe_released(), repeated);
    }
    let release = PendingRelease::new(hold, 0);
    let changes = hold.state().ledger.latest();
    hold.state().release_answered(changes, false);
    release.progress.mark_sent();
    release.record_result(&Ok(()));
    drop(release);
    assert!(!hold.state().ledger.maybe_released(), "it was answered");
    // The store does not have it any more: the earlier release took effect.
    hold.state().ledger.release_unanswered(0);
    assert!(client.lock("a").force_unlock().await.unwrap());
    guard.unlock().await.unwrap();
}

/// One request waits for the turn to release what another request of its owner may leave, which leaves nothing.
/// The release is sent nevertheless, and the store may apply it later.
#[tokio::test(start_paused = true)]
async fn unnecessary_release_without_answer_is_settled_before_next_acquisition() {
    let (store, client) = client();
    let lock = client.read_write_lock("a");
    let me = Owner::new();
    let writer = lock.write().lock().owner(me).await.unwrap();
    let hold_ref = writer.hold_ref().clone();
    writer.unlock().await.unwrap();
    let hold = &hold_ref.hold;
    let turn = hold.turn().await.unwrap();
    let attempt = hold.state().ledger.begin_attempt();
    let read = async {
        let reader = lock.read().lock().owner(me).await.unwrap();
        reader.unlock().await.unwrap();
    };
    let refuse = async {
        tokio::task::yield_now().await;
        hold.state().attempt_answered(attempt);
        store.fail([NoAnswer]);
        drop(turn);
    };
    tokio::join!(read, refuse);
    assert_eq!(client.status().background, 0);
    // The first step is a release, the second one the acquisition.
    store.fail([None, Some(NoEffect)]);
    let acquired = lock.write().try_lock().owner(me).await;
    assert!(acquired.is_err(), "acquired by the first step");
}

#[tokio::test(start_paused = true)]
async fn dropped_background_work_counts_as_settled() {
    let client = Client::embedded();
    let guard = client.lock("a").lock().await.unwrap();
    let hold_ref = guard.hold_ref().clone();
    let hold = hold_ref.hold.clone();
    hold.state().ledger.begin_attempt();
    assert!(hold.state().ledger.must_be_settled());
    drop(WarnIfDropped(Some(hold_ref)));
    assert!(!hold.state().ledger.must_be_settled());
}

#[tokio::test(start_paused = true)]
async fn last_hold_ref_settles_open_changes() {
    let client = Client::embedded();
    let guard = client.lock("a").lock().await.unwrap();
    let (hold_ref, session) = (guard.hold_ref().clone(), session(&guard).clone());
    guard.unlock().await.unwrap();
    let hold = hold_ref.hold.clone();
    hold.state().ledger.begin_attempt();
    drop(hold_ref);
    assert_eq!(refs(&session), [1], "the background has it");
    client.flush().await;
    assert!(hold.state().ledger.is_settled());
    assert!(refs(&session).is_empty());
}

/// A flush waits until the lease has ended. The client tries for [`SETTLE_GRACE`] more.
async fn assert_unsettled_for(client: &Client, lease: Duration) {
    let unsettled = client.flush_within(lease - SECOND).await;
    assert_eq!(Vec::from_iter(unsettled.names()), ["a"]);
    assert_eq!(flush_duration(client).await, SECOND);
    assert!(client.flush_within(Duration::ZERO).await.is_empty());
    let ended = client.status().background == 0;
    assert!(!ended, "it is still tried");
    tokio::time::sleep(SETTLE_GRACE + PAUSE).await;
    assert_eq!(client.status().background, 0);
}

/// The pause between two attempts to release in the background.
const PAUSE: Duration = Duration::from_millis(500);

#[tokio::test(start_paused = true)]
async fn guard_dropped_in_outage_is_released_after_it() {
    let (store, client) = client();
    let lock = client.lock("a");
    for failure in [NotSent, NoEffect, NoAnswer] {
        let guard = lock.lock().await.unwrap();
        store.fail([failure; 3]);
        drop(guard);
        assert_eq!(flush_duration(&client).await, 3 * PAUSE, "{failure:?}");
        assert!(!lock.is_locked().await.unwrap());
        assert_eq!(client.status().holds, 0);
    }
}

#[tokio::test(start_paused = true)]
async fn release_is_abandoned_after_lease_has_ended() {
    let (store, client) = client();
    for lease in [20 * SECOND, 40 * SECOND] {
        let guard = client.lock("a").lock().lease(lease).await.unwrap();
        let session = session(&guard).clone();
        store.fail([NoEffect; 1000]);
        drop(guard);
        assert_unsettled_for(&client, lease).await;
        assert!(refs(&session).is_empty());
        store.recover();
    }
}

/// Nothing is wrong, so a flush waits for the release, and nothing is logged about it.
#[tokio::test(start_paused = true)]
async fn guard_dropped_after_its_lease_is_settled_by_flush() {
    let client = Client::embedded();
    let guard = client.lock("a").lock().lease(SECOND).await.unwrap();
    tokio::time::sleep(2 * SECOND).await;
    drop(guard);
    assert_eq!(flush_duration(&client).await, Duration::ZERO);
    assert_eq!(client.status().background, 0);
}

/// The store has the lock only for the rest of a fixed lease. A renewal may have had an effect.
#[tokio::test(start_paused = true)]
async fn flush_in_outage_ends_with_lease() {
    let (store, client) = client();
    let fixed = client.lock("a").lock().lease(60 * SECOND).await.unwrap();
    let renewed = client.lock("b").lock().await.unwrap();
    tokio::time::sleep(45 * SECOND).await;
    store.fail([NoEffect; 1000]);
    let background = || client.status().background;
    let mut settled = Vec::new();
    drop(fixed);
    settled.push(flush_duration(&client).await);
    drop(renewed);
    settled.push(flush_duration(&client).await);
    assert_eq!(settled, [15 * SECOND, 30 * SECOND]);
    assert!(background() > 0, "it is still tried");
}

#[tokio::test(start_paused = true)]
async fn flush_does_not_wait_for_what_the_store_refuses() {
    let (store, client) = client();
    let (lock, semaphore) = (client.lock("a"), client.semaphore("b"));
    semaphore.try_set_permits(1).await.unwrap();
    for lost in ["a", "b"] {
        let guard = lock.lock().lease(600 * SECOND).await.unwrap();
        let permit = semaphore.acquire().await.unwrap();
        store.fail([Refused; 1000]);
        match lost {
            "a" => drop(guard),
            _ => drop(permit),
        }
        assert!(flush_duration(&client).await <= 5 * SECOND, "{lost}");
        let unsettled = client.flush_within(SECOND).await;
        assert_eq!(Vec::from_iter(unsettled.names()), [lost]);
        assert_eq!(unsettled.to_string(), format!("{lost:?}"));
        // The reason may end later.
        tokio::time::sleep(60 * SECOND).await;
        store.recover();
        tokio::time::sleep(6 * SECOND).await;
        client.flush().await;
        assert_eq!(client.status().background, 0);
        assert!(client.flush_within(Duration::ZERO).await.is_empty());
    }
    // The other one is dropped at the end of each round.
    client.flush().await;
    assert_eq!(semaphore.available().await.unwrap(), 1);
    assert!(!lock.is_locked().await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn impossible_release_is_not_retried() {
    let client = Client::embedded();
    let lock = client.lock("a");
    let guard = lock.lock().await.unwrap();
    assert!(lock.force_unlock().await.unwrap());
    client.semaphore("a").try_set_permits(1).await.unwrap();
    drop(guard);
    assert_eq!(
        flush_duration(&client).await,
        Duration::ZERO,
        "another kind"
    );

    let guard = client.lock("b").lock().await.unwrap();
    let hold_ref = guard.hold_ref().clone();
    hold_ref.hold.mark_lost(Loss::NotHeld);
    let begun = Instant::now();
    let running = client.session.background.begin(&hold_ref.hold.object);
    let work = running.to_ref();
    let settling = hold_ref.settle_with_retries(begun + guard.valid_for(), None, &work);
    settling.await;
    assert_eq!(begun.elapsed(), Duration::ZERO, "lost");
}

#[tokio::test(start_paused = true)]
async fn acquisition_without_answer_is_undone() {
    let (store, client) = client();
    let [a, b] = ["a", "b"].map(|name| client.lock(name));
    let both = MultiLock::new([&a, &b]);
    let kept = client.lock("c").lock().await.unwrap();
    for failure in [NoAnswer, NoEffect, Unconfirmed, NotSent] {
        for several in [false, true] {
            store.fail([failure]);
            let failed = match several {
                false => a.try_lock().await.map(drop),
                true => both.try_lock().await.map(drop),
            };
            assert!(matches!(failed, Err(Error::Unavailable { .. })));
            let background = client.status().background > 0;
            // An unconfirmed acquisition is released at once.
            assert_eq!(
                background,
                matches!(failure, NoAnswer | NoEffect),
                "{failure:?}"
            );
            client.flush().await;
            assert!(!a.is_locked().await.unwrap() && !b.is_locked().await.unwrap());
            assert_eq!(refs(session(&kept)), [1]);
        }
    }
}

/// A step that says "not held" has the other holds checked, also a release in the background, and the acquisition of the read side.
#[tokio::test(start_paused = true)]
async fn hold_that_is_found_missing_has_the_others_checked() {
    for finds in ["dropped guard", "reader"] {
        let (store, [client, peer]) = clients();
        let fixed = client.lock("fixed").lock().lease(100 * SECOND);
        let fixed = fixed.await.unwrap();
        let write = client.read_write_lock("a").write();
        let guard = write.lock().await.unwrap();
        ["a", "fixed"].iter().for_each(|key| store.remove(key));
        let theirs = peer.read_write_lock("a").write();
        let _theirs = theirs.lock().await.unwrap();
        match finds {
            "reader" => assert_not_held(guard.reenter_read().await.map(drop)),
            _ => drop(guard),
        }
        let lost = tokio::time::timeout(SECOND, fixed.lost()).await;
        assert!(lost.is_ok(), "{finds}");
    }
}

/// Two wait for the lock, in an order that the work in the background does not change.
async fn queue_stays_while_flushed(client: &Client, lock: &FairLock, failure: &Failure) {
    let owners = async || {
        let queue = lock.queue().await.unwrap();
        Vec::from_iter(queue.into_iter().map(|waiter| waiter.owner))
    };
    let before = owners().await;
    client.flush().await;
    assert_eq!(before.len(), 2);
    assert_eq!(owners().await, before, "{failure:?}");
}

/// Work in the background settles what this owner had, while its next request and then one of another client wait behind `held`.
async fn next_request_of_owner_keeps_its_place(
    client: &Client,
    owner: Owner,
    other: &FairLock,
    held: Guard<FairLock>,
    failure: &Failure,
) {
    assert_eq!(client.status().background, 1, "{failure:?}");
    let lock = client.fair_lock("a");
    let first = tokio::spawn(lock.lock().owner(owner).into_future());
    run_others().await;
    let second = tokio::spawn(other.lock().into_future());
    run_others().await;
    queue_stays_while_flushed(client, &lock, failure).await;
    held.unlock().await.unwrap();
    for waiter in [first, second] {
        waiter.await.unwrap().unwrap().unlock().await.unwrap();
    }
}

/// The release behind the unanswered attempt is repeated when the next attempt of the same request has a place in the queue.
#[tokio::test(start_paused = true)]
async fn waiter_keeps_its_place_while_an_earlier_attempt_is_settled() {
    for failure in [NoAnswer, NoEffect] {
        let (store, [client, peer, other]) = clients();
        let [mine, theirs, third] = [&client, &peer, &other].map(|one| one.fair_lock("a"));
        let held = theirs.lock().await.unwrap();
        store.fail([failure, NotSent]);
        let first = tokio::spawn(mine.lock().outage_limit(SECOND).into_future());
        tokio::time::sleep(SECOND / 10).await;
        let second = tokio::spawn(third.lock().into_future());
        run_others().await;
        assert_eq!(client.status().background, 1, "{failure:?}");
        queue_stays_while_flushed(&client, &mine, &failure).await;
        held.unlock().await.unwrap();
        for waiter in [first, second] {
            waiter.await.unwrap().unwrap().unlock().await.unwrap();
        }
    }
}

/// The removal of the first one's place is repeated when the next request of the same owner has its place in the queue.
#[tokio::test(start_paused = true)]
async fn waiter_keeps_its_place_while_an_earlier_one_of_its_owner_is_removed() {
    for failure in [NotSent, NoEffect, NoAnswer] {
        let (store, [client, peer, other]) = clients();
        let [mine, theirs, third] = [&client, &peer, &other].map(|one| one.fair_lock("a"));
        let me = Owner::new();
        let held = theirs.lock().await.unwrap();
        let left = tokio::spawn(mine.lock().owner(me).into_future());
        run_others().await;
        store.fail([failure]);
        left.abort();
        run_others().await;
        next_request_of_owner_keeps_its_place(&client, me, &third, held, &failure).await;
    }
}

/// A guard is dropped whose hold the store does not have any more. Its release is repeated when the next request of the same owner,
/// which was answered so, has its place in the queue.
#[tokio::test(start_paused = true)]
async fn waiter_keeps_its_place_while_a_lost_hold_of_its_owner_is_released() {
    for failure in [NotSent, NoEffect, NoAnswer] {
        let (store, [client, peer, other]) = clients();
        let [mine, theirs, third] = [&client, &peer, &other].map(|one| one.fair_lock("a"));
        let me = Owner::new();
        let guard = mine.lock().owner(me).await.unwrap();
        assert!(theirs.force_unlock().await.unwrap());
        let held = theirs.lock().await.unwrap();
        store.fail([failure]);
        drop(guard);
        run_others().await;
        next_request_of_owner_keeps_its_place(&client, me, &third, held, &failure).await;
    }
}

/// The writer is refused while its owner reads as far as the store knows. It sees that before or after the canceled read is
/// settled.
#[tokio::test(start_paused = true)]
async fn waiting_writer_acquires_although_a_read_of_its_owner_was_canceled_in_flight() {
    for case in 0..16 {
        let [is_canceled, is_settled_before, fails, is_multi_lock] =
            [1, 2, 4, 8].map(|bit| case & bit > 0);
        let store = Embedded::new();
        let [client, peer] = [(); 2].map(|()| {
            let settings = Client::builder().fair_grants(false);
            settings.connect_embedded(&store).unwrap()
        });
        let (lock, me) = (client.fair_read_write_lock("a"), Owner::new());
        let other = client.fair_read_write_lock("b");
        let writes_other = other.write().lock().owner(me).await.unwrap();
        let held = peer.fair_read_write_lock("a").write().lock().await.unwrap();
        let reading = tokio::spawn(lock.read().lock().owner(me).into_future());
        run_others().await;
        let writing = match is_multi_lock {
            false => {
                let writing = lock.write().lock().owner(me).into_future();
                tokio::spawn(async move { writing.await.map(drop) })
            }
            true => {
                let both = MultiLock::new([Member::from(lock.write()), other.read().into()]);
                let writing = both.lock().owner(me).into_future();
                tokio::spawn(async move { writing.await.map(drop) })
            }
        };
        run_others().await;
        let refused_after = SECOND * u32::from(is_settled_before);
        store.delay_answers([Duration::ZERO, SECOND, refused_after]);
        held.unlock().await.unwrap();
        run_others().await;
        if is_canceled {
            // Tries to settle the read.
            store.fail(fails.then_some([NotSent; 2]).into_iter().flatten());
            reading.abort();
            match writing.await.unwrap() {
                Ok(()) => {}
                Err(Error::Unavailable { .. }) if fails => {}
                Err(error) => panic!("{case}: {error}"),
            }
        } else {
            let reader = reading.await.unwrap().unwrap();
            let refused = writing.await.unwrap();
            assert!(
                matches!(refused, Err(Error::WriteWhileReading { .. })),
                "{case}"
            );
            reader.unlock().await.unwrap();
        }
        writes_other.unlock().await.unwrap();
        client.flush().await;
        assert_eq!(client.status().holds, 0);
    }
}

/// As the one before, but the read begins after the RedLock has looked for reads to settle.
#[tokio::test(start_paused = true)]
async fn red_lock_of_write_sides_is_acquired_although_a_read_was_canceled_in_flight() {
    let (store, client) = client();
    let (lock, me) = (client.read_write_lock("a"), Owner::new());
    let write = lock.write();
    let hold_ref = write.erased().hold_ref(me).unwrap();
    let turn = hold_ref.hold.try_turn();
    let writing = tokio::spawn(RedLock::new([&write]).try_lock().owner(me).into_future());
    run_others().await;
    store.delay_answers([SECOND]);
    let reading = tokio::spawn(lock.read().lock().owner(me).into_future());
    run_others().await;
    drop(turn);
    run_others().await;
    reading.abort();
    assert!(writing.await.unwrap().unwrap().is_some());
}

/// The answers to its renewals were lost, and the store has applied them.
#[tokio::test(start_paused = true)]
async fn read_that_is_lost_refuses_no_write_of_its_owner() {
    let (store, client) = client();
    let (lock, me) = (client.read_write_lock("a"), Owner::new());
    let reader = lock.read().lock().owner(me).await.unwrap();
    store.fail([NoAnswer; 1000]);
    reader.lost().await;
    store.recover();
    assert!(lock.read().is_locked().await.unwrap());
    let writer = lock.write().try_lock().owner(me).await.unwrap();
    assert!(writer.is_some());
    drop(reader);
}

/// The store may keep it until its own lease ends, or, if it remembers waiters, until that ends.
#[tokio::test(start_paused = true)]
async fn undo_of_acquisition_is_abandoned_after_its_lease() {
    let (store, client) = client();
    let lock = client.lock("a");
    let fair = client.fair_lock("b").wait_time(30 * SECOND).erased();
    let hold_ref = fair.hold_ref(Owner::new()).unwrap();
    for lease in [20 * SECOND, 40 * SECOND] {
        let terms = fair.session.terms(Some(Lease::new(lease).unwrap()), true);
        for (waits, remembered) in [(false, lease), (true, lease.max(30 * SECOND))] {
            let once = RequestedHold::without_waiting(&*fair.kind, &hold_ref, terms);
            let requested = RequestedHold { waits, ..once };
            assert_eq!(requested.trace_lifetime().duration(), remembered);
        }
        store.fail([NoEffect; 1000]);
        let failed = lock.try_lock().lease(lease).await.map(drop);
        assert!(failed.is_err());
        assert_unsettled_for(&client, lease).await;
        store.recover();
    }
}

/// A replica that becomes the master has what the owner had before the re-entry: with a fixed lease until its earlier end. The
/// former master keeps the hold for longer, so it is released for longer.
#[tokio::test(start_paused = true)]
async fn unconfirmed_reentry_does_not_lengthen_fixed_lease() {
    let (store, client) = client();
    let lock = client.lock("a");
    let both = MultiLock::new([&lock]);
    for several in [false, true] {
        let me = Owner::new();
        let outer = lock.lock().owner(me).lease(20 * SECOND).await.unwrap();
        tokio::time::advance(5 * SECOND).await;
        // The release of the inner acquisition fails, too: the store keeps the longer lease.
        store.fail([Unconfirmed, NotSent]);
        let inner = match several {
            false => outer.reenter().lease(30 * SECOND).await.map(drop),
            true => {
                let again = both.try_lock().owner(me);
                again.lease(30 * SECOND).await.map(drop)
            }
        };
        assert!(inner.is_err());
        assert_eq!(outer.valid_for(), 15 * SECOND, "several: {several}");
        client.flush().await;
        assert_eq!(outer.hold_count(), 1);
        store.fail([NoEffect; 1000]);
        drop(outer);
        assert_unsettled_for(&client, 30 * SECOND).await;
        store.recover();
    }
}

/// The next master is asked at once to renew the hold, with the lease of the watchdog.
#[tokio::test(start_paused = true)]
async fn unconfirmed_reentry_lengthens_renewed_hold_like_a_renewal() {
    let (store, client) = client();
    let outer = client.lock("a").lock().await.unwrap();
    tokio::time::advance(5 * SECOND).await;
    store.fail([Unconfirmed, NotSent]);
    assert!(outer.reenter().lease(60 * SECOND).await.is_err());
    assert_eq!(outer.valid_for(), Lease::WATCHDOG.duration());
    client.flush().await;
    outer.unlock().await.unwrap();
}

/// The forced release wakes no request of its owner. The lost guard still exists, so no release of this
/// client does, either.
#[tokio::test(start_paused = true)]
async fn owner_reacquires_fair_lock_beside_its_lost_guard() {
    for (is_renewed, accepts_grants) in [(true, true), (true, false), (false, false)] {
        let store = Embedded::new();
        let [client, peer] = [(); 2].map(|()| {
            let settings = Client::builder().subscription_linger(10_000 * SECOND);
            let settings = settings.fair_grants(accepts_grants);
            settings.connect_embedded(&store).unwrap()
        });
        let (mine, theirs, me) = (client.fair_lock("a"), peer.fair_lock("a"), Owner::new());
        let request = || match is_renewed {
            true => mine.lock().owner(me),
            false => mine.lock().owner(me).lease(3600 * SECOND),
        };
        let held = theirs.lock().await.unwrap();
        let waiting = tokio::spawn(request().into_future());
        run_others().await;
        held.unlock().await.unwrap();
        let lost = waiting.await.unwrap().unwrap();
        assert!(theirs.force_unlock().await.unwrap());
        match is_renewed {
            true => lost.lost().await,
            false => assert_not_held(lost.reenter().await.map(drop)),
        }
        let begun = Instant::now();
        request().await.unwrap().unlock().await.unwrap();
        assert_eq!(
            begun.elapsed(),
            Duration::ZERO,
            "{is_renewed} {accepts_grants}"
        );
    }
}

/// Another request of an owner that waits keeps the owner's place in the queue. The last one leaves
/// it, also if it has sent nothing.
#[tokio::test(start_paused = true)]
async fn other_request_of_owner_keeps_the_place_of_a_dropped_one() {
    for (is_multi_lock, is_dropped) in [(false, false), (false, true), (true, false), (true, true)]
    {
        let [client, peer, other] = clients().1;
        let [mine, theirs, third] = [&client, &peer, &other].map(|one| one.fair_lock("a"));
        let held = theirs.lock().lease(60 * SECOND).await.unwrap();
        let (me, both) = (Owner::new(), MultiLock::new([&mine]));
        let first = tokio::spawn(mine.lock().owner(me).into_future());
        run_others().await;
        let behind = tokio::spawn(third.lock().into_future());
        run_others().await;
        let (single, multi) = (mine.lock().owner(me), both.lock().owner(me));
        let second = match is_multi_lock {
            false => tokio::spawn(async move { single.await.map(drop) }),
            true => tokio::spawn(async move { multi.await.map(drop) }),
        };
        run_others().await;
        first.abort();
        if is_dropped {
            second.abort();
        }
        run_others().await;
        client.flush().await;
        let position = mine.position(me).await.unwrap();
        assert_eq!(position, (!is_dropped).then_some(0), "{is_multi_lock}");
        held.unlock().await.unwrap();
        if !is_dropped {
            second.await.unwrap().unwrap();
        }
        behind.await.unwrap().unwrap().unlock().await.unwrap();
        client.flush().await;
        assert_eq!(client.status().holds, 0);
        assert!(mine.queue().await.unwrap().is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn unanswered_release_is_not_reported_as_loss() {
    let (store, client) = client();
    let lock = client.lock("a");
    for failure in [NoAnswer, NoEffect] {
        let guard = lock.lock().await.unwrap();
        store.fail([failure]);
        let failed = guard.unlock().await;
        assert!(matches!(failed, Err(Error::Unavailable { .. })));
        // The repetition finds nothing if the first one took effect.
        client.flush().await;
        let next = lock.lock().await.unwrap();
        assert!(next.is_valid());
        next.unlock().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn next_acquisition_waits_for_pending_release() {
    let (store, client) = client();
    let lock = client.fenced_lock("a");
    let me = Owner::new();
    let failures: [&[Failure]; 2] = [&[NoAnswer, NoEffect], &[NoAnswer, NotSent, NoEffect]];
    for failures in failures {
        store.fail(failures.iter().copied());
        assert!(lock.try_lock().owner(me).await.is_err());
        // Releases in the background and for the next acquisition take turns.
        let mut next = None;
        for _ in failures {
            match lock.try_lock().owner(me).await {
                Ok(guard) => next = next.or(guard),
                Err(error) => assert!(matches!(error, Error::Unavailable { .. }), "{error}"),
            }
        }
        let guard = next.expect("acquired after the failures");
        assert_eq!(lock.hold_count(me).await.unwrap(), 1);
        client.flush().await;
        assert!(guard.is_valid() && lock.is_locked().await.unwrap());
        guard.unlock().await.unwrap();
    }
}

/// A release that publishes no message: the first waiter sleeps on, and the others have had their answer.
#[tokio::test(start_paused = true)]
async fn release_without_message_leaves_waiters_their_answer() {
    let (_, client) = client();
    let lock = client.read_write_lock("a");
    let (read, write) = (lock.read(), lock.write());
    let one = read.lock().await.unwrap();
    let _other = read.lock().await.unwrap();
    let waiting = tokio::spawn(write.lock().into_future());
    tokio::time::sleep(SECOND / 10).await;
    one.unlock().await.unwrap();
    let limited = write.try_lock().wait(SECOND).await;
    assert!(limited.unwrap().is_none());
    // Nothing is forced open, so there is no message either.
    assert!(!client.lock("b").force_unlock().await.unwrap());
    assert!(!waiting.is_finished());
}

/// The store may have released the lock already, so its earlier answer is out of date.
#[tokio::test(start_paused = true)]
async fn request_after_unanswered_release_does_not_rely_on_earlier_answer() {
    let (store, client) = client();
    let lock = client.lock("a");
    let guard = lock.lock().lease(20 * SECOND).await.unwrap();
    let waiting = tokio::spawn(lock.lock().into_future());
    tokio::time::sleep(SECOND / 10).await;
    let refused = lock.try_lock().wait(SECOND / 10).await;
    assert!(refused.unwrap().is_none());
    // By the caller, and in the background.
    store.fail([NoEffect; 2]);
    assert!(guard.unlock().await.is_err());
    let unanswered = lock.try_lock().wait(SECOND / 10).await.map(drop);
    assert!(unanswered.is_err() && !waiting.is_finished());
    client.flush().await;
    assert!(waiting.await.unwrap().unwrap().is_valid());
}

/// The lock was lost, so the release publishes no message. The waiter asks once more which owner holds it now.
#[tokio::test(start_paused = true)]
async fn release_of_lost_lock_makes_waiter_ask_again() {
    let [client, other] = clients().1;
    let lock = client.lock("a");
    let guard = lock.lock().lease(20 * SECOND).await.unwrap();
    let waiting = tokio::spawn(lock.lock().into_future());
    tokio::time::sleep(SECOND / 10).await;
    let theirs = stolen(&other.lock("a")).await;
    tokio::time::sleep(SECOND / 10).await;
    assert_not_held(guard.unlock().await);
    let refused = lock.try_lock().wait(SECOND / 10).await;
    assert!(refused.unwrap().is_none() && !waiting.is_finished());
    theirs.unlock().await.unwrap();
    assert!(waiting.await.unwrap().unwrap().is_valid());
}

/// A request for a fair lock that is held, up to the moment in which the store grants it the lock.
async fn granted_request(answer: Option<Failure>) -> (Lock<Fair>, HoldRef, Terms) {
    let (store, client) = client();
    let peer = Client::builder().connect_embedded(&store).unwrap();
    let held = peer.fair_lock("a").lock().await.unwrap();
    let lock = client.fair_lock("a");
    let hold_ref = lock.erased().hold_ref(Owner::new()).unwrap();
    let terms = hold_ref.session.terms(None, true);
    store.fail([answer]);
    assert!(!attempt(&hold_ref, terms).await);
    held.unlock().await.unwrap();
    assert!(lock.is_held_by(hold_ref.hold.owner).await.unwrap());
    (lock, hold_ref, terms)
}

fn request(hold_ref: &HoldRef, terms: Terms) -> RequestedHold<'_> {
    RequestedHold {
        waits: true,
        request_number: 7,
        ..RequestedHold::without_waiting(&*hold_ref.hold.kind, hold_ref, terms)
    }
}

/// Makes one attempt. Returns whether it acquired the lock.
async fn attempt(hold_ref: &HoldRef, terms: Terms) -> bool {
    let (requested, progress) = (request(hold_ref, terms), Progress::default());
    let attempting = requested.try_acquire(Some(requested.channel()), &progress);
    matches!(attempting.await.unwrap(), Outcome::ACQUIRED)
}

#[tokio::test(start_paused = true)]
async fn grant_is_accepted_once_and_watched_and_released() {
    let (lock, hold_ref, terms) = granted_request(None).await;
    assert_eq!(request(&hold_ref, terms).accept_grant(8).await, None);
    // Another request of the owner, such as one with a fixed lease.
    let other = RequestedHold {
        request_number: 0,
        ..request(&hold_ref, terms)
    };
    assert_eq!(other.accept_grant(7).await, None);
    let end = Instant::now() + terms.lease.duration();
    assert_eq!(request(&hold_ref, terms).accept_grant(7).await, Some(end));
    assert_eq!(request(&hold_ref, terms).accept_grant(7).await, None);
    assert_eq!(
        (hold_ref.hold.state().count, hold_ref.session.watchdog.len()),
        (1, 1)
    );
    tokio::time::sleep(10 * terms.lease.duration()).await;
    assert!(!hold_ref.hold.valid_for().is_zero());
    hold_ref.remove_guard(terms);
    assert!(hold_ref.settle().await.unwrap());
    assert!(!lock.is_locked().await.unwrap());
}

/// The message arrives after another task has given up for the same owner, and the lock has been released.
#[tokio::test(start_paused = true)]
async fn grant_before_release_is_not_accepted() {
    let (lock, hold_ref, terms) = granted_request(None).await;
    assert!(hold_ref.settle().await.unwrap());
    assert!(!lock.is_locked().await.unwrap());
    assert_eq!(request(&hold_ref, terms).accept_grant(7).await, None);
    assert_eq!(hold_ref.hold.state().count, 0);
}

/// The message arrives after the next attempt, which has found the hold.
#[tokio::test(start_paused = true)]
async fn grant_before_next_attempt_counts_once() {
    let (lock, hold_ref, terms) = granted_request(None).await;
    assert!(attempt(&hold_ref, terms).await);
    assert_eq!(request(&hold_ref, terms).accept_grant(7).await, None);
    assert_eq!(hold_ref.hold.state().count, 1);
    let owner = hold_ref.hold.owner;
    assert_eq!(lock.hold_count(owner).await.unwrap(), 1);
    hold_ref.remove_guard(terms);
    assert!(hold_ref.settle().await.unwrap());
    assert!(!lock.is_locked().await.unwrap());
}

/// The replicas have to confirm the hold, so an attempt is necessary. If the attempt was sent twice, the store may have
/// granted the lock to the first, long before the second was sent.
#[tokio::test(start_paused = true)]
async fn grant_to_unconfirmed_or_repeated_attempt_is_not_accepted() {
    for answer in [Unconfirmed, Repeated] {
        let (_lock, hold_ref, terms) = granted_request(Some(answer)).await;
        assert_eq!(request(&hold_ref, terms).accept_grant(7).await, None);
        assert!(attempt(&hold_ref, terms).await);
    }
}

/// Otherwise it would have to be renewed at once.
#[tokio::test(start_paused = true)]
async fn grant_is_accepted_while_third_of_lease_is_left() {
    for (passed, is_accepted) in [(20_000, true), (20_001, false)] {
        let (_lock, hold_ref, terms) = granted_request(None).await;
        tokio::time::advance(Duration::from_millis(passed)).await;
        let end = request(&hold_ref, terms).accept_grant(7).await;
        assert_eq!(end.is_some(), is_accepted, "{passed}");
        assert_eq!(hold_ref.hold.state().count, u32::from(is_accepted));
    }
}

/// How the object of a test is acquired.
#[derive(Debug, Clone, Copy)]
enum Path {
    Attempt,
    Grant,
    StoreHandoff,
}

/// The store has granted it and lost its data, and the client has checked its other holds, before its task sees the answer.
#[tokio::test(start_paused = true)]
async fn hold_that_gets_its_guard_after_a_sweep_is_checked() {
    let mut unnoticed = Vec::new();
    for (path, has_other_hold) in [
        (Path::Attempt, true),
        (Path::Attempt, false),
        (Path::Grant, true),
        (Path::Grant, false),
        (Path::StoreHandoff, false),
    ] {
        let (store, client) = client();
        let peer = Client::builder().connect_embedded(&store).unwrap();
        let session = client.session.clone();
        let lease = 600 * SECOND;
        let other = client.lock("other");
        let other = match has_other_hold {
            true => Some(other.lock().lease(lease).await.unwrap()),
            false => None,
        };
        let lock = match path {
            Path::Grant => client.fair_lock("a").erased(),
            _ => client.lock("a").erased(),
        };
        let hold_ref = lock.hold_ref(Owner::new()).unwrap();
        let terms = session.terms(None, true);
        let lock = client.lock("a");
        let requested = lock.lock().lease(lease).owner(hold_ref.hold.owner);
        let requested = requested.into_future();
        let acquiring = match path {
            Path::Attempt => {
                store.delay_answers([SECOND]);
                let acquiring = tokio::spawn(requested);
                run_others().await;
                Some(acquiring)
            }
            Path::Grant => {
                let held = peer.fair_lock("a").lock().await.unwrap();
                assert!(!attempt(&hold_ref, terms).await);
                held.unlock().await.unwrap();
                None
            }
            Path::StoreHandoff => {
                let held = lock.lock().await.unwrap();
                let acquiring = tokio::spawn(requested);
                run_others().await;
                held.unlock().await.unwrap();
                Some(acquiring)
            }
        };
        store.remove("a");
        session.watchdog.report_missing(&hold_ref.hold);
        // Before other tasks run.
        tokio::time::advance(Duration::from_millis(1)).await;
        run_others().await;
        let guard = match acquiring {
            Some(acquiring) => Some(acquiring.await.unwrap().unwrap()),
            None => {
                let end = request(&hold_ref, terms).accept_grant(7).await;
                assert!(end.is_some());
                None
            }
        };
        let lost = tokio::time::timeout(2 * SECOND, hold_ref.hold.lost()).await;
        if lost.is_err() {
            unnoticed.push((path, has_other_hold));
        }
        drop((guard, other));
    }
    assert!(unnoticed.is_empty(), "{unnoticed:?}");
}

/// Lets the store acquire the object of a hold, as by an attempt of which the answer is lost.
async fn acquired_without_answer(hold_ref: &HoldRef) {
    let terms = hold_ref.session.terms(None, true);
    let step = RequestedHold::without_waiting(&*hold_ref.hold.kind, hold_ref, terms).step(0);
    let acquired = hold_ref.session.store.run_idempotent(&step).await;
    assert_eq!(acquired.unwrap(), Outcome::ACQUIRED);
}

/// The first execution acquired all. Before it is repeated, another owner gets the second lock, or its key another kind.
#[tokio::test(start_paused = true)]
async fn members_behind_the_one_that_refuses_a_repetition_are_released() {
    for is_other_kind in [false, true] {
        let (store, [client, other]) = clients();
        let locks = ["a", "b", "c"].map(|name| client.lock(name));
        let me = Owner::new();
        for lock in &locks {
            acquired_without_answer(&lock.erased().hold_ref(me).unwrap()).await;
        }
        let _theirs = stolen(&other.lock("b")).await;
        if is_other_kind {
            assert!(other.lock("b").force_unlock().await.unwrap());
            other.semaphore("b").try_set_permits(1).await.unwrap();
        }
        store.fail([Repeated]);
        let refused = MultiLock::new(&locks).try_lock().owner(me).await;
        assert_eq!(
            refused.map(|none| none.is_none()).ok(),
            (!is_other_kind).then_some(true)
        );
        client.flush().await;
        for lock in [&locks[0], &locks[2]] {
            assert!(!lock.is_locked().await.unwrap(), "{}", lock.name());
        }
    }
}

/// The next attempt of the request has the turn, and may wait for a permit: those of all attempts would wait for its turn.
#[tokio::test(start_paused = true)]
async fn settling_keeps_its_permit_unless_it_waits_for_the_turn() {
    for waits in [true, false] {
        let (store, client) = client();
        let permits = Arc::new(tokio::sync::Semaphore::new(1));
        let permit = permits.clone().try_acquire_owned().ok();
        let hold_ref = client.lock("a").erased().hold_ref(Owner::new()).unwrap();
        let turn = waits.then(|| hold_ref.hold.try_turn().unwrap());
        store.delay_answers(Some(SECOND));
        let change = u64::MAX;
        let attempt = OpenAttempt { change, permit };
        hold_ref.clone().settle_detached(SECOND, Some(attempt));
        run_others().await;
        assert_eq!(permits.available_permits(), usize::from(waits));
        drop(turn);
        client.flush().await;
        assert_eq!(permits.available_permits(), 1);
    }
}

/// The other guard, which has a minimum time, is dropped before the second one is granted.
#[tokio::test(start_paused = true)]
async fn minimum_time_counts_for_a_guard_that_was_requested_before_it_began_to_count() {
    let (store, [client, other]) = clients();
    let (lock, me) = (client.lock("a"), Owner::new());
    let begun = Instant::now();
    let guard = lock.lock().owner(me).at_least(60 * SECOND).await.unwrap();
    store.delay_answers([SECOND]);
    let again = tokio::spawn(lock.lock().owner(me).into_future());
    run_others().await;
    drop(guard);
    again.await.unwrap().unwrap().unlock().await.unwrap();
    client.flush().await;
    drop(other.lock("a").lock().await.unwrap());
    assert!(begun.elapsed() >= 60 * SECOND);
}

/// The first execution put it into the queue. Before it is repeated, the key gets another kind.
#[tokio::test(start_paused = true)]
async fn waiter_whose_repetition_fails_leaves_the_queue() {
    let (store, [client, other]) = clients();
    let (lock, me) = (client.fair_lock("a"), Owner::new());
    let _theirs = other.fair_lock("a").lock().await.unwrap();
    let hold_ref = lock.erased().hold_ref(me).unwrap();
    let requested = request(&hold_ref, hold_ref.session.terms(None, true));
    let waits = client
        .session
        .store
        .run_idempotent(&requested.step(0))
        .await;
    assert!(matches!(waits, Ok(Outcome::Wait(_))));
    drop(hold_ref);
    assert!(other.lock("a").force_unlock().await.unwrap());
    let semaphore = other.semaphore("a");
    semaphore.try_set_permits(1).await.unwrap();
    store.fail([Repeated]);
    let refused = lock.lock().owner(me).await;
    assert!(matches!(refused, Err(Error::WrongKind { .. })));
    client.flush().await;
    semaphore.delete().await.unwrap();
    assert_eq!(lock.queue().await.unwrap(), []);
}

/// The first execution acquired two permits. Before it is repeated, another client releases one of them and acquires it.
#[tokio::test(start_paused = true)]
async fn rest_of_permits_is_released_if_a_repetition_is_refused() {
    let (store, [client, other]) = clients();
    let permits = client.expirable_semaphore("a").permits(2);
    let theirs = other.expirable_semaphore("a");
    let kind = permits.acquire_many(2).await.unwrap().handle();
    client.flush().await;
    let hold_ref = kind.erased().hold_ref(Owner::anonymous()).unwrap();
    acquired_without_answer(&hold_ref).await;
    let id = theirs.held_permits().await.unwrap()[0].id;
    theirs.release(id).await.unwrap();
    let _theirs = theirs.acquire().await.unwrap();
    store.fail([Repeated]);
    assert!(!attempt(&hold_ref, hold_ref.session.terms(None, true)).await);
    client.flush().await;
    assert_eq!(theirs.available().await.unwrap(), 1);
}

/// The watchdog releases them. The limit may pass after the caller has looked.
#[tokio::test(start_paused = true)]
async fn permits_are_not_left_to_a_caller_at_their_limit() {
    let client = Client::embedded();
    let permits = client.expirable_semaphore("a").permits(1);
    let guard = permits.acquire().at_most(SECOND).await.unwrap();
    let (hold_ref, terms) = (guard.hold_ref(), guard.terms());
    tokio::time::advance(SECOND).await;
    assert!(hold_ref.leave_guard(terms).is_err());
    assert_eq!(hold_ref.hold.state().count, 1);
    drop(guard);
    client.flush().await;
    assert_eq!(permits.available().await.unwrap(), 1);
}

/// A guard that is lost at its limit of ten seconds, and the error that says so.
async fn limited(client: &Client, owner: Owner) -> Guard {
    let request = client.lock("a").lock().owner(owner);
    request.at_most(10 * SECOND).await.unwrap()
}

/// A release of the lost hold that comes late, after the same owner has acquired the lock again.
#[tokio::test(start_paused = true)]
async fn release_at_limit_keeps_later_hold_of_owner() {
    let (client, me) = (Client::embedded(), Owner::new());
    let hanging = limited(&client, me).await;
    let session = session(&hanging).clone();
    let lost = hanging.hold_ref().hold.clone();
    hanging.lost().await;
    let again = client.lock("a").lock().owner(me).await.unwrap();
    let late = session.any_ref(&lost).unwrap();
    assert!(matches!(late.settle().await, Err(Error::Lost { .. })));
    drop(late);
    assert!(again.is_valid() && client.lock("a").is_held_by(me).await.unwrap());
    // The guard of the lost hold keeps its registry entry; without one, another hold does not take turns with it.
    drop(again);
    drop(hanging);
    client.flush().await;
    let again = client.lock("a").lock().owner(me).await.unwrap();
    assert!(session.any_ref(&lost).is_none());
    assert!(session.any_ref(&again.hold_ref().hold).is_some());
}

/// The attempt holds the turn, so the release comes behind it.
#[tokio::test(start_paused = true)]
async fn release_at_limit_waits_for_step_in_flight() {
    let (client, me) = (Client::embedded(), Owner::new());
    let hanging = limited(&client, me).await;
    let turn = hanging.hold_ref().hold.turn().await.unwrap();
    hanging.lost().await;
    tokio::time::sleep(SECOND).await;
    assert!(client.lock("a").is_locked().await.unwrap());
    drop(turn);
    client.flush().await;
    assert!(!client.lock("a").is_locked().await.unwrap());
}

/// The store cannot be reached at the limit: the release is retried, and the lease is not renewed any more.
#[tokio::test(start_paused = true)]
async fn release_at_limit_is_retried_in_outage() {
    for fails in [3, 1000] {
        let (store, client) = client();
        let peer = Client::builder().connect_embedded(&store).unwrap();
        let hanging = limited(&client, Owner::new()).await;
        let begun = Instant::now();
        tokio::time::sleep(9 * SECOND).await;
        store.fail(vec![NotSent; fails]);
        hanging.lost().await;
        assert_eq!(begun.elapsed().as_secs(), 10);
        tokio::time::sleep(2 * SECOND).await;
        let is_released = fails < 100;
        if is_released {
            assert!(!peer.lock("a").is_locked().await.unwrap());
        } else {
            let left = 60 * SECOND;
            tokio::time::sleep(left).await;
            store.recover();
            assert!(!peer.lock("a").is_locked().await.unwrap(), "it was renewed");
        }
        assert_eq!(client.status().holds, 0);
    }
}

/// It has not been sent when the limit is reached.
#[tokio::test(start_paused = true)]
async fn partial_release_that_waits_at_limit_becomes_full_release() {
    let (client, me) = (Client::embedded(), Owner::new());
    let outer = limited(&client, me).await;
    let inner = outer.reenter().await.unwrap();
    let turn = outer.hold_ref().hold.turn().await.unwrap();
    let releasing = tokio::spawn(inner.unlock());
    tokio::time::sleep(10 * SECOND).await;
    assert!(!outer.is_valid());
    drop(turn);
    assert!(matches!(releasing.await.unwrap(), Err(Error::Lost { .. })));
    client.flush().await;
    assert!(!client.lock("a").is_locked().await.unwrap());
    assert_eq!(client.status().holds, 0);
}
