//! Compares the Lua scripts of a group of locks and their rules over random histories.

use proptest::prelude::*;
use tokio::time::Instant;

use super::{Group, GroupValue};
use crate::hold::AcquireParams;
use crate::hold::HoldKind as _;
use crate::step::differential::{assert_equivalent, hold, lease, time};

#[derive(Debug, Clone)]
enum Move {
    Acquire {
        owner: u8,
        value: i32,
        count: u32,
        lease: u32,
    },
    Release {
        owner: u8,
        value: i32,
        keep: u32,
        lease: u32,
    },
    Undo {
        owner: u8,
        value: i32,
        keep: u32,
    },
    Renew {
        owner: u8,
        value: i32,
        lease: u32,
    },
    Advance {
        time: u32,
    },
    Force {
        value: i32,
    },
    Inspect {
        value: i32,
    },
    /// Another program removes the expiry of the group.
    Persist,
    /// Another program deletes the group.
    Remove,
    /// Another program writes a number.
    SetForeign,
}

fn moves() -> impl Strategy<Value = Move> {
    let (owner, value, lease) = (0..3u8, 0..2i32, 1..4u32);
    prop_oneof![
        8 => (owner.clone(), value.clone(), 1..4u32, lease.clone()).prop_map(
            |(owner, value, count, lease)| Move::Acquire { owner, value, count, lease }
        ),
        6 => (owner.clone(), value.clone(), 0..3u32, 0..4u32).prop_map(
            |(owner, value, keep, lease)| Move::Release { owner, value, keep, lease }
        ),
        2 => (owner.clone(), value.clone(), 0..2u32)
            .prop_map(|(owner, value, keep)| Move::Undo { owner, value, keep }),
        4 => (owner, value.clone(), lease)
            .prop_map(|(owner, value, lease)| Move::Renew { owner, value, lease: lease - 1 }),
        3 => (1..3u32).prop_map(|time| Move::Advance { time }),
        2 => value.clone().prop_map(|value| Move::Force { value }),
        2 => value.prop_map(|value| Move::Inspect { value }),
        1 => Just(Move::Persist),
        1 => Just(Move::Remove),
        1 => Just(Move::SetForeign),
    ]
}

#[test]
fn lua_and_rules_agree() {
    assert_equivalent(moves(), async |harness, one| {
        let kind = |value: i32| Group::new("", "name", &GroupValue::from(value));
        let of = |owner, value| hold(owner, kind(value));
        match one.clone() {
            Move::Acquire {
                owner,
                value,
                count,
                lease: n,
            } => {
                let hold = of(owner, value);
                let params = AcquireParams::without_waiting(&hold, count, lease(n));
                let _ = harness.step(&kind(value).acquire(params)).await;
            }
            Move::Release {
                owner,
                value,
                keep,
                lease,
            } => {
                let _ = harness.release(&of(owner, value), keep, lease).await;
            }
            Move::Undo { owner, value, keep } => {
                let hold = of(owner, value);
                let end = Instant::now() + lease(1).duration();
                hold.add_guard(end, false, None).unwrap();
                let _ = harness.step(&hold.kind.undo(&hold, keep).unwrap()).await;
            }
            Move::Renew {
                owner,
                value,
                lease,
            } => {
                harness.renew(&of(owner, value), lease).await;
            }
            Move::Advance { time: n } => harness.advance(time(n)).await,
            Move::Force { value } => {
                let _ = harness.step(&kind(value).force()).await;
            }
            Move::Inspect { value } => {
                let _ = harness.step(&kind(value).inspect()).await;
            }
            Move::Persist => harness.persist("name").await,
            Move::Remove => harness.remove("name").await,
            Move::SetForeign => harness.set_foreign("name", 5).await,
        }
    });
}
