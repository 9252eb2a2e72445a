//! Compares the read-write lock's Lua scripts and rules over random histories.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;

use super::{Read, Write};
use crate::error::Error;
use crate::hold::HoldKind as _;
use crate::hold::{AcquireParams, Handoff, Hold, To};
use crate::lease::Expiry;
use crate::name::ReadWriteKeys;
use crate::step::Outcome;
use crate::step::differential::{HandoffMove, assert_equivalent_times, hold, lease, time};

#[derive(Debug, Clone)]
enum Move {
    Acquire {
        side: Side,
        owner: u8,
        count: u32,
        lease: u32,
        waits: bool,
    },
    Release {
        side: Side,
        owner: u8,
        keep: u32,
        lease: u32,
    },
    /// From one writer to another.
    Handoff(HandoffMove),
    /// From one writer to another.
    Renew {
        side: Side,
        owner: u8,
        lease: u32,
    },
    Advance {
        time: u32,
    },
    Force(Side),
    Inspect(Side),
    /// Another program removes the lock's expiry.
    Persist,
    /// Other data under one of the keys.
    SetForeign(u8),
}

/// A side, and whether its handle prefers writers.
#[derive(Debug, Clone, Copy)]
enum Side {
    Read(bool),
    Write(bool),
}

fn moves() -> impl Strategy<Value = Move> {
    let side = prop_oneof![
        3 => any::<bool>().prop_map(Side::Read),
        2 => any::<bool>().prop_map(Side::Write),
    ];
    let (owner, lease) = (0..3u8, 1..6u32);
    // Sometimes more holds than have their own keys: rarely, because checking all of them takes time.
    let count = prop_oneof![
        300 => Just(1u32),
        200 => Just(2),
        100 => Just(3),
        1 => 9_999..10_003u32,
    ];
    let acquire = (
        side.clone(),
        owner.clone(),
        count,
        lease.clone(),
        any::<bool>(),
    )
        .prop_map(|(side, owner, count, lease, waits)| Move::Acquire {
            side,
            owner,
            count,
            lease,
            waits,
        });
    let keep = prop_oneof![20 => 0..3u32, 1 => 9_999..10_003u32];
    let release =
        (side.clone(), owner.clone(), keep, 0..6u32).prop_map(|(side, owner, keep, lease)| {
            Move::Release {
                side,
                owner,
                keep,
                lease,
            }
        });
    let renew = (side.clone(), owner, lease).prop_map(|(side, owner, lease)| Move::Renew {
        side,
        owner,
        lease: lease - 1,
    });
    prop_oneof![
        24 => acquire,
        14 => release,
        6 => HandoffMove::to_waiter().prop_map(Move::Handoff),
        4 => HandoffMove::to_no_waiter().prop_map(Move::Handoff),
        8 => renew,
        6 => (1..4u32).prop_map(|time| Move::Advance { time }),
        2 => side.clone().prop_map(Move::Force),
        4 => side.prop_map(Move::Inspect),
        2 => Just(Move::Persist),
        1 => (0..3u8).prop_map(Move::SetForeign),
    ]
}

fn reader(owner: u8, prefers_writers: bool) -> (Hold, Read) {
    let kind = Read {
        keys: Arc::new(ReadWriteKeys::new("", "name")),
        prefers_writers,
        required: None,
    };
    (hold(owner, kind.clone()), kind)
}

fn writer(owner: u8, prefers: bool) -> (Hold, Write) {
    // A third of it is still distinguishable from another owner's lease.
    let blocks_readers_for = prefers.then(|| lease(3));
    let kind = Write {
        keys: Arc::new(ReadWriteKeys::new("", "name")),
        blocks_readers_for,
    };
    (hold(owner, kind.clone()), kind)
}

#[test]
fn lua_and_rules_agree() {
    let mut reached = BTreeSet::new();
    // A writer seldom reads as well.
    assert_equivalent_times(3, moves(), async |harness, one| match one.clone() {
        Move::Acquire {
            side,
            owner,
            count,
            lease: n,
            waits,
        } => {
            let params = |hold| AcquireParams {
                hold,
                count,
                lease: lease(n),
                waits,
                request_number: 0,
            };
            let outcome = match side {
                Side::Read(prefers_writers) => {
                    let (hold, kind) = reader(owner, prefers_writers);
                    harness.step(&kind.acquire(params(&hold))).await
                }
                Side::Write(prefers) => {
                    let (hold, kind) = writer(owner, prefers);
                    harness.step(&kind.acquire(params(&hold))).await
                }
            };
            reached.insert(match (side, outcome) {
                (Side::Read(_), Ok(Outcome::Done(_))) if count > 1 => "reads again",
                (Side::Read(_), Ok(Outcome::Done(_))) => "reads",
                (Side::Write(_), Ok(Outcome::Done(_))) if count > 1 => "writes again",
                (Side::Write(_), Ok(Outcome::Done(_))) => "writes",
                (_, Ok(Outcome::Wait(Expiry::In(Duration::ZERO)))) => "is lost",
                (Side::Read(_), Ok(Outcome::Wait(_))) => "waits to read",
                (Side::Write(_), Ok(Outcome::Wait(_))) => "waits to write",
                (_, Err(Error::WriteWhileReading { .. })) => "reads and asks to write",
                (_, Err(_)) => "another kind",
            });
        }
        Move::Release {
            side,
            owner,
            keep,
            lease: n,
        } => {
            let hold = match side {
                Side::Read(prefers_writers) => reader(owner, prefers_writers).0,
                Side::Write(prefers) => writer(owner, prefers).0,
            };
            let released = harness.release(&hold, keep, n).await;
            reached.insert(match (side, keep, released) {
                (Side::Read(_), 0, Ok(true)) => "stops reading",
                (Side::Write(_), 0, Ok(true)) => "stops writing",
                (_, _, Ok(true)) => "keeps some",
                (_, _, Ok(false)) => "did not hold it",
                (_, _, Err(_)) => "another kind",
            });
        }
        Move::Handoff(handoff) => {
            let handed_off = harness.handoff(&handoff, |owner| writer(owner, false).0);
            let to_waiter = matches!(handoff.to, To::Waiter { .. });
            reached.insert(match handed_off.await {
                Ok(Handoff::Done { .. }) if to_waiter => "passes on writing",
                Ok(Handoff::Done { .. }) => "is replaced as the writer",
                Err(Error::NotMovable { .. }) if to_waiter => "keeps writing",
                Ok(Handoff::Kept { .. }) => "others wait",
                Ok(Handoff::NotHeld) => "did not hold it",
                Err(Error::NotMovable { .. }) => "also reads",
                Err(_) => "another kind",
            });
        }
        Move::Renew {
            side,
            owner,
            lease: n,
        } => {
            let renewed = match side {
                Side::Read(prefers_writers) => {
                    harness.renew(&reader(owner, prefers_writers).0, n).await
                }
                Side::Write(prefers) => harness.renew(&writer(owner, prefers).0, n).await,
            };
            if renewed {
                reached.insert("renews");
            }
        }
        Move::Advance { time: n } => harness.advance(time(n)).await,
        Move::Force(Side::Read(prefers_writers)) => {
            let kind = reader(0, prefers_writers).1;
            let _ = harness.step(&kind.force()).await;
        }
        Move::Force(Side::Write(prefers)) => {
            let kind = writer(0, prefers).1;
            let _ = harness.step(&kind.force()).await;
        }
        Move::Inspect(side) => {
            let holders = match side {
                Side::Read(prefers_writers) => {
                    let kind = reader(0, prefers_writers).1;
                    harness.step(&kind.inspect()).await
                }
                Side::Write(prefers) => {
                    let kind = writer(0, prefers).1;
                    harness.step(&kind.inspect()).await
                }
            };
            if holders.is_ok_and(|holders| holders.len() > 1) {
                reached.insert("several read");
            }
        }
        Move::Persist => harness.persist("name").await,
        Move::SetForeign(what) => {
            let key = match what {
                0 => "name",
                1 => "redlatch_rwlock_writers:{name}",
                _ => "{name}:client:1:rwlock_timeout:1",
            };
            harness.set_foreign(key, 5).await;
        }
    });
    let expected = [
        "also reads",
        "another kind",
        "did not hold it",
        "is lost",
        "is replaced as the writer",
        "keeps some",
        "keeps writing",
        "passes on writing",
        "reads",
        "reads again",
        "reads and asks to write",
        "renews",
        "several read",
        "stops reading",
        "stops writing",
        "waits to read",
        "waits to write",
        "writes",
        "writes again",
    ];
    assert_eq!(reached.into_iter().collect::<Vec<_>>(), expected);
}
