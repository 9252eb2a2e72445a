//! Compares the Lua scripts and rules of fair objects that several owners may hold over random
//! histories. Checks that the histories cover the cases of the queue.

use std::cell::RefCell;
use std::collections::BTreeMap;

use proptest::prelude::*;

use super::read_write::sides;
use super::semaphore::permits;
use super::{FairShared, Part};
use crate::hold::{Hold, ReleaseParams};
use crate::locks::Holder;
use crate::locks::fair::differential::AcquireMove;
use crate::locks::fair::{FairTimes, all_keys};
use crate::name::{is_writer_field, owner_of, permits_field, permits_of, writer_field};
use crate::observe::inspect::{ObjectState, Waiter};
use crate::step::Outcome;
use crate::step::differential::{
    Differential, TIME_UNIT, assert_covered, assert_equivalent, hold_with, lease, time,
};

#[derive(Debug, Clone)]
enum Move {
    Acquire(AcquireMove),
    /// An acquisition of an object of the other kind.
    AcquireOther(AcquireMove),
    /// An acquisition by the head of the queue, so that histories make progress.
    AcquireAsHead(AcquireMove),
    /// So many parties ask for the object in turn, beginning with this one, so that a queue forms.
    Gather {
        first: u8,
        number: u8,
    },
    Release {
        party: u8,
        keep: u32,
        lease: u32,
    },
    /// A waiter for an object of the other kind, which the head has overtaken, gives up before another one.
    GiveUpOther,
    /// A party that excludes others holds the object, or waits for it before two others, and releases it. So several are
    /// served in one step. `afresh`: when the store has lost all, and all parties are connected.
    ServeSeveral {
        how: Several,
        afresh: bool,
    },
    /// A holder releases the object.
    ReleaseHeld {
        place: usize,
    },
    /// The waiter at this place of the queue gives up.
    GiveUp {
        place: usize,
    },
    Renew {
        party: u8,
        lease: u32,
    },
    Advance {
        time: u32,
    },
    Force {
        party: u8,
    },
    Inspect {
        party: u8,
    },
    /// Subscribes only to the channels of these parties from now on: one bit each.
    Subscribe(u8),
    /// Sets the object's key to a number, as another program might.
    SetForeign,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Several {
    Release,
    GivingUp,
    /// The first one has to request the object, because it accepts no grant.
    Acquisition,
}

const PARTIES: u8 = 6;

fn moves() -> impl Strategy<Value = Move> {
    let (party, lease) = (0..PARTIES, 1..4u32);
    let args = AcquireMove::any(PARTIES);
    let several = prop_oneof![
        Just(Several::Release),
        Just(Several::GivingUp),
        Just(Several::Acquisition),
    ];
    prop_oneof![
        30 => args.clone().prop_map(Move::Acquire),
        3 => args.clone().prop_map(Move::AcquireOther),
        18 => args.prop_map(Move::AcquireAsHead),
        8 => (party.clone(), 2..PARTIES).prop_map(|(first, number)| Move::Gather { first, number }),
        8 => (party.clone(), 0..3u32, 0..4u32)
            .prop_map(|(party, keep, lease)| Move::Release { party, keep, lease }),
        8 => (several, any::<bool>())
            .prop_map(|(how, afresh)| Move::ServeSeveral { how, afresh }),
        2 => Just(Move::GiveUpOther),
        32 => (0..3usize).prop_map(|place| Move::ReleaseHeld { place }),
        6 => (0..3usize).prop_map(|place| Move::GiveUp { place }),
        4 => (party.clone(), lease).prop_map(|(party, lease)| Move::Renew { party, lease: lease - 1 }),
        9 => (1..6u32).prop_map(|time| Move::Advance { time }),
        2 => party.clone().prop_map(|party| Move::Force { party }),
        2 => party.prop_map(|party| Move::Inspect { party }),
        4 => (0..1u8 << PARTIES).prop_map(Move::Subscribe),
        1 => Just(Move::SetForeign),
    ]
}

/// Returns the hold of a kind, with these settings.
fn hold_of<P: Part>(field: String, kind: FairShared<P>, wait_time: u32) -> Hold {
    let times = FairTimes {
        // Not a multiple of the time that passes in one move: a waiter for which the object is free would time out with it.
        wait_time: time(wait_time) + TIME_UNIT * 7 / 1000,
        // A little shorter than the shortest wait time, so that the two never end together.
        grace_period: lease(1).duration(),
    };
    hold_with(field, FairShared { times, ..kind })
}

/// Which objects are compared.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Object {
    ReadWriteLock,
    Semaphore,
}

impl Object {
    fn other(self) -> Object {
        match self {
            Object::ReadWriteLock => Object::Semaphore,
            Object::Semaphore => Object::ReadWriteLock,
        }
    }

    /// Returns the hold of a party. Of a lock, the last two are writers, one of which may also read. Of a semaphore with three
    /// permits, some want several.
    fn hold(self, party: u8, wait_time: u32) -> Hold {
        let (read, write) = sides("", "name");
        let owner = |owner: u8| format!("client:{owner}");
        match (self, party) {
            (Object::Semaphore, _) => {
                let n = [1, 1, 2, 1, 3, 1][usize::from(party)];
                let kind = permits("", "name", n, 3);
                hold_of(permits_field(&owner(party), n), kind, wait_time)
            }
            (_, 4..) => hold_of(writer_field(&owner(party - 1)), write, wait_time),
            _ => hold_of(owner(party), read, wait_time),
        }
    }
}

/// Returns the fields of the holders, and the waiters in the queue.
fn state(harness: &mut Differential) -> (Vec<String>, Vec<Waiter>) {
    let Some(state) = harness.look() else {
        return Default::default();
    };
    let held: Vec<String> = match &state {
        ObjectState::FairReadWriteLock {
            writer, readers, ..
        } => {
            let writer = writer.iter().map(|it| writer_field(it.owner.as_str()));
            let readers = readers.iter().map(|it| it.owner.to_string());
            writer.chain(readers).collect()
        }
        ObjectState::FairSemaphore { holders, .. } => {
            let field = |it: &Holder| permits_field(it.owner.as_str(), it.holds);
            holders.iter().map(field).collect()
        }
        _ => Vec::new(),
    };
    (held, state.queue().to_vec())
}

async fn acquire(
    harness: &mut Differential,
    object: Object,
    args: &AcquireMove,
    party: u8,
) -> Option<Outcome> {
    let hold = object.hold(party, args.wait_time);
    args.run(harness, party, &hold).await
}

/// What histories of both objects cover.
const CASES: [&str; 15] = [
    "a release granted it to several",
    "the head retried",
    "another waiter retried",
    "an owner joined a queue",
    "several held it",
    "the head acquired it before other waiters",
    "an acquisition granted it to the next",
    "a release granted it",
    "the head gave up, and others were granted it",
    "a waiter behind the head gave up",
    "a waiter for the other object gave up before another one",
    "a hold had ended",
    "a hold was renewed",
    "waiters timed out",
    "holds ended",
];

#[test]
fn lua_and_rules_of_read_write_lock_agree() {
    let covered = compare(Object::ReadWriteLock);
    let cases = ["a writer also reads"];
    assert_covered(&covered, &[&CASES[..], &cases].concat());
}

#[test]
fn lua_and_rules_of_semaphore_agree() {
    let covered = compare(Object::Semaphore);
    let cases = ["enough permits are free for a waiter behind the head"];
    assert_covered(&covered, &[&CASES[..], &cases].concat());
}

/// Runs random histories. Returns how often each case occurred.
fn compare(object: Object) -> BTreeMap<&'static str, u32> {
    let hold = |party, wait_time| object.hold(party, wait_time);
    let covered = RefCell::new(BTreeMap::<&str, u32>::new());
    let record = |case: &'static str| *covered.borrow_mut().entry(case).or_default() += 1;
    let has_subscribed = RefCell::new(false);
    let subscribe = async |harness: &mut Differential, parties: u8| {
        let channels = (0..PARTIES).filter(|party| parties & (1 << party) != 0);
        let of_both = |party| [object, object.other()].map(|object| object.hold(party, 1));
        let channels = channels.flat_map(of_both).map(|hold| {
            let channel = hold.waiter_channel.unwrap();
            channel.into_string()
        });
        harness.subscribe_only(channels).await;
    };
    assert_equivalent(moves(), async |harness, next_move| {
        if !has_subscribed.replace(true) {
            subscribe(harness, u8::MAX).await;
        }
        let (held, queue) = state(harness);
        let position = |party: u8| {
            let field = hold(party, 1).field;
            let is_party =
                |it: &Waiter| it.owner == owner_of(&field) && it.writes == is_writer_field(&field);
            queue.iter().position(is_party)
        };
        let wanted: Vec<u32> = queue.iter().filter_map(|it| it.permits).collect();
        let free = 3 - held
            .iter()
            .map(|field| permits_of(field))
            .sum::<u32>()
            .min(3);
        if wanted.first() > Some(&free) && wanted.iter().any(|n| *n <= free) {
            record("enough permits are free for a waiter behind the head");
        }
        let at = |place: usize| (0..PARTIES).find(|&party| position(party) == Some(place));
        let start_afresh = async |harness: &mut Differential| {
            for key in all_keys(&sides("", "name").0.keys) {
                harness.remove(key).await;
            }
            subscribe(harness, u8::MAX).await;
        };
        let release_hold = async |harness: &mut Differential, hold: Hold, keep, n| {
            let lease = (n > 0).then(|| lease(n));
            let params = ReleaseParams {
                hold: &hold,
                keep,
                lease,
            };
            harness.step(&hold.kind.release(params)).await
        };
        let release = async |harness: &mut Differential, party, keep, n| {
            release_hold(harness, hold(party, 1), keep, n).await
        };
        match next_move {
            Move::Acquire(args) => {
                let before = position(args.party);
                match (acquire(harness, object, args, args.party).await, before) {
                    (Some(Outcome::Wait(_)), Some(0)) => record("the head retried"),
                    (Some(Outcome::Wait(_)), Some(_)) => record("another waiter retried"),
                    (Some(Outcome::Wait(_)), None) if queue.len() > 1 => {
                        record("an owner joined a queue")
                    }
                    (Some(Outcome::Done(_)), None)
                        if args.party == 3
                            && held.contains(&writer_field("client:3"))
                            && !held.contains(&"client:3".to_owned()) =>
                    {
                        record("a writer also reads")
                    }
                    (Some(Outcome::Done(_)), None) if held.len() > 1 => record("several held it"),
                    _ => {}
                }
            }
            Move::AcquireOther(args) => {
                acquire(harness, object.other(), args, args.party).await;
            }
            Move::AcquireAsHead(args) => {
                if let Some(head) = at(0)
                    && let Some(Outcome::Done(_)) = acquire(harness, object, args, head).await
                    && queue.len() > 1
                {
                    record("the head acquired it before other waiters");
                    if state(harness).1.len() < queue.len() - 1 {
                        record("an acquisition granted it to the next");
                    }
                }
            }
            Move::Gather { first, number } => {
                let args = AcquireMove::waiting(first % 3 != 0);
                for next in 0..*number {
                    acquire(harness, object, &args, (first + next) % PARTIES).await;
                }
            }
            Move::ServeSeveral { how, afresh } => {
                if *afresh {
                    start_afresh(harness).await;
                }
                let order = match how {
                    Several::GivingUp => [0, 4, 1, 3],
                    _ => [4, 0, 1, 3],
                };
                for party in order {
                    let args = AcquireMove::waiting(party > 0 || *how == Several::Release);
                    let outcome = acquire(harness, object, &args, party).await;
                    let (held, _) = state(harness);
                    let writes = held.contains(&writer_field("client:3"));
                    if let (Some(Outcome::Done(_)), 3, true) = (outcome, party, writes) {
                        record("a writer also reads");
                    }
                }
                let queue = state(harness).1.len();
                let _ = release(harness, 4, 0, 0).await;
                let left = state(harness).1.len();
                match how {
                    Several::Release if left + 2 <= queue => {
                        record("a release granted it to several");
                    }
                    Several::GivingUp if left + 3 <= queue => {
                        record("the head gave up, and others were granted it");
                    }
                    Several::Acquisition => {
                        let args = AcquireMove::waiting(false);
                        acquire(harness, object, &args, 0).await;
                        if state(harness).1.len() + 2 <= left {
                            record("an acquisition granted it to the next");
                        }
                    }
                    _ => {}
                }
            }
            Move::Release { party, keep, lease } => {
                let _ = release(harness, *party, *keep, *lease).await;
            }
            Move::GiveUpOther => {
                start_afresh(harness).await;
                let args = AcquireMove::waiting(false);
                acquire(harness, object, &args, 4).await;
                acquire(harness, object, &args, 0).await;
                let _ = release(harness, 4, 0, 0).await;
                acquire(harness, object.other(), &args, 1).await;
                acquire(harness, object, &args, 3).await;
                acquire(harness, object, &args, 0).await;
                let queue = state(harness).1.len();
                let other = object.other().hold(1, 1);
                let refused = release_hold(harness, other, 0, 0).await.is_err();
                if refused && (queue, state(harness).1.len()) == (2, 1) {
                    record("a waiter for the other object gave up before another one");
                }
            }
            Move::ReleaseHeld { place } => {
                let holder = held.get(*place);
                let is_holder =
                    |party: &u8| Some(&*hold(*party, 1).field) == holder.map(|it| &**it);
                if let Some(holder) = (0..PARTIES).find(is_holder) {
                    let _ = release(harness, holder, 0, 0).await;
                    match queue.len() - state(harness).1.len() {
                        0 => {}
                        1 => record("a release granted it"),
                        _ => record("a release granted it to several"),
                    }
                }
            }
            Move::GiveUp { place } => {
                if let Some(waiter) = at(*place) {
                    let _ = release(harness, waiter, 0, 0).await;
                    let left = queue.len() - state(harness).1.len();
                    match (place, left) {
                        (0, 2..) => record("the head gave up, and others were granted it"),
                        (1.., 1) => record("a waiter behind the head gave up"),
                        _ => {}
                    }
                }
            }
            Move::Renew { party, lease } => {
                let renewed = harness.renew(&hold(*party, 1), *lease).await;
                record(["a hold had ended", "a hold was renewed"][usize::from(renewed)]);
            }
            Move::Advance { time: n } => {
                harness.advance(time(*n)).await;
                let (still_held, left) = state(harness);
                if left.len() < queue.len() {
                    record("waiters timed out");
                }
                if still_held.len() < held.len() {
                    record("holds ended");
                }
            }
            Move::Force { party } => {
                let _ = harness.step(&hold(*party, 1).kind.force()).await;
            }
            Move::Inspect { party } => {
                let _ = harness.step(&hold(*party, 1).kind.inspect()).await;
            }
            Move::Subscribe(parties) => subscribe(harness, *parties).await,
            Move::SetForeign => harness.set_foreign("name", 5).await,
        }
    });
    covered.into_inner()
}
