//! Compares the election's Lua scripts and rules over random histories. Those of the fair lock's queue have a test of their
//! own; here candidates also begin terms, proclaim, and resign to each other.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::OnceLock;

use proptest::prelude::*;

use super::rules;
use super::{Elected, ElectionKeys, Leader};
use crate::error::Result;
use crate::hold::{AcquireParams, Hold, HoldKind as _};
use crate::lease::Expiry;
use crate::locks::fair::Fair;
use crate::owner::OwnerId;
use crate::step::Outcome;
use crate::step::differential::{
    Comparable, Differential, assert_covered, assert_equivalent, assert_equivalent_histories, hold,
    lease, number_texts, time,
};
use crate::step::repetition::Repetitions;

#[derive(Debug, Clone)]
enum Move {
    Acquire {
        owner: u8,
        lease: u32,
        waits: bool,
        wait_time: u32,
    },
    Release {
        owner: u8,
        keep: u32,
        successor: Option<u8>,
    },
    Renew {
        owner: u8,
        lease: u32,
    },
    Proclaim {
        owner: u8,
        revision: i64,
        value: u8,
    },
    Read,
    Advance {
        time: u32,
    },
    Force,
    /// Subscribes only to the channels of these candidates from now on: one bit each.
    Subscribe(u8),
    /// Another program overwrites the lock, or the term.
    SetForeign {
        term: bool,
    },
    /// The epoch is advanced, or another program writes one.
    SetToken(i64),
    /// Another program, or a client of an earlier version, writes the epoch of the term and the
    /// token.
    SetTerm {
        epoch: String,
        token: String,
    },
}

/// Above 2^53 not each number is a Lua number: this one and the one before are equal there.
const INEXACT: i64 = (1 << 53) + 1;

const OWNERS: u8 = 4;

fn moves() -> impl Strategy<Value = Move> {
    let (owner, lease) = (0..OWNERS, 1..4u32);
    let waits = prop_oneof![6 => Just(true), 1 => Just(false)];
    // Odd: see the fair lock's test.
    let wait_time = prop_oneof![Just(1u32), Just(3u32)];
    prop_oneof![
        30 => (owner.clone(), lease.clone(), waits, wait_time)
            .prop_map(|(owner, lease, waits, wait_time)| Move::Acquire { owner, lease, waits, wait_time }),
        10 => (owner.clone(), 0..2u32, proptest::option::of(owner.clone()))
            .prop_map(|(owner, keep, successor)| Move::Release { owner, keep, successor }),
        // Few leaders resign to a candidate that waits, and few of these make the next attempt.
        8 => (owner.clone(), owner.clone())
            .prop_map(|(owner, successor)| Move::Release { owner, keep: 0, successor: Some(successor) }),
        3 => (owner.clone(), lease).prop_map(|(owner, lease)| Move::Renew { owner, lease: lease - 1 }),
        8 => (owner, 1..4i64, 0..3u8)
            .prop_map(|(owner, revision, value)| Move::Proclaim { owner, revision, value }),
        5 => Just(Move::Read),
        5 => (1..6u32).prop_map(|time| Move::Advance { time }),
        1 => Just(Move::Force),
        2 => (0..1u8 << OWNERS).prop_map(Move::Subscribe),
        1 => any::<bool>().prop_map(|term| Move::SetForeign { term }),
        2 => prop_oneof![0..9i64, any::<i64>(), Just(i64::MAX), Just(i64::MAX - 1), Just((1 << 53) + 1)]
            .prop_map(Move::SetToken),
        1 => (number_texts(), number_texts())
            .prop_map(|(epoch, token)| Move::SetTerm { epoch, token }),
        1 => Just(Move::SetTerm { epoch: INEXACT.to_string(), token: (INEXACT - 1).to_string() }),
    ]
}

fn elected(wait_time: u32, successor: Option<u8>) -> Elected {
    let keys = ElectionKeys::new("", "name");
    Elected {
        fair: Fair::from_keys(keys.fair.clone()).with_times(time(wait_time), lease(1).duration()),
        keys: keys.into(),
        value: "value".to_owned(),
        successor: successor.map_or_else(OnceLock::new, |owner| {
            OnceLock::from(OwnerId::from(format!("client:{owner}")))
        }),
    }
}

fn hold_of(owner: u8) -> Hold {
    hold(owner, elected(1, None))
}

async fn acquire(
    harness: &mut Differential,
    elected: &Elected,
    owner: u8,
    lease_multiple: u32,
    waits: bool,
) -> Result<Outcome> {
    let params = AcquireParams {
        hold: &hold_of(owner),
        count: 1,
        lease: lease(lease_multiple),
        waits,
        request_number: 0,
    };
    harness.step(&elected.acquire(params)).await
}

#[tokio::test]
async fn repeated_acquisition_is_written_again() {
    let repetitions = Repetitions::new().await;
    let (elected, hold) = (elected(1, None), hold_of(0));
    let acquire = |units| AcquireParams::without_waiting(&hold, 1, lease(units));
    let steps = [2, 1].map(|units| elected.acquire(acquire(units)));
    repetitions.assert_written_again(steps).await;
}

impl Comparable for Option<(Leader, Expiry)> {
    fn comparable(&self) -> String {
        self.as_ref().map_or("none".into(), |(leader, left)| {
            format!("{leader:?} {}", left.comparable())
        })
    }
}

async fn subscribe(harness: &mut Differential, owners: u8) {
    let keys = ElectionKeys::new("", "name").fair;
    let owners = (0..OWNERS).filter(|owner| owners & (1 << owner) != 0);
    let channels = owners.map(|owner| keys.waiter_channel(&hold_of(owner).field));
    let lock = keys.object.channel().to_owned();
    harness.subscribe_only(channels.chain([lock])).await;
}

/// A candidate that was absent when the lock became free is connected when the next leader resigns to it. Random histories
/// rarely get there.
#[test]
fn resignation_to_a_candidate_that_was_absent() {
    let history = Just(vec![(0, 0..OWNERS, None), (1 << 3, 1..2, Some(3))]);
    assert_equivalent_histories(history, 1, async |harness, step| {
        let (subscribed, candidates, successor) = step.clone();
        subscribe(harness, subscribed).await;
        let leader = candidates.start;
        for owner in candidates {
            let _ = acquire(harness, &elected(1, None), owner, 1, true).await;
        }
        let hold = hold(leader, elected(1, successor));
        assert!(harness.release(&hold, 0, 0).await.unwrap());
    });
}

#[test]
fn lua_and_rules_agree() {
    let covered = RefCell::new(BTreeMap::<&str, u32>::new());
    let record = |case: &'static str| *covered.borrow_mut().entry(case).or_default() += 1;
    let has_subscribed = Cell::new(false);
    // The candidate to which the lock was released, and which has not acquired it yet.
    let successor_of = Cell::new(None);
    // The latest number to which the epoch was advanced.
    let advanced_to = Cell::new(None);
    // Whether the term is ahead of the token, but not for Lua.
    let is_inexact = Cell::new(false);
    assert_equivalent(moves(), async |harness, next_move| {
        if !has_subscribed.replace(true) {
            subscribe(harness, u8::MAX).await;
        }
        let keys = &ElectionKeys::new("", "name");
        match next_move.clone() {
            Move::Acquire {
                owner,
                lease: n,
                waits,
                wait_time,
            } => {
                let before = harness.step(&rules::read(keys)).await;
                let elected = elected(wait_time, None);
                let acquired = acquire(harness, &elected, owner, n, waits).await;
                let epoch = match acquired {
                    Ok(Outcome::Done(epoch)) => epoch,
                    Ok(Outcome::Wait(_)) => return,
                    Err(_) => return record("a term that is no hash was refused"),
                };
                let leader = before.ok().flatten().map(|(leader, _)| leader);
                record(match leader {
                    Some(leader) if leader.epoch == epoch => {
                        "a repeated acquisition returned the epoch of its term"
                    }
                    _ if epoch == 1 => "the first term began",
                    _ => "a later term began",
                });
                let is_next = |token: i64| epoch.checked_sub(1) == u64::try_from(token).ok();
                if advanced_to.take().is_some_and(is_next) {
                    record("an advanced epoch was counted up");
                }
                if is_inexact.take() && i64::try_from(epoch) == Ok(INEXACT + 1) {
                    record("an epoch that is no Lua number was counted up");
                }
                // Of another history if it is the first term.
                if successor_of.take() == Some(owner) && epoch > 1 {
                    record("the successor acquired the lock");
                }
            }
            Move::Release {
                owner,
                keep,
                successor,
            } => {
                let hold = hold(owner, elected(1, successor));
                if let Ok(true) = harness.release(&hold, keep, 0).await
                    && keep == 0
                {
                    successor_of.set(successor);
                }
            }
            Move::Renew { owner, lease: n } => {
                harness.renew(&hold_of(owner), n).await;
            }
            Move::Proclaim {
                owner,
                revision,
                value,
            } => {
                let (hold, value) = (hold_of(owner), value.to_string());
                let step = rules::proclaim(keys, &hold.field, revision, &value);
                match harness.step(&step).await {
                    Ok(true) => record("the leader proclaimed a value"),
                    Ok(false) => record("a value of another owner was refused"),
                    Err(_) => {}
                }
            }
            Move::Read => match harness.step(&rules::read(keys)).await {
                Ok(Some(_)) => record("there was a leader"),
                _ => record("there was no leader"),
            },
            Move::Advance { time: n } => harness.advance(time(n)).await,
            Move::Force => {
                let _ = harness.step(&elected(1, None).force()).await;
            }
            Move::Subscribe(owners) => subscribe(harness, owners).await,
            Move::SetToken(token) => {
                harness.set_foreign(&keys.token, token).await;
                advanced_to.set(Some(token).filter(|token| *token > 0));
            }
            Move::SetTerm { epoch, token } => {
                is_inexact.set(epoch == INEXACT.to_string());
                harness.set_foreign_text(&keys.token, &token).await;
                harness.set_texts(&keys.term, &[("epoch", epoch)]).await;
            }
            Move::SetForeign { term: true } => harness.set_foreign(&keys.term, 5).await,
            Move::SetForeign { term: false } => harness.set_foreign("name", 5).await,
        }
    });
    let cases = [
        "a repeated acquisition returned the epoch of its term",
        "the first term began",
        "a later term began",
        "a term that is no hash was refused",
        "an advanced epoch was counted up",
        "an epoch that is no Lua number was counted up",
        "the successor acquired the lock",
        "the leader proclaimed a value",
        "a value of another owner was refused",
        "there was a leader",
        "there was no leader",
    ];
    assert_covered(&covered.into_inner(), &cases);
}
