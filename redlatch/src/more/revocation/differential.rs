//! The steps that know requests to release a lock against a real server: see [`crate::step::differential`].

use proptest::prelude::*;

use super::ask::ask;
use crate::Client;
use crate::hold::HoldKind;
use crate::hold::{AcquireParams, Hold};
use crate::locks::Reentrant;
use crate::locks::fair::Fair;
use crate::name::{KeyLayout, ObjectKeys};
use crate::session::check_handoff;
use crate::step::differential::{Differential, HandoffMove, assert_equivalent, hold, lease, time};

#[derive(Debug, Clone)]
enum Move {
    Ask {
        limit: Option<u32>,
    },
    Acquire {
        owner: u8,
        count: u32,
        lease: u32,
    },
    Release {
        owner: u8,
        keep: u32,
        lease: u32,
        again: bool,
    },
    Handoff {
        handoff: HandoffMove,
        again: bool,
    },
    /// An owner acquires the lock and is asked. Then a ticket or keeper takes its place, or the other way round.
    HandoffOfAsked {
        owner: u8,
        lease: u32,
        limit: Option<u32>,
        handoff: HandoffMove,
    },
    Renew {
        owner: u8,
        lease: u32,
    },
    CheckHandoff {
        owner: u8,
    },
    Advance {
        time: u32,
    },
    SetForeign {
        of_requests: bool,
    },
}

fn moves() -> impl Strategy<Value = Move> {
    let limits = || prop_oneof![Just(None), (0..4u32).prop_map(Some)];
    prop_oneof![
        3 => limits().prop_map(|limit| Move::Ask { limit }),
        4 => (0..3u8, 1..3u32, 1..5u32)
            .prop_map(|(owner, count, lease)| Move::Acquire { owner, count, lease }),
        2 => (0..3u8, 0..2u32, 0..4u32, any::<bool>())
            .prop_map(|(owner, keep, lease, again)| Move::Release { owner, keep, lease, again }),
        4 => (HandoffMove::any(), any::<bool>())
            .prop_map(|(handoff, again)| Move::Handoff { handoff, again }),
        3 => (0..3u8, 1..5u32, limits(), HandoffMove::to_no_waiter()).prop_map(|(owner, lease, limit, handoff)| {
            Move::HandoffOfAsked { owner, lease, limit, handoff }
        }),
        4 => (0..3u8, 0..5u32).prop_map(|(owner, lease)| Move::Renew { owner, lease }),
        1 => (0..3u8).prop_map(|owner| Move::CheckHandoff { owner }),
        3 => (1..4u32).prop_map(|time| Move::Advance { time }),
        1 => any::<bool>().prop_map(|of_requests| Move::SetForeign { of_requests }),
    ]
}

/// Compares the steps of one kind. `object`: the lock whose holder is asked.
fn assert_kind_equivalent<K: HoldKind + Clone>(object: &ObjectKeys, kind: &K) {
    assert_moves_equivalent(moves(), object, kind);
}

fn assert_moves_equivalent<K: HoldKind + Clone>(
    moves: impl Strategy<Value = Move>,
    object: &ObjectKeys,
    kind: &K,
) {
    let requests = object.requests_key();
    let of = |owner: u8, again: bool| -> Hold {
        let hold = hold(owner, kind.clone());
        hold.state().acquires_again = again;
        hold
    };
    assert_equivalent(
        moves,
        async |harness: &mut Differential, one: &Move| match one.clone() {
            Move::Ask { limit } => {
                let _ = harness.step(&ask(object, limit.map(time))).await;
            }
            Move::Acquire {
                owner,
                count,
                lease: n,
            } => {
                let hold = of(owner, false);
                let params = AcquireParams::without_waiting(&hold, count, lease(n));
                let _ = harness.step(&kind.acquire(params)).await;
            }
            Move::Release {
                owner,
                keep,
                lease: n,
                again,
            } => {
                let _ = harness.release(&of(owner, again), keep, n).await;
            }
            Move::Handoff { handoff, again } => {
                let _ = harness.handoff(&handoff, |owner| of(owner, again)).await;
            }
            Move::HandoffOfAsked {
                owner,
                lease: n,
                limit,
                handoff,
            } => {
                let hold = of(owner, false);
                let params = AcquireParams::without_waiting(&hold, 1, lease(n));
                let _ = harness.step(&kind.acquire(params)).await;
                let _ = harness.step(&ask(object, limit.map(time))).await;
                let _ = harness.handoff(&handoff, |owner| of(owner, false)).await;
            }
            Move::Renew { owner, lease: n } => {
                harness.renew(&of(owner, false), n).await;
            }
            Move::CheckHandoff { owner } => {
                // Other subscribers are those of the harness.
                harness.subscribe_only([object.channel().to_owned()]).await;
                let hold = Some(&of(owner, false));
                let _ = harness.step(&check_handoff(object, hold)).await;
            }
            Move::Advance { time: n } => harness.advance(time(n)).await,
            Move::SetForeign { of_requests: true } => harness.set_foreign(&requests, 5).await,
            Move::SetForeign { of_requests: false } => harness.set_foreign("name", 5).await,
        },
    );
}

#[test]
fn scripts_of_lock_match_rules() {
    let object = ObjectKeys::new(KeyLayout::Lock, "", "name");
    assert_kind_equivalent(&object, &Reentrant::new("", "name"));
}

#[test]
fn scripts_of_fair_lock_match_rules() {
    let object = ObjectKeys::new(KeyLayout::Lock, "", "name");
    assert_kind_equivalent(&object, &Fair::new("", "name"));
}

#[test]
fn scripts_of_writer_match_rules() {
    let lock = Client::embedded().read_write_lock("name").write();
    assert_kind_equivalent(lock.kind.object(), &*lock.kind);
}

#[test]
fn scripts_of_fair_writer_match_rules() {
    let lock = Client::embedded().fair_read_write_lock("name").write();
    let hands_off = |it: &Move| {
        use Move::{CheckHandoff, Handoff, HandoffOfAsked};
        matches!(
            it,
            Handoff { .. } | HandoffOfAsked { .. } | CheckHandoff { .. }
        )
    };
    let moves = moves().prop_filter("no handoffs", move |it| !hands_off(it));
    assert_moves_equivalent(moves, lock.kind.object(), &*lock.kind);
}
