//! Compares the fair lock's Lua scripts and rules over random histories. Checks that the histories
//! cover the cases of the queue.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::Duration;

use proptest::prelude::*;

use super::Fair;
use super::rules;
use crate::error::Result;
use crate::hold::HoldKind as _;
use crate::hold::{AcquireParams, Handoff, Hold, ReleaseParams, To};
use crate::lease::Lease;
use crate::locks::Reentrant;
use crate::observe::inspect::{ObjectState, Waiter};
use crate::session::check_handoff;
use crate::step::Outcome;
use crate::step::differential::{
    Differential, HandoffMove, assert_covered, assert_equivalent, hold, lease, time,
};

#[derive(Debug, Clone)]
enum Move {
    Acquire(AcquireMove),
    /// An acquisition by the head of the queue, so that histories make progress.
    AcquireAsHead(AcquireMove),
    /// So many owners ask for the lock in turn, beginning with this one, so that a queue forms. `afresh`: when the store has
    /// lost all, and all owners are connected.
    Gather {
        first: u8,
        number: u8,
        afresh: bool,
    },
    Release(ReleaseMove),
    /// The holder releases the lock.
    ReleaseHeld,
    /// The waiter at this place of the queue gives up.
    GiveUp {
        place: usize,
    },
    Renew {
        owner: u8,
        lease: u32,
    },
    Advance {
        time: u32,
    },
    Force,
    /// Steps of another kind of lock with the same key.
    Handoff(HandoffMove),
    CheckHandoff {
        owner: u8,
    },
    /// A release of that kind, and the step behind it.
    ServeQueue {
        owner: u8,
    },
    Inspect,
    /// Subscribes only to these channels from now on: one bit per owner, and the next one for the lock's
    /// channel, on which waiters that do not queue are woken.
    Subscribe(u8),
    /// Sets the lock's key to a number, as another program might.
    SetForeign,
}

/// An acquisition of a fair object by one of several parties.
#[derive(Debug, Clone)]
pub(crate) struct AcquireMove {
    pub(crate) party: u8,
    count: u32,
    lease: u32,
    waits: bool,
    pub(crate) wait_time: u32,
    /// Whether the owner accepts a grant.
    announces: bool,
}

impl AcquireMove {
    /// Returns the one that most histories need: any party joins a queue with it.
    pub(crate) fn waiting(announces: bool) -> AcquireMove {
        AcquireMove {
            party: 0,
            count: 1,
            lease: 2,
            waits: true,
            wait_time: 3,
            announces,
        }
    }

    /// Returns those of so many parties.
    pub(crate) fn any(parties: u8) -> impl Strategy<Value = AcquireMove> + Clone {
        let count = prop_oneof![6 => Just(1u32), 1 => 2..4u32];
        let waits = prop_oneof![4 => Just(true), 1 => Just(false)];
        // Odd: the rules compare remaining times, which are close to multiples of the unit, with half the wait time. The
        // two are never close, so the real time that passes between the two sides changes no result.
        let wait_time = prop_oneof![Just(1u32), Just(3u32)];
        let args = (0..parties, count, 1..4u32, waits, wait_time, any::<bool>());
        args.prop_map(
            |(party, count, lease, waits, wait_time, announces)| AcquireMove {
                party,
                count,
                lease,
                waits,
                wait_time,
                announces,
            },
        )
    }

    /// Runs it for a party with this hold.
    pub(crate) async fn run(
        &self,
        harness: &mut Differential,
        party: u8,
        hold: &Hold,
    ) -> Option<Outcome> {
        let params = AcquireParams {
            hold,
            count: self.count,
            lease: lease(self.lease),
            waits: self.waits,
            // More than a Lua number has digits for.
            request_number: i64::from(self.announces) * (i64::MAX - i64::from(party)),
        };
        harness.step(&hold.kind.acquire(params)).await.ok()
    }
}

#[derive(Debug, Clone)]
struct ReleaseMove {
    owner: u8,
    keep: u32,
    lease: u32,
}

const OWNERS: u8 = 5;

fn moves() -> impl Strategy<Value = Move> {
    let (owner, lease) = (0..OWNERS, 1..4u32);
    let args = AcquireMove::any(OWNERS);
    prop_oneof![
        30 => args.clone().prop_map(Move::Acquire),
        20 => args.prop_map(Move::AcquireAsHead),
        12 => (owner.clone(), 2..=OWNERS, any::<bool>())
            .prop_map(|(first, number, afresh)| Move::Gather { first, number, afresh }),
        10 => (owner.clone(), 0..3u32, 0..4u32)
            .prop_map(|(owner, keep, lease)| Move::Release(ReleaseMove { owner, keep, lease })),
        14 => Just(Move::ReleaseHeld),
        9 => (0..3usize).prop_map(|place| Move::GiveUp { place }),
        5 => HandoffMove::to_no_waiter().prop_map(Move::Handoff),
        3 => (owner, lease).prop_map(|(owner, lease)| Move::Renew { owner, lease: lease - 1 }),
        9 => (1..10u32).prop_map(|time| Move::Advance { time }),
        1 => Just(Move::Force),
        14 => HandoffMove::to_waiter().prop_map(Move::Handoff),
        2 => (0..OWNERS).prop_map(|owner| Move::CheckHandoff { owner }),
        12 => (0..OWNERS).prop_map(|owner| Move::ServeQueue { owner }),
        1 => Just(Move::Inspect),
        4 => (0..2u8 << OWNERS).prop_map(Move::Subscribe),
        1 => Just(Move::SetForeign),
    ]
}

/// Returns the grace period: a little shorter than the shortest wait time, so that the two never end together.
fn grace() -> Lease {
    lease(1)
}

/// A hold of the re-entrant lock with the same key.
fn plain_hold_of(owner: u8) -> Hold {
    hold(owner, Reentrant::new("", "name"))
}

fn hold_of(owner: u8) -> Hold {
    hold(owner, Fair::new("", "name"))
}

async fn subscribe(harness: &mut Differential, owners: u8) {
    let lock_channel = hold_of(0).object.channel().to_owned();
    let waiter_channels = (0..OWNERS).map(|owner| {
        Fair::new("", "name")
            .keys
            .waiter_channel(&hold_of(owner).field)
    });
    let channels = waiter_channels.chain([lock_channel]).enumerate();
    let subscribed = channels.filter(|(bit, _)| owners & (1 << bit) != 0);
    harness
        .subscribe_only(subscribed.map(|(_, channel)| channel))
        .await;
}

/// Returns the waiters in the queue.
fn waiters(harness: &mut Differential) -> Vec<Waiter> {
    harness
        .look()
        .map_or_else(Vec::new, |state| state.queue().to_vec())
}

async fn acquire(harness: &mut Differential, args: &AcquireMove, owner: u8) -> Option<Outcome> {
    let wait_time: Duration = time(args.wait_time);
    let kind = Fair::new("", "name").with_times(wait_time, grace().duration());
    args.run(harness, owner, &hold(owner, kind)).await
}

async fn release(harness: &mut Differential, args: &ReleaseMove) -> Result<bool> {
    let (keys, hold) = (&Fair::new("", "name").keys, &hold_of(args.owner));
    let (keep, lease) = (args.keep, (args.lease > 0).then(|| lease(args.lease)));
    let params = ReleaseParams { hold, keep, lease };
    harness.step(&rules::release(keys, params, grace())).await
}

#[test]
fn lua_and_rules_agree() {
    let covered = RefCell::new(BTreeMap::<&str, u32>::new());
    let record = |case: &'static str| *covered.borrow_mut().entry(case).or_default() += 1;
    let has_subscribed = RefCell::new(false);
    assert_equivalent(moves(), async |harness, next_move| {
        if !has_subscribed.replace(true) {
            subscribe(harness, u8::MAX).await;
        }
        let fair = Fair::new("", "name");
        let keys = &*fair.keys;
        let queue = waiters(harness);
        let position = |owner: u8| {
            let field = hold_of(owner).field;
            queue.iter().position(|waiter| waiter.owner == *field)
        };
        match next_move {
            Move::Acquire(args) => {
                let before = position(args.party);
                match (acquire(harness, args, args.party).await, before) {
                    (Some(Outcome::Done(_)), Some(0)) => record("the head acquired the lock"),
                    (Some(Outcome::Done(_)), _) => {
                        record("an owner that was not the head acquired the lock")
                    }
                    (Some(Outcome::Wait(_)), Some(0)) => record("the head retried"),
                    (Some(Outcome::Wait(_)), Some(_)) => record("another waiter retried"),
                    (Some(Outcome::Wait(_)), None) if queue.len() > 1 => {
                        record("an owner joined a queue of two or more")
                    }
                    _ => {}
                }
            }
            Move::AcquireAsHead(args) => {
                let head = (0..OWNERS).find(|&owner| position(owner) == Some(0));
                if let Some(head) = head
                    && let Some(Outcome::Done(_)) = acquire(harness, args, head).await
                {
                    record(match queue.len() {
                        1 => "the only waiter acquired the lock",
                        _ => "the head acquired the lock before other waiters",
                    });
                }
            }
            Move::Gather {
                first,
                number,
                afresh,
            } => {
                if *afresh {
                    for key in rules::all_keys(keys) {
                        harness.remove(key).await;
                    }
                    subscribe(harness, u8::MAX).await;
                }
                let args = AcquireMove::waiting(first % 2 == 0);
                for next in 0..*number {
                    acquire(harness, &args, (first + next) % OWNERS).await;
                }
            }
            Move::Release(_) | Move::ReleaseHeld => {
                let state = harness.look();
                let holders = state.iter().flat_map(ObjectState::holders);
                let fields: Vec<_> = holders.map(|it| it.owner.to_string()).collect();
                let holder =
                    (0..OWNERS).find(|&owner| fields.contains(&hold_of(owner).field.to_string()));
                let args = match (next_move, holder) {
                    (Move::Release(args), _) => args.clone(),
                    (_, Some(owner)) => ReleaseMove {
                        owner,
                        keep: 0,
                        lease: 0,
                    },
                    _ => return,
                };
                let released = release(harness, &args).await;
                if let (Ok(true), 0, 1..) = (released, args.keep, queue.len()) {
                    record("the lock was released while waiters were queued");
                    if waiters(harness).first() != queue.first() {
                        record("a release granted the lock");
                    }
                }
            }
            Move::GiveUp { place } => {
                let waiter = (0..OWNERS).find(|&owner| position(owner) == Some(*place));
                if let Some(owner) = waiter {
                    let (keep, lease) = (0, 0);
                    let args = ReleaseMove { owner, keep, lease };
                    match (release(harness, &args).await, place, queue.len()) {
                        (Ok(false), 0, 2..) => record("the head gave up"),
                        (Ok(false), 1.., 3..) => record("a waiter behind the head gave up"),
                        _ => {}
                    }
                }
            }
            Move::Renew { owner, lease: n } => {
                harness.renew(&hold_of(*owner), *n).await;
            }
            Move::Advance { time: n } => {
                harness.advance(time(*n)).await;
                let left = waiters(harness);
                match queue.len() - left.len() {
                    0 => {}
                    1 => record("one waiter timed out"),
                    _ => record("several waiters timed out"),
                }
            }
            Move::Force => {
                let force = rules::force(keys, grace());
                let _ = harness.step(&force).await;
            }
            Move::Handoff(handoff) => {
                let to_waiter = matches!(handoff.to, To::Waiter { .. });
                let hold = |owner| match to_waiter {
                    true => plain_hold_of(owner),
                    false => hold_of(owner),
                };
                match harness.handoff(handoff, hold).await {
                    Ok(Handoff::Done { .. }) if !to_waiter && !queue.is_empty() => {
                        record("another owner replaced the holder while waiters were queued");
                    }
                    Ok(Handoff::Kept { others }) if others.in_queue => {
                        record("a handoff left the lock to the queue");
                    }
                    _ => {}
                }
            }
            Move::CheckHandoff { owner } => {
                let hold = &plain_hold_of(*owner);
                let object = &hold.object;
                let hold = Some(hold);
                let _ = harness.step(&check_handoff(object, hold)).await;
            }
            Move::ServeQueue { owner } => {
                let hold = plain_hold_of(*owner);
                let released = harness.release(&hold, 0, 0).await;
                let served = harness.step(&rules::serve_queue(hold.object.clone())).await;
                if let (Ok(true), Ok(())) = (released, served)
                    && waiters(harness).first() != queue.first()
                {
                    record("the lock was granted behind a release of another kind");
                }
            }
            Move::Inspect => {
                let _ = harness.step(&fair.inspect()).await;
            }
            Move::Subscribe(owners) => subscribe(harness, *owners).await,
            Move::SetForeign => harness.set_foreign("name", 5).await,
        }
    });
    let cases = [
        "the head acquired the lock",
        "an owner that was not the head acquired the lock",
        "the head retried",
        "another waiter retried",
        "an owner joined a queue of two or more",
        "the only waiter acquired the lock",
        "the head acquired the lock before other waiters",
        "the head gave up",
        "a waiter behind the head gave up",
        "the lock was released while waiters were queued",
        "a release granted the lock",
        "a handoff left the lock to the queue",
        "the lock was granted behind a release of another kind",
        "another owner replaced the holder while waiters were queued",
        "one waiter timed out",
        "several waiters timed out",
    ];
    assert_covered(&covered.into_inner(), &cases);
}
