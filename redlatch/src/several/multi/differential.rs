//! Compares Lua and rules of acquiring several objects over random histories: mixed kinds, some
//! held by other owners, some of a wrong kind, with the objects acquired so far undone.

use proptest::prelude::*;
use tokio::time::Instant;

use super::acquire_all::{Part, acquire_all as acquire_all_step};
use crate::hold::{AcquireParams, Hold};
use crate::lease::Lease;
use crate::locks::Reentrant;
use crate::locks::fenced::Fenced;
use crate::locks::reentrant::rules::force;
use crate::locks::spin::Spin;
use crate::session::AllOrNone;
use crate::step::Outcome;
use crate::step::differential::{
    Comparable, Differential, assert_equivalent, assert_reached, hold, lease, time,
};

/// The locks: some re-entrant, some fenced, some spin locks.
const NAMES: u8 = 5;

#[derive(Debug, Clone)]
enum Move {
    /// Acquires several locks, each with this hold count, in any order; a lock may occur twice.
    AcquireAll {
        owner: u8,
        all: Vec<(u8, u32)>,
        lease: u32,
        /// Remaining lease of the locks that are re-entered.
        before: u32,
    },
    Release {
        owner: u8,
        name: u8,
        keep: u32,
    },
    Advance {
        time: u32,
    },
    Force {
        name: u8,
    },
    SetForeign {
        name: u8,
    },
}

fn moves() -> impl Strategy<Value = Move> {
    let (owner, name) = (0..3u8, 0..NAMES);
    let all = prop::collection::vec((name.clone(), 1..3u32), 0..5);
    prop_oneof![
        10 => (owner.clone(), all, 1..4u32, 1..4u32).prop_map(|(owner, all, lease, before)| {
            Move::AcquireAll { owner, all, lease, before }
        }),
        6 => (owner, name.clone(), 0..2u32)
            .prop_map(|(owner, name, keep)| Move::Release { owner, name, keep }),
        2 => (1..3u32).prop_map(|time| Move::Advance { time }),
        1 => name.clone().prop_map(|name| Move::Force { name }),
        1 => name.prop_map(|name| Move::SetForeign { name }),
    ]
}

/// Returns the hold of an owner on one of the locks.
fn hold_of(owner: u8, name: u8) -> Hold {
    let full = format!("name-{name}");
    match name % 3 {
        0 => hold(owner, Reentrant::new("", &full)),
        1 => hold(owner, Fenced::new("", &full)),
        _ => hold(owner, Spin::new("", &full)),
    }
}

/// Returns the part of a step that acquires a lock up to this count.
fn part(hold: &Hold, count: u32, lease: Lease) -> Part<'_> {
    let params = AcquireParams::without_waiting(hold, count, lease);
    Part {
        name: hold.object.name(),
        acquire: hold.kind.acquire(params),
        undo: hold.kind.undo(hold, count - 1).unwrap(),
    }
}

impl Comparable for AllOrNone<u64> {
    fn comparable(&self) -> String {
        match self {
            AllOrNone::Acquired(tokens) => format!("{tokens:?}"),
            AllOrNone::Blocked(i, left) => {
                format!("{i}: {}", Outcome::<u64>::Wait(*left).comparable())
            }
        }
    }
}

/// Counts the events that the histories must cover.
#[derive(Default)]
struct Seen {
    acquired: u32,
    undone: u32,
    refused: u32,
    failed: u32,
}

async fn acquire_all(
    harness: &mut Differential,
    seen: &mut Seen,
    owner: u8,
    all: &[(u8, u32)],
    (n, before): (u32, u32),
) {
    let holds: Vec<_> = all.iter().map(|&(name, _)| hold_of(owner, name)).collect();
    for hold in &holds {
        let end = Instant::now() + lease(before).duration();
        hold.add_guard(end, false, None).unwrap();
    }
    let parts = holds.iter().zip(all);
    let parts = parts.map(|(hold, &(_, count))| part(hold, count, lease(n)));
    match harness.step(&acquire_all_step(parts.collect())).await {
        Ok(AllOrNone::Acquired(tokens)) => {
            assert_eq!(tokens.len(), all.len());
            seen.acquired += u32::from(all.len() > 1);
        }
        Ok(AllOrNone::Blocked(0, _)) => seen.refused += 1,
        Ok(AllOrNone::Blocked(..)) => seen.undone += 1,
        Err(_) => seen.failed += 1,
    }
}

#[test]
fn lua_and_rules_agree() {
    let mut seen = Seen::default();
    assert_equivalent(moves(), async |harness, one| match one {
        Move::AcquireAll {
            owner,
            all,
            lease,
            before,
        } => {
            acquire_all(harness, &mut seen, *owner, all, (*lease, *before)).await;
        }
        Move::Release { owner, name, keep } => {
            let _ = harness.release(&hold_of(*owner, *name), *keep, 0).await;
        }
        Move::Advance { time: n } => harness.advance(time(*n)).await,
        Move::Force { name } => {
            let object = &hold_of(0, *name).object;
            let _ = harness.step(&force(object)).await;
        }
        Move::SetForeign { name } => harness.set_foreign(&format!("name-{name}"), 5).await,
    });
    let events = [seen.acquired, seen.undone, seen.refused, seen.failed];
    assert_reached(events);
}

/// Each set of kinds has one script, regardless of their order and number.
#[test]
fn same_kinds_share_one_script() {
    let script = |names: &[u8]| {
        let holds: Vec<_> = names.iter().map(|&name| hold_of(0, name)).collect();
        let parts = holds.iter().map(|hold| part(hold, 1, lease(1)));
        acquire_all_step(parts.collect()).script().source()
    };
    assert_eq!(script(&[0, 1]), script(&[4, 3, 0]));
    assert_ne!(script(&[0, 1]), script(&[0, 3]));
    // A spin lock uses the lock's script.
    assert_eq!(script(&[0, 3]), script(&[2, 0]));
}
