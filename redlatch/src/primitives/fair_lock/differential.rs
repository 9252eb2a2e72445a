//! Compares the fair lock's Lua scripts and rules over random histories, which must cover every
//! event in a queue.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::Duration;

use proptest::prelude::*;

use super::Fair;
use super::rules::{Force, Release};
use crate::hold::Hold;
use crate::lease::Lease;
use crate::name::CandidateKeys;
use crate::primitives::differential::{Differential, assert_equivalent, hold, lease, time};
use crate::primitives::inspect::{InspectNames, ObjectState, Waiter};
use crate::primitives::lock::{AcquireParams, Rules as _};
use crate::step::Outcome;

#[derive(Debug, Clone)]
enum Move {
    Acquire(AcquireMove),
    /// Made by the holder or a waiter, so that histories make progress.
    AcquireNext(AcquireMove),
    Release {
        owner: u8,
        keep: u32,
        lease: u32,
    },
    Renew {
        owner: u8,
        lease: u32,
    },
    Advance {
        time: u32,
    },
    Force,
    Inspect,
    /// Which waiters are subscribed from now on: one bit per owner, one for waiters that do not queue.
    Subscribe(u8),
    SetForeign,
}

#[derive(Debug, Clone)]
struct AcquireMove {
    owner: u8,
    count: u32,
    lease: u32,
    waits: bool,
    wait_time: u32,
}

const OWNERS: u8 = 5;

fn moves() -> impl Strategy<Value = Move> {
    let (owner, lease) = (0..OWNERS, 1..4u32);
    let count = prop_oneof![6 => Just(1u32), 1 => 2..4u32];
    let waits = prop_oneof![4 => Just(true), 1 => Just(false)];
    // Odd, so that half of it is not a multiple of the unit by which times are distinguished.
    let wait_time = prop_oneof![Just(1u32), Just(3u32)];
    let args = (owner.clone(), count, lease.clone(), waits, wait_time).prop_map(
        |(owner, count, lease, waits, wait_time)| AcquireMove {
            owner,
            count,
            lease,
            waits,
            wait_time,
        },
    );
    prop_oneof![
        30 => args.clone().prop_map(Move::Acquire),
        10 => args.prop_map(Move::AcquireNext),
        20 => (owner.clone(), 0..3u32, 0..4u32)
            .prop_map(|(owner, keep, lease)| Move::Release { owner, keep, lease }),
        3 => (owner, lease).prop_map(|(owner, lease)| Move::Renew { owner, lease: lease - 1 }),
        5 => (1..10u32).prop_map(|time| Move::Advance { time }),
        1 => Just(Move::Force),
        1 => Just(Move::Inspect),
        4 => (0..2u8 << OWNERS).prop_map(Move::Subscribe),
        1 => Just(Move::SetForeign),
    ]
}

/// Distinguishable from the wait times, and shorter than most of them.
fn grace() -> Lease {
    lease(1)
}

fn of(owner: u8) -> Hold {
    hold(owner, Fair::new("", "name"))
}

async fn subscribe(harness: &mut Differential, owners: u8) {
    let others = of(0).object.channel().to_owned();
    let channels =
        (0..OWNERS).map(|owner| Fair::new("", "name").keys.waiter_channel(&of(owner).field));
    let all = channels.chain([others]).enumerate();
    let subscribed = all.filter(|(bit, _)| owners & (1 << bit) != 0);
    harness
        .subscribe_only(subscribed.map(|(_, channel)| channel))
        .await;
}

/// Returns the queue.
async fn waiters(harness: &mut Differential) -> Vec<Waiter> {
    let names = &[CandidateKeys::new("name".into())];
    let seen = harness.step(&InspectNames { names }).await;
    match seen.unwrap_or_default().pop() {
        Some(Ok(Some(ObjectState::Lock { queue, .. }))) => queue,
        _ => Vec::new(),
    }
}

async fn acquire(harness: &mut Differential, args: &AcquireMove, owner: u8) -> Option<Outcome> {
    let wait_time: Duration = time(args.wait_time);
    let kind = Fair {
        wait_time,
        grace_period: grace().duration(),
        ..Fair::new("", "name")
    };
    let params = AcquireParams {
        hold: &of(owner),
        count: args.count,
        lease: lease(args.lease),
        waits: args.waits,
    };
    harness.step(&kind.acquire(params)).await.ok()
}

#[test]
fn lua_and_rules_agree() {
    let seen = RefCell::new(BTreeMap::<&str, u32>::new());
    let count = |what: &'static str| *seen.borrow_mut().entry(what).or_default() += 1;
    let has_subscribed = RefCell::new(false);
    assert_equivalent(moves(), async |harness, one| {
        if !has_subscribed.replace(true) {
            subscribe(harness, u8::MAX).await;
        }
        let fair = Fair::new("", "name");
        let keys = &*fair.keys;
        let queue = waiters(harness).await;
        let waits = |owner: u8| {
            let field = of(owner).field;
            queue.iter().position(|waiter| waiter.owner == *field)
        };
        match one {
            Move::Acquire(args) => {
                let before = waits(args.owner);
                match (acquire(harness, args, args.owner).await, before) {
                    (Some(Outcome::Done(())), Some(0)) => count("the head took it"),
                    (Some(Outcome::Done(())), _) => count("it was taken past no queue"),
                    (Some(Outcome::Wait(_)), Some(0)) => count("the head retried"),
                    (Some(Outcome::Wait(_)), Some(_)) => count("another waiter retried"),
                    (Some(Outcome::Wait(_)), None) if queue.len() > 1 => count("a long queue"),
                    _ => {}
                }
            }
            Move::AcquireNext(args) => {
                let next = (0..OWNERS).find(|&owner| waits(owner) == Some(0));
                if let Some(next) = next
                    && let Some(Outcome::Done(())) = acquire(harness, args, next).await
                {
                    count(match queue.len() {
                        1 => "the only one in the queue took it",
                        _ => "the head took it before others",
                    });
                }
            }
            Move::Release {
                owner,
                keep,
                lease: n,
            } => {
                let step = Release {
                    keys,
                    hold: &of(*owner),
                    keep: *keep,
                    lease: (*n > 0).then(|| lease(*n)),
                    grace: grace(),
                };
                match (harness.step(&step).await, waits(*owner), queue.len()) {
                    (Ok(false), Some(0), 2..) if *keep == 0 => count("the head gave up"),
                    (Ok(false), Some(1..), 3..) if *keep == 0 => count("one in the middle gave up"),
                    (Ok(true), _, 1..) if *keep == 0 => count("released to a queue"),
                    _ => {}
                }
            }
            Move::Renew { owner, lease: n } => {
                harness.renew(&of(*owner), *n).await;
            }
            Move::Advance { time: n } => {
                harness.advance(time(*n)).await;
                let left = waiters(harness).await;
                match queue.len() - left.len() {
                    0 => {}
                    1 => count("the time of one has passed"),
                    _ => count("the time of several has passed"),
                }
            }
            Move::Force => {
                let force = Force {
                    keys,
                    grace: grace(),
                };
                let _ = harness.step(&force).await;
            }
            Move::Inspect => {
                let _ = harness.step(&fair.inspect()).await;
            }
            Move::Subscribe(owners) => subscribe(harness, *owners).await,
            Move::SetForeign => harness.set_foreign("name", 5).await,
        }
    });
    let seen = seen.into_inner();
    println!("{seen:#?}");
    for what in [
        "the head took it",
        "it was taken past no queue",
        "the head retried",
        "another waiter retried",
        "a long queue",
        "the only one in the queue took it",
        "the head took it before others",
        "the head gave up",
        "one in the middle gave up",
        "released to a queue",
        "the time of one has passed",
        "the time of several has passed",
    ] {
        assert!(seen.get(what).is_some_and(|&times| times > 5), "{what}");
    }
}
