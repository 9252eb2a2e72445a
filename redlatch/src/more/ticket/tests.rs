//! Tickets on the embedded store, whose failures are injected, with a paused clock.

use std::future::Future;
use std::time::Duration;

use proptest::prelude::*;
use tokio::task::yield_now;

use super::{HasTicket, Ticket, TicketKind};
use crate::error::{Error, TicketRefusal};
use crate::hold::{Handoff, HandoffParams, To};
use crate::lease::Lease;
use crate::store::embedded::failure_injection::Failure::{
    NoAnswer, NoEffect, NotSent, Repeated, Unconfirmed,
};
use crate::test_prelude::{SECOND, clients};
use crate::{Client, Guard, Lock, MAX_TOKEN, Owner};

/// The lease of the watchdog.
const WATCHDOG: Duration = Duration::from_secs(30);

async fn ticket_of<K: HasTicket>(lock: &Lock<K>) -> Ticket {
    lock.lock().await.unwrap().into_ticket().await.unwrap()
}

/// Returns why a ticket is refused.
fn refusal<T: std::fmt::Debug>(result: Result<T, Error>) -> TicketRefusal {
    match result.unwrap_err() {
        Error::TicketRefused { reason, .. } => reason,
        other => panic!("{other}"),
    }
}

fn held_by(owner: impl Into<String>) -> TicketRefusal {
    let owner = owner.into();
    TicketRefusal::HeldBy { owner }
}

/// Polls a future until it waits, and drops it.
async fn cancel_when_it_waits(future: impl Future) {
    tokio::select! {
        biased;
        _ = future => panic!("it has ended"),
        () = yield_now() => {}
    }
}

/// The limits of the guard end with it.
#[tokio::test(start_paused = true)]
async fn ticket_of_a_limited_hold_has_the_rest_of_its_lease() {
    let (_, [first, second]) = clients();
    let request = || first.lock("a").lock().lease(60 * SECOND);
    for request in [
        request().fed_every(5 * SECOND),
        request().at_most(5 * SECOND),
    ] {
        let guard = request.await.unwrap();
        let ticket = guard.into_ticket().await.unwrap();
        tokio::time::sleep(20 * SECOND).await;
        let guard = second.lock("a").adopt(&ticket).await.unwrap();
        guard.unlock().await.unwrap();
    }
}

/// The lock stays held, the first process has nothing to renew, and the second renews the hold.
async fn hold_moves<K: HasTicket>(lock_of: impl Fn(&Client) -> Lock<K>) {
    let (_, [first, second]) = clients();
    let guard = lock_of(&first).lock().await.unwrap();
    let token = guard.held.token;
    let lost = guard.lost();
    let ticket = guard.into_ticket().await.unwrap();
    assert_eq!((ticket.kind(), ticket.name()), (K::TICKET_KIND, "a"));
    assert_eq!(
        (ticket.lease(), ticket.token()),
        (WATCHDOG, K::HAS_TOKEN.then_some(token))
    );
    assert_eq!(first.status(), Client::embedded().status());
    let holder = lock_of(&second).holder().await.unwrap().unwrap();
    assert_eq!((holder.owner, holder.holds), (ticket.owner_id(), 1));
    assert!(lock_of(&first).try_lock().await.unwrap().is_none());

    tokio::time::sleep(WATCHDOG - SECOND).await;
    let adopted = lock_of(&second).adopt(&ticket).await.unwrap();
    assert_eq!(adopted.valid_for(), WATCHDOG);
    assert_eq!(adopted.held.token, token);
    assert!(!lock_of(&second).is_held_by(Owner::new()).await.unwrap());
    tokio::time::sleep(10 * WATCHDOG).await;
    assert!(adopted.is_valid() && lock_of(&first).is_locked().await.unwrap());
    let again = adopted.reenter().await.unwrap();
    adopted.unlock().await.unwrap();
    assert!(again.is_valid());
    again.unlock().await.unwrap();
    assert!(!lock_of(&first).is_locked().await.unwrap());
    assert!(
        tokio::time::timeout(SECOND, lost).await.is_err(),
        "it was not lost"
    );
}

#[tokio::test(start_paused = true)]
async fn holds_of_all_kinds_move() {
    hold_moves(|client| client.lock("a")).await;
    hold_moves(|client| client.fair_lock("a")).await;
    hold_moves(|client| client.fenced_lock("a")).await;
    hold_moves(|client| client.spin_lock("a")).await;
    hold_moves(|client| client.read_write_lock("a").write()).await;
}

/// (a) Two processes adopt one ticket.
#[tokio::test(start_paused = true)]
async fn ticket_is_adopted_once() {
    let (_, [first, second]) = clients();
    let ticket = ticket_of(&first.lock("a")).await;
    let (one, other) = (first.lock("a"), second.lock("a"));
    let (one, other) = tokio::join!(one.adopt(&ticket), other.adopt(&ticket));
    let (adopted, refused) = match one {
        Ok(adopted) => (adopted, other),
        refused => (other.unwrap(), refused),
    };
    assert_eq!(refusal(refused), held_by(adopted.owner_id()));
    // The same process and task once more.
    for client in [&first, &second] {
        let refused = client.lock("a").adopt(&ticket).await;
        assert_eq!(refusal(refused), held_by(adopted.owner_id()));
    }
    adopted.unlock().await.unwrap();
    let refused = first.lock("a").adopt(&ticket).await;
    assert_eq!(refusal(refused), TicketRefusal::Free);
    assert!(!first.lock("a").is_locked().await.unwrap());
}

/// (a) Two tasks adopt a ticket while an earlier adoption is not settled yet: they have the same owner.
#[tokio::test(start_paused = true)]
async fn tasks_with_one_owner_adopt_ticket_once() {
    let (store, [client, _]) = clients();
    let lock = client.lock("a");
    let ticket = ticket_of(&lock).await;
    store.fail([NoAnswer]);
    lock.adopt(&ticket).await.unwrap_err();
    let (one, other) = tokio::join!(lock.adopt(&ticket), lock.adopt(&ticket));
    let guard = one.unwrap();
    assert_eq!(guard.hold_count(), 1);
    assert_eq!(refusal(other), held_by(guard.owner_id()));
    guard.unlock().await.unwrap();
}

/// Its replicas may take over before it is renewed again.
#[tokio::test(start_paused = true)]
async fn renewal_of_ticket_is_confirmed_by_replicas() {
    let (store, [client, _]) = clients();
    let lock = client.lock("a");
    let ticket = ticket_of(&lock).await;
    store.fail([Unconfirmed]);
    assert!(
        lock.renew_ticket(&ticket, SECOND)
            .await
            .unwrap_err()
            .is_transient()
    );
    lock.renew_ticket(&ticket, SECOND).await.unwrap();
}

/// (b) The owner that was moved is not the holder: it waits as others do.
#[tokio::test(start_paused = true)]
async fn former_owner_waits_for_ticket() {
    let (_, [client, other]) = clients();
    let (lock, me) = (client.lock("a"), Owner::new());
    let guard = lock.lock().owner(me).await.unwrap();
    let reenter = guard.reenter();
    let ticket = guard.into_ticket().await.unwrap();
    assert_eq!(lock.hold_count(me).await.unwrap(), 0);
    assert!(lock.try_lock().owner(me).await.unwrap().is_none());
    let (waited, ()) = tokio::join!(reenter, async {
        yield_now().await;
        other.lock("a").unlock_ticket(&ticket).await.unwrap();
    });
    assert_eq!(waited.unwrap().hold_count(), 1);
}

/// (b, f) A renewal that is in flight when the ticket is made arrives late, and so does a release.
#[tokio::test(start_paused = true)]
async fn late_steps_of_former_owner_do_not_affect_ticket() {
    let (_, [client, other]) = clients();
    let lock = client.lock("a");
    let guard = lock.lock().await.unwrap();
    let hold = guard.hold_ref().hold.clone();
    let ticket = guard.into_ticket_for(SECOND).await.unwrap();
    let renew = crate::watchdog::renew_holds(
        hold.kind.renewal(&hold).script,
        Some(Lease::WATCHDOG),
        &[&hold],
    );
    let renewed = client.session.store.run_idempotent(&renew).await.unwrap();
    assert!(!renewed[0].is_held());
    let release = hold.kind.release(crate::hold::ReleaseParams {
        hold: &hold,
        keep: 0,
        lease: None,
    });
    let released = client.session.store.run_idempotent(&release).await;
    assert!(!released.unwrap());
    let holder = lock.holder().await.unwrap().unwrap();
    assert_eq!(holder.owner, ticket.owner_id());
    assert_eq!(holder.remaining.duration(), Some(SECOND));
    other
        .lock("a")
        .adopt(&ticket)
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
}

/// (c) The lease of a ticket has ended, and the lock is free or has another holder.
#[tokio::test(start_paused = true)]
async fn late_ticket_is_refused() {
    let (_, [client, other]) = clients();
    let (lock, me) = (client.lock("a"), Owner::new());
    for holder in [None, Some(&other), Some(&client)] {
        let guard = lock.lock().owner(me).await.unwrap();
        let ticket = guard.into_ticket_for(SECOND).await.unwrap();
        tokio::time::sleep(SECOND).await;
        let guard = match holder {
            Some(client) => Some(client.lock("a").lock().owner(me).await.unwrap()),
            None => None,
        };
        let expected = match &guard {
            Some(guard) => held_by(guard.owner_id()),
            None => TicketRefusal::Free,
        };
        assert_eq!(refusal(lock.adopt(&ticket).await), expected);
        // As the owner that holds it again.
        assert_eq!(refusal(me.scope(lock.adopt(&ticket)).await), expected);
        assert_eq!(refusal(lock.renew_ticket(&ticket, SECOND).await), expected);
        assert_eq!(refusal(lock.unlock_ticket(&ticket).await), expected);
        if let Some(guard) = guard {
            assert!(guard.is_valid());
            guard.unlock().await.unwrap();
        }
    }
}

/// (c) Another hold became a ticket, or the secret is wrong.
#[tokio::test(start_paused = true)]
async fn other_ticket_of_same_lock_is_refused() {
    let (_, [client, _]) = clients();
    let lock = client.fenced_lock("a");
    let ticket = ticket_of(&lock).await;
    let text = ticket.to_string();
    let changed = |part: usize, to: &str| -> Ticket {
        let mut parts: Vec<&str> = text.split('.').collect();
        parts[part] = to;
        parts.join(".").parse().unwrap()
    };
    let zeros = "0".repeat(32);
    for (part, to) in [(3, "2"), (4, "30001"), (5, &*zeros)] {
        let forged = changed(part, to);
        assert_eq!(
            refusal(lock.adopt(&forged).await),
            TicketRefusal::OtherTicket
        );
        let renewed = lock.renew_ticket(&forged, SECOND).await;
        assert_eq!(refusal(renewed), TicketRefusal::OtherTicket);
        let released = lock.unlock_ticket(&forged).await;
        assert_eq!(refusal(released), TicketRefusal::OtherTicket);
    }
    assert_eq!(lock.adopt(&ticket).await.unwrap().token(), 1);
}

#[tokio::test(start_paused = true)]
async fn ticket_of_other_lock_is_invalid() {
    let (_, [client, _]) = clients();
    let ticket = ticket_of(&client.lock("a")).await;
    let wrong_name = client.lock("b").adopt(&ticket).await.unwrap_err();
    let wrong_kind = client.spin_lock("a").adopt(&ticket).await.unwrap_err();
    for (error, part) in [(wrong_name, "\"a\""), (wrong_kind, "`lock`")] {
        assert!(matches!(&error, Error::InvalidTicket { reason } if reason.contains(part)));
    }
    // Only kinds whose tickets have a token can have one.
    let text = ticket.to_string().replace(".lock.", ".fenced.");
    assert!(text.parse::<Ticket>().is_err());
}

/// (d) The answer to an adoption is lost. Whether it took effect or not, the same client succeeds with the next one, and
/// meanwhile no other.
#[tokio::test(start_paused = true)]
async fn adoption_without_answer_can_be_repeated() {
    for (failure, in_scope) in [NoAnswer, NoEffect, NotSent, Unconfirmed]
        .into_iter()
        .flat_map(|failure| [(failure, false), (failure, true)])
    {
        let (store, [first, second]) = clients();
        let ticket = ticket_of(&first.fenced_lock("a")).await;
        let (lock, me) = (second.fenced_lock("a"), Owner::new());
        let adopt = async || match in_scope {
            true => me.scope(lock.adopt(&ticket)).await,
            false => lock.adopt(&ticket).await,
        };
        store.fail([failure]);
        let error = adopt().await.unwrap_err();
        assert!(error.is_transient(), "{failure:?}: {error}");
        let adopted = adopt().await.unwrap();
        assert_eq!((adopted.token(), adopted.hold_count()), (1, 1));
        let refused = first.fenced_lock("a").adopt(&ticket).await;
        assert_eq!(refusal(refused), held_by(adopted.owner_id()));
        tokio::time::sleep(2 * WATCHDOG).await;
        assert!(adopted.is_valid(), "no late step affects it");
        adopted.unlock().await.unwrap();
        assert!(!lock.is_locked().await.unwrap());
    }
}

/// (d) The step of an adoption is sent twice, because the connection broke.
#[tokio::test(start_paused = true)]
async fn repeated_step_of_adoption_succeeds() {
    let (store, [first, second]) = clients();
    let ticket = ticket_of(&first.lock("a")).await;
    store.fail([Repeated]);
    let adopted = second.lock("a").adopt(&ticket).await.unwrap();
    assert!(adopted.is_valid());
    // Also if the first one took effect.
    let hold = adopted.hold_ref().hold.clone();
    let of_ticket = second.lock("a").ticket_hold(&ticket).unwrap();
    let step = hold.kind.handoff(HandoffParams {
        from: &of_ticket,
        successor: &hold.field,
        lease: Lease::WATCHDOG,
        to: To::Adopter,
    });
    let store = &second.session.store;
    let handed_off = store.run_idempotent(&step.unwrap()).await.unwrap();
    assert_eq!(handed_off, Handoff::Done { token: 0 });
    adopted.unlock().await.unwrap();
    assert!(!first.lock("a").is_locked().await.unwrap());
}

/// (d) The lease counts from when the step was sent last, here and in the store.
#[tokio::test(start_paused = true)]
async fn repeated_step_of_adoption_extends_lease() {
    let (_, [client, _]) = clients();
    let lock = client.lock("a");
    let of_ticket = lock.ticket_hold(&ticket_of(&lock).await).unwrap();
    for _ in 0..3 {
        let step = of_ticket.kind.handoff(HandoffParams {
            from: &of_ticket,
            successor: "other:7",
            lease: Lease::WATCHDOG,
            to: To::Adopter,
        });
        let store = &client.session.store;
        let handed_off = store.run_idempotent(&step.unwrap()).await.unwrap();
        assert_eq!(handed_off, Handoff::Done { token: 0 });
        let remaining = lock.remaining_lease().await.unwrap();
        assert_eq!(remaining.and_then(|left| left.duration()), Some(WATCHDOG));
        tokio::time::sleep(20 * SECOND).await;
    }
}

/// A step that wrote the owner of the scope before the adoption is no adoption.
#[tokio::test(start_paused = true)]
async fn owner_of_scope_does_not_adopt() {
    let (_, [client, other]) = clients();
    let (lock, me) = (client.lock("a"), Owner::new());
    let ticket = ticket_of(&lock).await;
    other.lock("a").unlock_ticket(&ticket).await.unwrap();
    let held = lock.lock().owner(me).await.unwrap();
    let refused = me.scope(lock.adopt(&ticket)).await;
    assert_eq!(refusal(refused), held_by(client.owner_id(me)));
    held.unlock().await.unwrap();
    let ticket = ticket_of(&lock).await;
    let adopted = me.scope(lock.adopt(&ticket)).await.unwrap();
    assert_ne!(adopted.owner(), me);
    assert!(lock.try_lock().owner(me).await.unwrap().is_none());
    adopted.unlock().await.unwrap();
}

/// A canceled request of the owner of a refused adoption is settled by a release, and revives no ticket.
#[test]
fn settled_adoption_is_forgotten() {
    let hold = crate::step::differential::hold(1, crate::kind::Reentrant::new("", "a"));
    let adopts = || {
        Some(Box::new(crate::hold::TicketHold {
            field: "ticket-0:0".into(),
            lease: Lease::WATCHDOG,
        }))
    };
    let mut state = hold.state();
    let refused = state.ledger.begin_attempt();
    state.adopts = adopts();
    state.attempt_answered(refused);
    assert!(state.adopts.is_none());
    let canceled = state.ledger.begin_attempt();
    state.adopts = adopts();
    state.ledger.begin_attempt();
    state.attempt_answered(canceled);
    assert!(state.adopts.is_some());
    let changes = state.ledger.latest();
    state.release_answered(changes, true);
    assert!(state.adopts.is_none());
}

/// (d) A failed adoption gives the hold back, so that any process can adopt the ticket, with its own lease.
#[tokio::test(start_paused = true)]
async fn failed_adoption_gives_hold_back() {
    for failures in [
        vec![NoAnswer],
        vec![NoAnswer, NoAnswer, NoAnswer],
        vec![Unconfirmed],
    ] {
        let (store, [first, second]) = clients();
        let lock = first.lock("a");
        let guard = lock.lock().await.unwrap();
        let ticket = guard.into_ticket_for(10 * WATCHDOG).await.unwrap();
        store.fail(failures);
        second.lock("a").adopt(&ticket).await.unwrap_err();
        second.flush().await;
        assert_eq!(second.status(), Client::embedded().status());
        let holder = lock.holder().await.unwrap().unwrap();
        assert_eq!(holder.owner, ticket.owner_id());
        assert!(holder.remaining.duration() > Some(9 * WATCHDOG));
        let adopted = lock.adopt(&ticket).await.unwrap();
        adopted.unlock().await.unwrap();
    }
}

/// A revoked ticket whose adoption was refused, without an answer, ends no later than before.
#[tokio::test(start_paused = true)]
async fn unanswered_adoption_does_not_prolong_revoked_ticket() {
    let (store, [first, second]) = clients();
    let (lock, theirs) = (first.lock("a"), second.lock("a"));
    let ticket = ticket_of(&lock).await;
    tokio::time::sleep(20 * SECOND).await;
    lock.revoke(3 * SECOND).await.unwrap().unwrap();
    store.fail([NoAnswer]);
    theirs.adopt(&ticket).await.unwrap_err();
    second.flush().await;
    let holder = lock.holder().await.unwrap().unwrap();
    assert_eq!(holder.owner, ticket.owner_id());
    assert_eq!(holder.remaining.duration(), Some(WATCHDOG - 20 * SECOND));
}

/// The adopter is asked before it has its answer, and gives the hold back: then the ticket is asked for.
#[tokio::test(start_paused = true)]
async fn returned_ticket_has_the_request_for_its_adopter() {
    for limit in [None, Some(3 * SECOND), Some(Duration::ZERO)] {
        let (store, [first, second]) = clients();
        let (lock, theirs) = (first.lock("a"), second.lock("a"));
        let ticket = ticket_of(&lock).await;
        store.delay_answers([SECOND]);
        cancel_when_it_waits(async {
            let mut adopting = std::pin::pin!(theirs.adopt(&ticket));
            tokio::select! {
                biased;
                _ = &mut adopting => panic!("it was answered"),
                () = yield_now() => {}
            }
            let asked = match limit {
                None => lock.ask().await,
                Some(limit) => lock.revoke(limit).await,
            };
            assert!(asked.unwrap().is_some_and(|it| it != ticket.owner_id()));
            adopting.await
        })
        .await;
        second.flush().await;
        let holder = lock.holder().await.unwrap();
        if limit == Some(Duration::ZERO) {
            assert!(holder.is_none());
            continue;
        }
        let holder = holder.unwrap();
        assert_eq!(holder.owner, ticket.owner_id());
        let left = limit.unwrap_or(WATCHDOG);
        assert_eq!(holder.remaining.duration(), Some(left));
        let refused = theirs.adopt(&ticket).await.unwrap_err();
        assert!(
            matches!(refused, Error::Asked { left, .. } if left == limit),
            "{refused}"
        );
        second.flush().await;
        tokio::time::sleep(left).await;
        assert!(!lock.is_locked().await.unwrap());
    }
}

/// (e) An owner with several guards keeps them.
#[tokio::test(start_paused = true)]
async fn owner_with_several_guards_keeps_them() {
    let (_, [client, _]) = clients();
    let lock = client.lock("a");
    let outer = lock.lock().await.unwrap();
    let inner = outer.reenter().await.unwrap();
    let refused = inner.into_ticket().await.unwrap_err();
    assert!(matches!(refused.error(), Error::NotMovable { .. }));
    let inner = refused.into_guard().unwrap();
    assert!(inner.is_valid() && outer.is_valid());
    let holder = lock.holder().await.unwrap().unwrap();
    assert_eq!(holder.owner, inner.owner_id());
    inner.unlock().await.unwrap();
    let ticket = outer.into_ticket().await.unwrap();
    lock.unlock_ticket(&ticket).await.unwrap();
}

/// (e) The release of a guard that was dropped has no answer, and is sent again when the ticket exists.
#[tokio::test(start_paused = true)]
async fn dropped_guard_of_owner_does_not_affect_ticket() {
    let (store, [client, _]) = clients();
    let lock = client.lock("a");
    let outer = lock.lock().await.unwrap();
    let inner = outer.reenter().await.unwrap();
    store.fail([NoAnswer]);
    drop(inner);
    yield_now().await;
    let ticket = outer.into_ticket().await.unwrap();
    client.flush().await;
    let holder = lock.holder().await.unwrap().unwrap();
    assert_eq!((holder.owner, holder.holds), (ticket.owner_id(), 1));
}

/// (e) A writer that also reads would read while the adopter writes. Also if the store alone knows that.
#[tokio::test(start_paused = true)]
async fn writer_that_also_reads_keeps_its_guards() {
    let (store, [client, _]) = clients();
    let lock = client.read_write_lock("a");
    let writer = lock.write().lock().await.unwrap();
    let reader = writer.reenter_read().await.unwrap();
    let refused = writer.into_ticket().await.unwrap_err();
    assert!(matches!(refused.error(), Error::NotMovable { .. }));
    let writer = refused.into_guard().unwrap();
    assert!(writer.is_valid() && reader.is_valid());
    // The release of the reader is not known to have taken effect: it is sent once more.
    store.fail([NoEffect]);
    drop(reader);
    yield_now().await;
    let ticket = writer.into_ticket().await.unwrap();
    assert!(!lock.read().is_locked().await.unwrap());
    assert!(lock.write().adopt(&ticket).await.unwrap().is_valid());
}

#[tokio::test(start_paused = true)]
async fn hold_with_minimum_time_keeps_its_guard() {
    let (_, [client, _]) = clients();
    let lock = client.lock("a");
    let guard = lock.lock().at_least(SECOND).await.unwrap();
    let refused = guard.into_ticket().await.unwrap_err();
    let guard = refused.into_guard().unwrap();
    tokio::time::sleep(SECOND).await;
    let ticket = guard.into_ticket().await.unwrap();
    lock.unlock_ticket(&ticket).await.unwrap();
    assert!(!lock.is_locked().await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn lost_hold_becomes_no_ticket() {
    let (_, [client, other]) = clients();
    let lock = client.lock("a");
    for known in [true, false] {
        let guard = lock.lock().await.unwrap();
        let hold = guard.hold_ref().hold.clone();
        other.lock("a").force_unlock().await.unwrap();
        if known {
            hold.mark_lost(crate::Loss::NotHeld);
        }
        let held = other.lock("a").lock().await.unwrap();
        let refused = guard.into_ticket().await.unwrap_err();
        assert!(matches!(refused.error(), Error::Lost { .. }), "{refused}");
        assert!(refused.into_guard().is_none());
        client.flush().await;
        assert!(held.is_valid() && lock.is_locked().await.unwrap());
        held.unlock().await.unwrap();
    }
}

/// A ticket that was not confirmed is released, whether the store has it or not.
#[tokio::test(start_paused = true)]
async fn unknown_outcome_releases_owner_and_ticket() {
    for failures in [
        vec![NoAnswer],
        vec![NoEffect],
        vec![Unconfirmed],
        vec![NoAnswer, NoAnswer, NoAnswer, NoEffect],
    ] {
        let (store, [client, _]) = clients();
        let lock = client.lock("a");
        let guard = lock.lock().await.unwrap();
        store.fail(failures);
        let failed = guard.into_ticket_for(20 * WATCHDOG).await.unwrap_err();
        assert!(failed.error().is_transient());
        assert!(failed.into_guard().is_none());
        client.flush().await;
        assert!(!lock.is_locked().await.unwrap());
        assert_eq!(client.status(), Client::embedded().status());
    }
}

/// Nothing was sent, so the guard is as valid as before.
#[tokio::test(start_paused = true)]
async fn guard_survives_step_that_was_not_sent() {
    let (store, [client, _]) = clients();
    let lock = client.lock("a");
    let guard = lock.lock().await.unwrap();
    let refused = guard.into_ticket_for(Duration::ZERO).await.unwrap_err();
    assert!(matches!(refused.error(), Error::InvalidLease { .. }));
    let guard = refused.into_guard().unwrap();
    store.fail([NotSent]);
    let guard = guard.into_ticket().await.unwrap_err().into_guard().unwrap();
    tokio::time::sleep(2 * WATCHDOG).await;
    assert!(guard.is_valid());
    let ticket = guard.into_ticket().await.unwrap();
    lock.unlock_ticket(&ticket).await.unwrap();
}

/// A canceled re-entry may still arrive: what the store has must be settled before the hold moves.
#[tokio::test(start_paused = true)]
async fn refused_ticket_does_not_hide_unanswered_reentry() {
    let (store, [client, _]) = clients();
    let lock = client.lock("a");
    let guard = lock.lock().await.unwrap();
    let hold = guard.hold_ref().hold.clone();
    hold.state().ledger.begin_attempt();
    store.fail([NotSent]);
    let guard = guard.into_ticket().await.unwrap_err().into_guard().unwrap();
    assert!(hold.state().ledger.has_attempt_in_flight());
    let ticket = guard.into_ticket().await.unwrap();
    assert!(hold.state().ledger.is_settled());
    lock.unlock_ticket(&ticket).await.unwrap();
}

/// (f) Requests of the same client wait when the ticket is made, or when its making is canceled: none gets the hold.
#[tokio::test(start_paused = true)]
async fn ticket_passes_to_no_waiter() {
    let (_, [client, other]) = clients();
    let lock = client.lock("a");
    for canceled in [false, true] {
        let guard = lock.lock().await.unwrap();
        let (waiter, owner) = (lock.clone(), Owner::new());
        let named = tokio::spawn(async move { waiter.lock().owner(owner).await });
        let waiter = lock.clone();
        let unnamed = tokio::spawn(async move { waiter.lock().await });
        for _ in 0..20 {
            yield_now().await;
        }
        if canceled {
            let hold = guard.hold_ref().hold.clone();
            let turn = hold.turn().await.unwrap();
            cancel_when_it_waits(guard.into_ticket()).await;
            drop(turn);
        } else {
            let ticket = guard.into_ticket().await.unwrap();
            tokio::time::sleep(SECOND).await;
            assert!(!named.is_finished() && !unnamed.is_finished());
            let adopted = other.lock("a").adopt(&ticket).await.unwrap();
            tokio::time::sleep(SECOND).await;
            assert!(!named.is_finished() && !unnamed.is_finished());
            adopted.unlock().await.unwrap();
        }
        named.await.unwrap().unwrap().unlock().await.unwrap();
        unnamed.await.unwrap().unwrap().unlock().await.unwrap();
    }
}

/// (f) The ticket may be in the store, although its making has failed. So the guard that is dropped then passes its hold
/// to no waiter of the client: the waiter acquires the lock from the store.
#[tokio::test(start_paused = true)]
async fn guard_without_answer_passes_to_no_waiter() {
    for failure in [NoAnswer, NoEffect, Unconfirmed] {
        for owner in [None, Some(Owner::new())] {
            let (store, [client, _]) = clients();
            let lock = client.lock("a");
            let guard = lock.lock().await.unwrap();
            let hold = guard.hold_ref().hold.clone();
            let waiter = lock.clone();
            let waiting = tokio::spawn(async move {
                match owner {
                    Some(owner) => waiter.lock().owner(owner).await,
                    None => waiter.lock().await,
                }
            });
            for _ in 0..20 {
                yield_now().await;
            }
            store.fail([failure]);
            guard.into_ticket().await.unwrap_err();
            assert_eq!(hold.state().count, 0, "the guard was not offered");
            let next = waiting.await.unwrap().unwrap();
            assert_ne!(next.owner_id(), *hold.field);
            client.flush().await;
            let holder = lock.holder().await.unwrap().unwrap();
            assert_eq!(holder.owner, next.owner_id(), "{failure:?} {owner:?}");
            next.unlock().await.unwrap();
        }
    }
}

/// (f) An adopted hold passes on like any other, and each holder excludes the ticket.
#[tokio::test(start_paused = true)]
async fn adopted_hold_passes_to_waiter() {
    let (_, [client, _]) = clients();
    let lock = client.lock("a");
    let adopted = lock.adopt(&ticket_of(&lock).await).await.unwrap();
    let waiter = lock.clone();
    let waiting = tokio::spawn(async move { waiter.lock().await });
    yield_now().await;
    let ticket = adopted.into_ticket().await.unwrap();
    let adopted = lock.adopt(&ticket).await.unwrap();
    adopted.unlock().await.unwrap();
    let next = waiting.await.unwrap().unwrap();
    assert_eq!(refusal(lock.adopt(&ticket).await), held_by(next.owner_id()));
}

#[tokio::test(start_paused = true)]
async fn adopted_hold_reports_loss() {
    let (_, [first, second]) = clients();
    let ticket = ticket_of(&first.lock("a")).await;
    let adopted = second.lock("a").adopt(&ticket).await.unwrap();
    first.lock("a").force_unlock().await.unwrap();
    adopted.lost().await;
    assert!(matches!(adopted.unlock().await, Err(Error::Lost { .. })));
}

#[tokio::test(start_paused = true)]
async fn renewed_ticket_ends_later_and_never_earlier() {
    let (_, [client, _]) = clients();
    let lock = client.lock("a");
    let guard = lock.lock().lease(WATCHDOG).await.unwrap();
    tokio::time::sleep(10 * SECOND).await;
    let ticket = guard.into_ticket().await.unwrap();
    assert_eq!(ticket.lease(), 20 * SECOND);
    let remaining = async || {
        lock.remaining_lease()
            .await
            .unwrap()
            .and_then(|left| left.duration())
    };
    assert_eq!(remaining().await, Some(20 * SECOND));
    lock.renew_ticket(&ticket, SECOND).await.unwrap();
    assert_eq!(remaining().await, Some(20 * SECOND));
    lock.renew_ticket(&ticket, 60 * SECOND).await.unwrap();
    assert_eq!(remaining().await, Some(60 * SECOND));
    let bad = lock.renew_ticket(&ticket, Duration::ZERO).await;
    assert!(matches!(bad, Err(Error::InvalidLease { .. })));
}

#[tokio::test(start_paused = true)]
async fn released_ticket_wakes_waiter() {
    let (store, [client, other]) = clients();
    for failure in [None, Some(Repeated)] {
        let (lock, fair) = (client.fair_lock("a"), other.fair_lock("a"));
        let ticket = ticket_of(&lock).await;
        let waiting = tokio::spawn(async move { fair.lock().await });
        while lock.queue().await.unwrap().is_empty() {
            yield_now().await;
        }
        store.fail([failure]);
        lock.unlock_ticket(&ticket).await.unwrap();
        let begun = tokio::time::Instant::now();
        let guard: Guard<_> = waiting.await.unwrap().unwrap();
        assert!(begun.elapsed() < SECOND);
        guard.unlock().await.unwrap();
    }
}

/// The lease that waiters know of is far longer than that of the ticket, which nothing uses.
async fn waiter_learns_shorter_lease<K: HasTicket>(lock_of: impl Fn(&Client) -> Lock<K>) {
    let (_, [client, other]) = clients();
    let guard = lock_of(&client).lock().lease(100 * WATCHDOG).await.unwrap();
    let waiter = lock_of(&other);
    let waiting = tokio::spawn(async move { waiter.lock().await.map(drop) });
    for _ in 0..20 {
        yield_now().await;
    }
    let begun = tokio::time::Instant::now();
    guard.into_ticket_for(SECOND).await.unwrap();
    waiting.await.unwrap().unwrap();
    assert!((SECOND..2 * SECOND).contains(&begun.elapsed()));
}

#[tokio::test(start_paused = true)]
async fn waiters_learn_shorter_lease() {
    waiter_learns_shorter_lease(|client| client.lock("a")).await;
    waiter_learns_shorter_lease(|client| client.fair_lock("a")).await;
    waiter_learns_shorter_lease(|client| client.fenced_lock("a")).await;
    waiter_learns_shorter_lease(|client| client.read_write_lock("a").write()).await;
}

fn ticket() -> impl Strategy<Value = Ticket> {
    let names = prop_oneof!["[a-z]{1,9}", "\\PC{1,40}", "\\{[a-z.~%]{1,9}\\}.{0,9}"];
    let token = prop_oneof![Just(None), (0..=MAX_TOKEN + 1).prop_map(Some)];
    let leases = 1..=315_360_000_000u64;
    let valid = (names, token, 0..5usize, leases).prop_map(|(name, token, kind, lease)| {
        let kind = match token {
            Some(_) => TicketKind::Fenced,
            None => [
                TicketKind::Lock,
                TicketKind::Fair,
                TicketKind::Spin,
                TicketKind::Write,
            ][kind % 4],
        };
        let lease = Lease::new(Duration::from_millis(lease)).unwrap();
        Ticket::new(kind, &name, token, lease)
    });
    let has_valid_name =
        |ticket: &Ticket| Client::embedded().lock(ticket.name()).valid_kind().is_ok();
    valid.prop_filter("a valid name", has_valid_name)
}

proptest! {
    #[test]
    fn text_is_url_safe_and_parsed_to_same_ticket(ticket in ticket()) {
        let text = ticket.to_string();
        prop_assert!(text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-_~".contains(&byte)));
        prop_assert_eq!(text.parse::<Ticket>().unwrap(), ticket);
    }

    /// Any change is refused, or is another ticket, which another owner has.
    #[test]
    fn changed_text_is_other_ticket(ticket in ticket(), at in 0..999usize, to in any::<char>(), inserted: bool) {
        let text = ticket.to_string();
        let at = at % text.len();
        let rest = &text[at + usize::from(!inserted)..];
        let changed = format!("{}{to}{rest}", &text[..at]);
        match changed.parse::<Ticket>() {
            Ok(other) if changed != text => {
                prop_assert_ne!(other.owner_id(), ticket.owner_id());
                prop_assert_eq!(other.to_string(), changed);
            }
            Ok(same) => prop_assert_eq!(same, ticket),
            Err(error) => prop_assert!(matches!(error, Error::InvalidTicket { .. }), "unexpected error"),
        }
    }

    #[test]
    fn any_text_is_parsed_without_panic(text in ".{0,200}", parts in prop::collection::vec("[~.a-f0-9é-]{0,9}", 0..8)) {
        let parts = parts.join(".");
        for text in [text, format!("redlatch1.lock.{parts}"), format!("redlatch1.{parts}")] {
            if let Ok(ticket) = text.parse::<Ticket>() {
                prop_assert_eq!(ticket.to_string(), text);
            }
        }
    }
}

#[test]
fn malformed_texts_are_refused_with_reason() {
    let secret = "0123456789abcdef0123456789abcdef";
    let good = format!("redlatch1.lock.a~2Fb.-.30000.{secret}");
    let ticket: Ticket = good.parse().unwrap();
    assert_eq!((ticket.name(), ticket.lease()), ("a/b", WATCHDOG));
    assert!(!format!("{ticket:?}").contains(secret));
    let fenced = format!("redlatch1.fenced.a.7.1.{secret}");
    assert_eq!(fenced.parse::<Ticket>().unwrap().token(), Some(7));
    let long = "a".repeat(1665);
    for (text, reason) in [
        (String::new(), "malformed"),
        (long, "longer than 1664"),
        (format!(" {good}"), "malformed"),
        (format!("{good}\n"), "malformed"),
        (format!("{good}."), "malformed"),
        (good.replace("redlatch1", "redlatch2"), "another version"),
        (good.replace("redlatch1", "redlatch"), "malformed"),
        (good.replace(".lock.", ".read."), "malformed"),
        (good.replace(".lock.", ".LOCK."), "malformed"),
        (good.replace(".-.", ".7."), "malformed"),
        (good.replace(".lock.", ".fenced."), "malformed"),
        (fenced.replace(".7.", ".-."), "malformed"),
        (fenced.replace(".7.", ".07."), "malformed"),
        (fenced.replace(".7.", ".+7."), "malformed"),
        (fenced.replace(".7.", ".18446744073709551616."), "malformed"),
        (good.replace("a~2Fb", ""), "malformed"),
        (good.replace("~2F", "~2f"), "malformed"),
        (good.replace("~2F", "~2"), "malformed"),
        (good.replace("~2F", "~+F"), "malformed"),
        (good.replace("~2F", "~61"), "malformed"),
        (good.replace("~2F", "/"), "malformed"),
        (good.replace("~2F", "é"), "malformed"),
        (good.replace("~2F", "~FF"), "malformed"),
        (good.replace("~2F", "~00"), "malformed"),
        (good.replace("~2Fb", "~7Db"), "malformed"),
        (good.replace("~2F", &"a".repeat(512)), "malformed"),
        (good.replace(".30000.", ".0."), "malformed"),
        (good.replace(".30000.", ".-1."), "malformed"),
        (good.replace(".30000.", ".030000."), "malformed"),
        (good.replace(".30000.", ".315360000001."), "malformed"),
        (
            good.replace(".30000.", ".18446744073709551616."),
            "malformed",
        ),
        (good.replace("cdef", "CDEF"), "malformed"),
        (good.replace(secret, &secret[1..]), "malformed"),
        (good.replace(secret, ""), "malformed"),
    ] {
        match text.parse::<Ticket>() {
            Err(Error::InvalidTicket { reason: given }) => {
                assert!(given.contains(reason), "{text:?}: {given}");
            }
            other => panic!("{text:?}: {other:?}"),
        }
    }
}

#[test]
fn longest_name_fits() {
    let longest = Ticket::new(TicketKind::Fenced, &"/".repeat(512), Some(u64::MAX), {
        Lease::new(crate::MAX_LEASE).unwrap()
    });
    assert_eq!(longest.to_string().parse::<Ticket>().unwrap(), longest);
}

/// Invariant: what a queue learned before does not delay a later request. The former holder waited for the lock, made a ticket of
/// it, and requests it again, while others wait, too. The simulation found it.
#[tokio::test(start_paused = true)]
async fn former_holder_waits_no_longer_than_ticket() {
    let (_, [client, other]) = clients();
    let me = Owner::new();
    let (lock, first) = (client.fair_lock("a"), other.fair_lock("a"));
    let busy = first.lock().lease(100 * SECOND).await.unwrap();
    let waiting = {
        let lock = lock.clone();
        tokio::spawn(async move { lock.lock().owner(me).await })
    };
    while first.queue().await.unwrap().is_empty() {
        yield_now().await;
    }
    busy.unlock().await.unwrap();
    let guard = waiting.await.unwrap().unwrap();
    let _ticket = guard.into_ticket_for(SECOND).await.unwrap();
    let begun = tokio::time::Instant::now();
    let again = lock.lock().owner(me).await.unwrap();
    assert!(
        again.is_valid() && begun.elapsed() < 2 * SECOND,
        "{:?}",
        begun.elapsed()
    );
}
