//! Compares Lua and rules of taking several objects over random histories: mixed kinds, some held
//! by other owners, some of a wrong kind, with the objects taken so far undone.

use std::sync::Arc;

use proptest::prelude::*;
use tokio::time::Instant;

use super::take::{Part, Prize, Take};
use crate::hold::{Hold, Kind};
use crate::name::{Family, Place};
use crate::owner::Owner;
use crate::primitives::fenced_lock::Fenced;
use crate::primitives::handle::{Ask, Reentrant, Rules as _};
use crate::primitives::lock::rules::Release;
use crate::primitives::multi_lock::member::prized;
use crate::primitives::spin_lock::Spin;
use crate::primitives::twin::{Comparable, Twin, agree, lease, time};
use crate::session::Together;
use crate::step::{BoxedStep, Mapped, Outcome};

/// The locks: some re-entrant, some fenced, some spinning.
const NAMES: u8 = 5;

#[derive(Debug, Clone)]
enum Move {
    /// Takes several locks, each with this hold count, in any order; a lock may occur twice.
    TakeAll {
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
    Pass {
        time: u32,
    },
    Force {
        name: u8,
    },
    Plant {
        name: u8,
    },
}

fn moves() -> impl Strategy<Value = Move> {
    let (owner, name) = (0..3u8, 0..NAMES);
    let all = prop::collection::vec((name.clone(), 1..3u32), 0..5);
    prop_oneof![
        10 => (owner.clone(), all, 1..4u32, 1..4u32).prop_map(|(owner, all, lease, before)| {
            Move::TakeAll { owner, all, lease, before }
        }),
        6 => (owner, name.clone(), 0..2u32)
            .prop_map(|(owner, name, keep)| Move::Release { owner, name, keep }),
        2 => (1..3u32).prop_map(|time| Move::Pass { time }),
        1 => name.clone().prop_map(|name| Move::Force { name }),
        1 => name.prop_map(|name| Move::Plant { name }),
    ]
}

fn hold(owner: u8, name: u8) -> Hold {
    let (family, kind): (_, Arc<dyn Kind>) = match name % 3 {
        0 => (Family::Lock, Arc::new(Reentrant)),
        1 => (Family::Fenced, Arc::new(Fenced)),
        _ => (Family::Spin, Arc::new(Spin::default())),
    };
    let place = Place::new(family, "", &format!("name-{name}"));
    let field = place.field(format!("client:{owner}"));
    Hold::new(place.into(), Owner::new(), field, kind, Arc::default())
}

fn take(ask: Ask<'_>) -> BoxedStep<'_, Outcome<Prize>> {
    match ask.hold.place.family() {
        Family::Fenced => Box::new(Mapped(Fenced.acquire(ask), prized)),
        _ => Box::new(Mapped(Reentrant.acquire(ask), prized)),
    }
}

impl Comparable for Together<Prize> {
    fn comparable(&self) -> String {
        match self {
            Together::Had(prizes) => {
                let tokens = prizes.iter().map(|prize| prize.downcast_ref::<u64>());
                format!("{:?}", tokens.collect::<Vec<_>>())
            }
            Together::InTheWay(i, left) => {
                format!("{i}: {}", Outcome::<()>::Wait(*left).comparable())
            }
        }
    }
}

/// Counts the events that the histories must cover.
#[derive(Default)]
struct Seen {
    had: usize,
    undone: usize,
    refused: usize,
    failed: usize,
}

async fn take_all(
    twin: &mut Twin,
    seen: &mut Seen,
    owner: u8,
    all: &[(u8, u32)],
    (n, before): (u32, u32),
) {
    let holds: Vec<_> = all.iter().map(|&(name, _)| hold(owner, name)).collect();
    for hold in &holds {
        let end = Instant::now() + lease(before).duration();
        hold.enter(end, false).unwrap();
    }
    let parts = holds.iter().zip(all).map(|(hold, &(_, count))| Part {
        name: hold.place.name(),
        take: take(Ask {
            hold,
            count,
            lease: lease(n),
            waits: false,
        }),
        undo: hold.kind.undo(hold, count - 1).unwrap(),
    });
    match twin.step(&Take::new(parts.collect())).await {
        Ok(Together::Had(prizes)) => {
            assert_eq!(prizes.len(), all.len());
            seen.had += usize::from(all.len() > 1);
        }
        Ok(Together::InTheWay(0, _)) => seen.refused += 1,
        Ok(Together::InTheWay(..)) => seen.undone += 1,
        Err(_) => seen.failed += 1,
    }
}

#[test]
fn lua_and_rules_agree() {
    let mut seen = Seen::default();
    agree(moves(), async |twin, one| match one {
        Move::TakeAll {
            owner,
            all,
            lease,
            before,
        } => {
            take_all(twin, &mut seen, *owner, all, (*lease, *before)).await;
        }
        Move::Release { owner, name, keep } => {
            let hold = hold(*owner, *name);
            let _ = twin.step(&Release::new(&hold, *keep, None)).await;
        }
        Move::Pass { time: n } => twin.pass(time(*n)).await,
        Move::Force { name } => {
            let _ = twin.step(&Reentrant.force(&hold(0, *name).place)).await;
        }
        Move::Plant { name } => twin.plant(&format!("name-{name}"), 5).await,
    });
    // The histories must cover every event.
    for count in [seen.had, seen.undone, seen.refused, seen.failed] {
        assert!(count > 100, "{count}");
    }
}

/// Each set of kinds has one script, regardless of their order and number.
#[test]
fn same_kinds_share_one_script() {
    let script = |names: &[u8]| {
        let holds: Vec<_> = names.iter().map(|&name| hold(0, name)).collect();
        let parts = holds.iter().map(|hold| Part {
            name: hold.place.name(),
            take: take(Ask {
                hold,
                count: 1,
                lease: lease(1),
                waits: false,
            }),
            undo: hold.kind.undo(hold, 0).unwrap(),
        });
        crate::step::Step::script(&Take::new(parts.collect())).id()
    };
    assert_eq!(script(&[0, 1]), script(&[4, 3, 0]));
    assert_ne!(script(&[0, 1]), script(&[0, 3]));
    // A spin lock uses the lock's script.
    assert_eq!(script(&[0, 3]), script(&[2, 0]));
}
