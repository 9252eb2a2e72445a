//! Compares the lock's Lua scripts and rules over random histories.

use proptest::prelude::*;

use super::rules::Release;
use crate::name::Family;
use crate::primitives::handle::{Ask, Reentrant, Rules as _};
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
        lease: u32,
    },
    Renew {
        owner: u8,
        lease: u32,
    },
    Pass {
        time: u32,
    },
    Force,
    Inspect,
    /// Another program removes the lock's expiry.
    Persist,
    Plant,
}

fn moves() -> impl Strategy<Value = Move> {
    let (owner, count, lease) = (0..3u8, 1..4u32, 1..4u32);
    prop_oneof![
        8 => (owner.clone(), count, lease.clone())
            .prop_map(|(owner, count, lease)| Move::Acquire { owner, count, lease }),
        6 => (owner.clone(), 0..3u32, 0..4u32)
            .prop_map(|(owner, keep, lease)| Move::Release { owner, keep, lease }),
        4 => (owner, lease).prop_map(|(owner, lease)| Move::Renew { owner, lease: lease - 1 }),
        2 => (1..3u32).prop_map(|time| Move::Pass { time }),
        2 => Just(Move::Force),
        2 => Just(Move::Inspect),
        1 => Just(Move::Persist),
        1 => Just(Move::Plant),
    ]
}

#[test]
fn lua_and_rules_agree() {
    agree(moves(), async |twin, one| {
        let of = |owner| hold(Family::Lock, owner, Reentrant);
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
                let _ = twin.step(&Reentrant.acquire(ask)).await;
            }
            Move::Release {
                owner,
                keep,
                lease: n,
            } => {
                let hold = of(owner);
                let step = Release::new(&hold, keep, (n > 0).then(|| lease(n)));
                let _ = twin.step(&step).await;
            }
            Move::Renew { owner, lease: n } => {
                twin.renew(&of(owner), n).await;
            }
            Move::Pass { time: n } => twin.pass(time(n)).await,
            Move::Force => {
                let _ = twin.step(&Reentrant.force(&of(0).place)).await;
            }
            Move::Inspect => {
                let _ = twin.step(&Reentrant.inspect(&of(0).place)).await;
            }
            Move::Persist => twin.persist("name").await,
            Move::Plant => twin.plant("name", 5).await,
        }
    });
}
