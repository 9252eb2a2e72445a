//! Compares the read-write lock's Lua scripts and rules over random histories.

use std::collections::BTreeSet;
use std::sync::Arc;

use proptest::prelude::*;

use super::rules::{read, write};
use super::{Read, Write};
use crate::error::Error;
use crate::hold::Hold;
use crate::name::{Family, Place};
use crate::primitives::handle::{Ask, Rules as _};
use crate::primitives::twin::{agree, hold, lease, time};
use crate::step::Outcome;

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
    Renew {
        side: Side,
        owner: u8,
        lease: u32,
    },
    Pass {
        time: u32,
    },
    Force(Side),
    Inspect(Side),
    /// Another program removes the lock's expiry.
    Persist,
    /// Other data under one of the keys.
    Plant(u8),
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
        8 => renew,
        6 => (1..4u32).prop_map(|time| Move::Pass { time }),
        2 => side.clone().prop_map(Move::Force),
        4 => side.prop_map(Move::Inspect),
        2 => Just(Move::Persist),
        1 => (0..3u8).prop_map(Move::Plant),
    ]
}

fn reader(owner: u8, yields: bool) -> (Hold, Read) {
    let write = Arc::new(Place::new(Family::Write, "", "name"));
    let kind = Read {
        write,
        yields,
        besides: None,
    };
    (hold(Family::Read, owner, kind.clone()), kind)
}

fn writer(owner: u8, prefers: bool) -> (Hold, Write) {
    let read = Arc::new(Place::new(Family::Read, "", "name"));
    // A third of it is still distinguishable from another owner's lease.
    let holds_back = prefers.then(|| lease(3));
    let kind = Write { read, holds_back };
    (hold(Family::Write, owner, kind.clone()), kind)
}

#[test]
fn lua_and_rules_agree() {
    let mut reached = BTreeSet::new();
    agree(moves(), async |twin, one| match *one {
        Move::Acquire {
            side,
            owner,
            count,
            lease: n,
            waits,
        } => {
            let ask = |hold| Ask {
                hold,
                count,
                lease: lease(n),
                waits,
            };
            let outcome = match side {
                Side::Read(yields) => {
                    let (hold, kind) = reader(owner, yields);
                    twin.step(&kind.acquire(ask(&hold))).await
                }
                Side::Write(prefers) => {
                    let (hold, kind) = writer(owner, prefers);
                    twin.step(&kind.acquire(ask(&hold))).await
                }
            };
            reached.insert(match (side, outcome) {
                (Side::Read(_), Ok(Outcome::Done(()))) if count > 1 => "reads again",
                (Side::Read(_), Ok(Outcome::Done(()))) => "reads",
                (Side::Write(_), Ok(Outcome::Done(()))) if count > 1 => "writes again",
                (Side::Write(_), Ok(Outcome::Done(()))) => "writes",
                (_, Ok(Outcome::Wait(left))) if left.is_zero() => "is lost",
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
            let lease = (n > 0).then(|| lease(n));
            let released = match side {
                Side::Read(yields) => {
                    let hold = &reader(owner, yields).0;
                    twin.step(&read::Release { hold, keep, lease }).await
                }
                Side::Write(prefers) => {
                    let hold = &writer(owner, prefers).0;
                    twin.step(&write::Release { hold, keep, lease }).await
                }
            };
            reached.insert(match (side, keep, released) {
                (Side::Read(_), 0, Ok(true)) => "stops reading",
                (Side::Write(_), 0, Ok(true)) => "stops writing",
                (_, _, Ok(true)) => "keeps some",
                (_, _, Ok(false)) => "did not hold it",
                (_, _, Err(_)) => "another kind",
            });
        }
        Move::Renew {
            side,
            owner,
            lease: n,
        } => {
            let renewed = match side {
                Side::Read(yields) => twin.renew(&reader(owner, yields).0, n).await,
                Side::Write(prefers) => twin.renew(&writer(owner, prefers).0, n).await,
            };
            if renewed {
                reached.insert("renews");
            }
        }
        Move::Pass { time: n } => twin.pass(time(n)).await,
        Move::Force(Side::Read(yields)) => {
            let (hold, kind) = reader(0, yields);
            let _ = twin.step(&kind.force(&hold.place)).await;
        }
        Move::Force(Side::Write(prefers)) => {
            let (hold, kind) = writer(0, prefers);
            let _ = twin.step(&kind.force(&hold.place)).await;
        }
        Move::Inspect(side) => {
            let holders = match side {
                Side::Read(yields) => {
                    let (hold, kind) = reader(0, yields);
                    twin.step(&kind.inspect(&hold.place)).await
                }
                Side::Write(prefers) => {
                    let (hold, kind) = writer(0, prefers);
                    twin.step(&kind.inspect(&hold.place)).await
                }
            };
            if holders.is_ok_and(|holders| holders.len() > 1) {
                reached.insert("several read");
            }
        }
        Move::Persist => twin.persist("name").await,
        Move::Plant(what) => {
            let key = match what {
                0 => "name",
                1 => "redlatch_rwlock_writers:{name}",
                _ => "{name}:client:1:rwlock_timeout:1",
            };
            twin.plant(key, 5).await;
        }
    });
    let expected = [
        "another kind",
        "did not hold it",
        "is lost",
        "keeps some",
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
