//! Compares the fenced lock's Lua scripts and rules over random histories. Release, renewal and
//! inspection are the lock's, but run on other states here.

use proptest::prelude::*;

use super::Fenced;
use super::rules::{Advance, Current, DeleteToken};
use crate::name::Family;
use crate::primitives::handle::{Ask, Rules as _};
use crate::primitives::lock::rules::Release;
use crate::primitives::twin::{agree, hold, lease, time};

#[derive(Debug, Clone)]
enum Move {
    Acquire {
        owner: u8,
        count: u32,
        lease: u32,
    },
    Release {
        owner: u8,
        keep: u32,
    },
    Renew {
        owner: u8,
        lease: u32,
    },
    Pass {
        time: u32,
    },
    Force,
    Current,
    Advance {
        at_least: i64,
    },
    Delete,
    /// Another program writes another token.
    Plant {
        token: i64,
    },
}

fn moves() -> impl Strategy<Value = Move> {
    let (owner, lease) = (0..3u8, 1..4u32);
    prop_oneof![
        8 => (owner.clone(), 1..4u32, lease.clone())
            .prop_map(|(owner, count, lease)| Move::Acquire { owner, count, lease }),
        6 => (owner.clone(), 0..3u32).prop_map(|(owner, keep)| Move::Release { owner, keep }),
        2 => (owner, lease).prop_map(|(owner, lease)| Move::Renew { owner, lease: lease - 1 }),
        2 => (1..3u32).prop_map(|time| Move::Pass { time }),
        1 => Just(Move::Force),
        2 => Just(Move::Current),
        2 => prop_oneof![0..5i64, 0..i64::MAX, Just(i64::MAX - 1), Just((1 << 53) + 1)]
            .prop_map(|at_least| Move::Advance { at_least }),
        1 => Just(Move::Delete),
        1 => prop_oneof![any::<i64>(), Just(i64::MAX), Just(1 << 53)]
            .prop_map(|token| Move::Plant { token }),
    ]
}

#[test]
fn lua_and_rules_agree() {
    agree(moves(), async |twin, one| {
        let of = |owner| hold(Family::Fenced, owner, Fenced);
        match *one {
            Move::Acquire {
                owner,
                count,
                lease: n,
            } => {
                let ask = Ask {
                    hold: &of(owner),
                    count,
                    lease: lease(n),
                    waits: false,
                };
                let _ = twin.step(&Fenced.acquire(ask)).await;
            }
            Move::Release { owner, keep } => {
                let hold = of(owner);
                twin.step(&Release::new(&hold, keep, None)).await.unwrap();
            }
            Move::Renew { owner, lease: n } => {
                twin.renew(&of(owner), n).await;
            }
            Move::Pass { time: n } => twin.pass(time(n)).await,
            Move::Force => {
                twin.step(&Fenced.force(&of(0).place)).await.unwrap();
            }
            Move::Plant { token } => {
                twin.plant("redisson_lock_token:{name}", token).await;
            }
            Move::Advance { at_least } => {
                let place = &of(0).place;
                twin.step(&Advance { place, at_least }).await.unwrap();
            }
            Move::Delete => {
                let place = of(0).place;
                twin.step(&DeleteToken { place }).await.unwrap();
            }
            Move::Current => {
                let place = &of(0).place;
                twin.step(&Current { place }).await.unwrap();
            }
        }
    });
}
