//! Compares the fenced lock's Lua scripts and rules over random histories. Release, renewal and
//! inspection are the lock's, but run on other states here.

use std::cell::Cell;

use proptest::prelude::*;

use super::rules;
use super::{Fenced, MAX_TOKEN, token};
use crate::hold::AcquireParams;
use crate::hold::HoldKind as _;
use crate::name::term_key;
use crate::step::differential::{HandoffMove, assert_equivalent, hold, lease, number_texts, time};

#[derive(Debug, Clone)]
enum Move {
    Acquire {
        owner: u8,
        count: u32,
        lease: u32,
        by_clock: bool,
    },
    Release {
        owner: u8,
        keep: u32,
    },
    Handoff {
        handoff: HandoffMove,
        by_clock: bool,
    },
    Renew {
        owner: u8,
        lease: u32,
    },
    AdvanceTime {
        time: u32,
    },
    Force,
    Current,
    Advance {
        at_least: i64,
    },
    Delete,
    /// Another program writes another token.
    SetForeign {
        token: String,
    },
    /// The token is that of a clock which is ahead.
    SetAhead {
        units: u32,
    },
    /// There is a term of an election, led by this owner if it holds the lock.
    SetTerm {
        epoch: String,
        leader: u8,
    },
    /// The term is no hash.
    SetForeignTerm,
}

fn moves() -> impl Strategy<Value = Move> {
    let (owner, lease) = (0..3u8, 1..4u32);
    prop_oneof![
        8 => (owner.clone(), 1..4u32, lease.clone(), any::<bool>()).prop_map(
            |(owner, count, lease, by_clock)| Move::Acquire { owner, count, lease, by_clock }
        ),
        6 => (owner.clone(), 0..3u32).prop_map(|(owner, keep)| Move::Release { owner, keep }),
        4 => (HandoffMove::any(), any::<bool>())
            .prop_map(|(handoff, by_clock)| Move::Handoff { handoff, by_clock }),
        2 => (owner, lease).prop_map(|(owner, lease)| Move::Renew { owner, lease: lease - 1 }),
        2 => (1..3u32).prop_map(|time| Move::AdvanceTime { time }),
        1 => Just(Move::Force),
        2 => Just(Move::Current),
        2 => prop_oneof![0..5i64, (1 << 53)..i64::MAX, Just(i64::MAX - 1), Just((1 << 53) + 1)]
            .prop_map(|at_least| Move::Advance { at_least }),
        1 => Just(Move::Delete),
        2 => number_texts().prop_map(|token| Move::SetForeign { token }),
        1 => (0..3u32).prop_map(|units| Move::SetAhead { units }),
        2 => (number_texts(), 0..3u8)
            .prop_map(|(epoch, leader)| Move::SetTerm { epoch, leader }),
        1 => Just(Move::SetForeignTerm),
    ]
}

#[test]
fn lua_and_rules_agree() {
    // Whether another program has written a token that is no number.
    let has_text = Cell::new(false);
    assert_equivalent(moves(), async |harness, one| {
        let kind = Fenced::new("", "name");
        let clock_kind = Fenced {
            grace: Some(lease(1)),
            ..kind.clone()
        };
        let kind_with = |by_clock| if by_clock { &clock_kind } else { &kind };
        let of = |owner| hold(owner, kind.clone());
        match one.clone() {
            Move::Acquire {
                owner,
                count,
                lease: n,
                by_clock,
            } => {
                // A repetition fails on both sides, but not with the same error: see `Acquire`.
                if has_text.take() {
                    harness.remove(&kind.keys.token).await;
                }
                let hold = of(owner);
                let params = AcquireParams::without_waiting(&hold, count, lease(n));
                let _ = harness.step(&kind_with(by_clock).acquire(params)).await;
            }
            Move::Release { owner, keep } => {
                harness.release(&of(owner), keep, 0).await.unwrap();
            }
            Move::Handoff { handoff, by_clock } => {
                let of = |owner| hold(owner, kind_with(by_clock).clone());
                let _ = harness.handoff(&handoff, of).await;
            }
            Move::Renew { owner, lease: n } => {
                harness.renew(&of(owner), n).await;
            }
            Move::AdvanceTime { time: n } => harness.advance(time(n)).await,
            Move::Force => {
                harness.step(&kind.force()).await.unwrap();
            }
            Move::SetForeign { token } => {
                harness.set_foreign_text(&kind.keys.token, &token).await;
                has_text.set(token::parse_number(&token).is_none());
            }
            Move::SetAhead { units } => {
                harness.set_token_ahead(&kind.keys.token, units).await;
            }
            Move::Advance { at_least } => {
                let step = rules::advance_token(&kind.keys, at_least);
                // An acquisition can count up from the result.
                if let Ok(latest) = harness.step(&step).await {
                    assert!(latest <= MAX_TOKEN, "{latest}");
                }
            }
            Move::SetTerm { epoch, leader } => {
                let fields = [("epoch", epoch), ("leader", of(leader).field.to_string())];
                harness.set_texts(&term_key("name"), &fields).await;
            }
            Move::SetForeignTerm => harness.set_foreign(&term_key("name"), 5).await,
            Move::Delete => {
                let step = rules::delete_token(&kind.keys);
                harness.step(&step).await.unwrap();
            }
            Move::Current => {
                let keys = &kind.keys;
                let _ = harness.step(&rules::read_token(keys)).await;
            }
        }
    });
}
