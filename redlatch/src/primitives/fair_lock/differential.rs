//! Compares the fair lock's Lua scripts and rules over random histories, which must cover every
//! event in a queue.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::Duration;

use proptest::prelude::*;

use super::Fair;
use super::rules::{Force, Release, Waiting};
use crate::hold::Hold;
use crate::lease::Lease;
use crate::name::Family;
use crate::primitives::handle::{Ask, Rules as _};
use crate::primitives::twin::{Twin, agree, hold, lease, time};
use crate::step::Outcome;

#[derive(Debug, Clone)]
enum Move {
    Acquire(Wish),
    /// Made by the holder or a waiter, so that histories make progress.
    Serve(Wish),
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
    Waiting,
    /// Which waiters are subscribed from now on: one bit per owner, one for waiters that do not queue.
    Hear(u8),
    Plant,
}

#[derive(Debug, Clone)]
struct Wish {
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
    let wish = (owner.clone(), count, lease.clone(), waits, wait_time).prop_map(
        |(owner, count, lease, waits, wait_time)| Wish {
            owner,
            count,
            lease,
            waits,
            wait_time,
        },
    );
    prop_oneof![
        30 => wish.clone().prop_map(Move::Acquire),
        10 => wish.prop_map(Move::Serve),
        20 => (owner.clone(), 0..3u32, 0..4u32)
            .prop_map(|(owner, keep, lease)| Move::Release { owner, keep, lease }),
        3 => (owner, lease).prop_map(|(owner, lease)| Move::Renew { owner, lease: lease - 1 }),
        5 => (1..10u32).prop_map(|time| Move::Pass { time }),
        1 => Just(Move::Force),
        1 => Just(Move::Inspect),
        3 => Just(Move::Waiting),
        4 => (0..2u8 << OWNERS).prop_map(Move::Hear),
        1 => Just(Move::Plant),
    ]
}

/// Distinguishable from the wait times, and shorter than most of them.
fn grace() -> Lease {
    lease(1)
}

fn of(owner: u8) -> Hold {
    hold(Family::Fair, owner, Fair::default())
}

async fn hear(twin: &mut Twin, who: u8) {
    let others = of(0).place.channel().to_owned();
    let channels = (0..OWNERS).map(|owner| of(owner).own.to_string());
    let all = channels.chain([others]).enumerate();
    let heard = all.filter(|(bit, _)| who & (1 << bit) != 0);
    twin.hear_only(heard.map(|(_, channel)| channel)).await;
}

async fn acquire(twin: &mut Twin, wish: &Wish, owner: u8) -> Option<Outcome> {
    let wait_time: Duration = time(wish.wait_time);
    let kind = Fair {
        wait_time,
        grace_period: grace().duration(),
    };
    let ask = Ask {
        hold: &of(owner),
        count: wish.count,
        lease: lease(wish.lease),
        waits: wish.waits,
    };
    twin.step(&kind.acquire(ask)).await.ok()
}

#[test]
fn lua_and_rules_agree() {
    let seen = RefCell::new(BTreeMap::<&str, u32>::new());
    let saw = |what: &'static str| *seen.borrow_mut().entry(what).or_default() += 1;
    let listening = RefCell::new(false);
    agree(moves(), async |twin, one| {
        if !listening.replace(true) {
            hear(twin, u8::MAX).await;
        }
        let place = &of(0).place;
        let queue = twin.step(&Waiting { place }).await.unwrap_or_default();
        let waits = |owner: u8| queue.iter().position(|other| **other == *of(owner).field);
        match one {
            Move::Acquire(wish) => {
                let before = waits(wish.owner);
                match (acquire(twin, wish, wish.owner).await, before) {
                    (Some(Outcome::Done(())), Some(0)) => saw("the head took it"),
                    (Some(Outcome::Done(())), _) => saw("it was taken past no queue"),
                    (Some(Outcome::Wait(_)), Some(0)) => saw("the head retried"),
                    (Some(Outcome::Wait(_)), Some(_)) => saw("another waiter retried"),
                    (Some(Outcome::Wait(_)), None) if queue.len() > 1 => saw("a long queue"),
                    _ => {}
                }
            }
            Move::Serve(wish) => {
                let next = (0..OWNERS).find(|&owner| waits(owner) == Some(0));
                if let Some(next) = next
                    && let Some(Outcome::Done(())) = acquire(twin, wish, next).await
                {
                    saw(match queue.len() {
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
                    hold: &of(*owner),
                    keep: *keep,
                    lease: (*n > 0).then(|| lease(*n)),
                    grace: grace(),
                };
                match (twin.step(&step).await, waits(*owner), queue.len()) {
                    (Ok(false), Some(0), 2..) if *keep == 0 => saw("the head gave up"),
                    (Ok(false), Some(1..), 3..) if *keep == 0 => saw("one in the middle gave up"),
                    (Ok(true), _, 1..) if *keep == 0 => saw("released to a queue"),
                    _ => {}
                }
            }
            Move::Renew { owner, lease: n } => {
                twin.renew(&of(*owner), *n).await;
            }
            Move::Pass { time: n } => {
                twin.pass(time(*n)).await;
                let left = twin.step(&Waiting { place }).await.unwrap_or_default();
                match queue.len() - left.len() {
                    0 => {}
                    1 => saw("the time of one has passed"),
                    _ => saw("the time of several has passed"),
                }
            }
            Move::Force => {
                let force = Force {
                    place,
                    grace: grace(),
                };
                let _ = twin.step(&force).await;
            }
            Move::Inspect => {
                let _ = twin.step(&Fair::default().inspect(place)).await;
            }
            Move::Waiting => {
                let again = twin.step(&Waiting { place }).await.unwrap_or_default();
                assert_eq!(again, queue, "looking changes nothing");
            }
            Move::Hear(who) => hear(twin, *who).await,
            Move::Plant => twin.plant("name", 5).await,
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
