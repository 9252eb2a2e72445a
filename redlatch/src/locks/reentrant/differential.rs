//! Compares the lock's Lua scripts and rules over random histories.

use proptest::prelude::*;

use crate::hold::AcquireParams;
use crate::hold::HoldKind as _;
use crate::locks::Reentrant;
use crate::session::check_handoff;
use crate::step::differential::{HandoffMove, assert_equivalent, hold, lease, time};

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
    Handoff(HandoffMove),
    Renew {
        owner: u8,
        lease: u32,
    },
    Advance {
        time: u32,
    },
    Force,
    Inspect,
    CheckHandoff {
        owner: u8,
    },
    /// A client subscribes to the lock's channel, or none does.
    Subscribe {
        subscribes: bool,
    },
    /// Another program removes the lock's expiry.
    Persist,
    SetForeign,
}

fn moves() -> impl Strategy<Value = Move> {
    let (owner, count, lease) = (0..3u8, 1..4u32, 1..4u32);
    prop_oneof![
        8 => (owner.clone(), count, lease.clone())
            .prop_map(|(owner, count, lease)| Move::Acquire { owner, count, lease }),
        6 => (owner.clone(), 0..3u32, 0..4u32)
            .prop_map(|(owner, keep, lease)| Move::Release { owner, keep, lease }),
        7 => HandoffMove::any().prop_map(Move::Handoff),
        4 => (owner, lease).prop_map(|(owner, lease)| Move::Renew { owner, lease: lease - 1 }),
        2 => (1..3u32).prop_map(|time| Move::Advance { time }),
        2 => Just(Move::Force),
        2 => Just(Move::Inspect),
        1 => (0..3u8).prop_map(|owner| Move::CheckHandoff { owner }),
        1 => any::<bool>().prop_map(|subscribes| Move::Subscribe { subscribes }),
        1 => Just(Move::Persist),
        1 => Just(Move::SetForeign),
    ]
}

#[test]
fn lua_and_rules_agree() {
    assert_equivalent(moves(), async |harness, one| {
        let kind = Reentrant::new("", "name");
        let of = |owner| hold(owner, kind.clone());
        match one.clone() {
            Move::Acquire {
                owner,
                count,
                lease: n,
            } => {
                let hold = of(owner);
                let params = AcquireParams::without_waiting(&hold, count, lease(n));
                let _ = harness.step(&kind.acquire(params)).await;
            }
            Move::Release {
                owner,
                keep,
                lease: n,
            } => {
                let _ = harness.release(&of(owner), keep, n).await;
            }
            Move::Handoff(handoff) => {
                let _ = harness.handoff(&handoff, of).await;
            }
            Move::Renew { owner, lease: n } => {
                harness.renew(&of(owner), n).await;
            }
            Move::Advance { time: n } => harness.advance(time(n)).await,
            Move::Force => {
                let _ = harness.step(&kind.force()).await;
            }
            Move::Inspect => {
                let _ = harness.step(&kind.inspect()).await;
            }
            Move::CheckHandoff { owner } => {
                let hold = &of(owner);
                let _ = harness.step(&check_handoff(&hold.object, Some(hold))).await;
            }
            Move::Subscribe { subscribes } => {
                let channel = kind.object().channel().to_owned();
                let channels = subscribes.then_some(channel);
                harness.subscribe_only(channels).await;
            }
            Move::Persist => harness.persist("name").await,
            Move::SetForeign => harness.set_foreign("name", 5).await,
        }
    });
}
