//! The steps on fair objects that several owners may hold, in Rust. Each has a Lua script that does
//! the same.
//!
//! State: a hash of the [holders](super::holders), and the queue of a [fair lock](crate::FairLock)
//! under keys of its own.
//!
//! * Each step but a renewal first removes the holds that have ended.
//! * Acquire: an owner that holds the object re-enters it, and a writer may also read, regardless of
//!   the queue. Otherwise as a fair lock: the owner holds the object if it is free for the owner, and
//!   the queue is empty or the owner its head. The next heads are then served, too.
//! * Serve: grant the object to each head for which it is free, and wake the first one that accepts no
//!   grant. So consecutive readers read together, and a waiter that wants more permits than are free
//!   is not overtaken by one that wants fewer.
//! * Release, giving up, force: remove the hold, or the owner from the queue, and serve the queue.
//! * Renew: a hold that has ended is not renewed, even if no step has removed it yet.

use crate::error::{Error, Result};
use crate::hold::{Hold, ReleaseParams, Renewed, requests};
use crate::keyspace::Keyspace;
use crate::lease::{Expiry, Lease};
use crate::locks::Holder;
use crate::locks::fair::{FairQueue, Turn, all_keys};
use crate::locks::reentrant::rules::parse_outcome;
use crate::name::{FairKeys, is_writer_field, owner_of, writer_field};
use crate::step::{Arg, Outcome, Script, ScriptReply, Step, args, script};

use super::holders::{self, Held, holder};

/// Returns a script that begins with the queue and the holders.
macro_rules! on_holders {
    ($($file:literal),+) => {
        script!("../expire.lua", "../fair/queue.lua", $($file),+)
    };
}

/// Acquires the object for an owner whose turn it is, or returns when to retry. If the request waits,
/// the owner joins the queue.
pub(super) fn acquire<'a>(keys: &'a FairKeys, turn: Turn<'a>, total: u32) -> Step<'a, Outcome> {
    let mut args = turn.args();
    args.push(Arg::from(total));
    Step::new(
        on_holders!("../fair/turn.lua", "holders.lua", "acquire.lua"),
        all_keys(keys),
        args,
        |reply| match reply {
            ScriptReply::Integer(-3) => Err(write_while_reading(keys)),
            reply => parse_outcome(&keys.object, reply),
        },
        move |keyspace| {
            let (field, count) = (&*turn.params.hold.field, turn.params.count);
            let held = holders::load(keyspace, &keys.object, total)?;
            let is_held = |field: &str| held.iter().any(|it| it.field == field);
            if !is_held(field) {
                if count > 1 {
                    // The hold to re-enter has been lost.
                    return Ok(Outcome::Wait(Expiry::from_millis(0)));
                }
                if is_writer_field(field) && is_held(owner_of(field)) {
                    return Err(write_while_reading(keys));
                }
                let mut queue = FairQueue::shared(keyspace, keys, total);
                if is_held(&writer_field(field)) {
                    // It may have waited before.
                    queue.leave(field)?;
                } else {
                    let left = queue.acquire_in_turn(turn)?;
                    let wait = left.map(|left| Outcome::Wait(Expiry::from_millis(left)));
                    return Ok(wait.unwrap_or(Outcome::ACQUIRED));
                }
            }
            let lease = Some(turn.params.lease);
            holders::set(keyspace, &keys.object, total, (field, count), lease)?;
            Ok(Outcome::ACQUIRED)
        },
    )
}

fn write_while_reading(keys: &FairKeys) -> Error {
    Error::WriteWhileReading {
        name: keys.object.name().to_owned(),
    }
}

/// Sets an owner's hold count to the number of holds to keep. 0 releases the hold, removes the owner
/// from the queue, and serves it. Replies whether the owner held the object.
pub(super) fn release<'a>(
    keys: &'a FairKeys,
    params: ReleaseParams<'a>,
    grace: Lease,
    total: u32,
) -> Step<'a, bool> {
    let ReleaseParams { hold, keep, lease } = params;
    let (field, object) = (&*hold.field, &*keys.object);
    let requests = params.requests_key();
    let mut args = args![field, object.channel(), keep, lease, grace, total];
    args.extend(requests.clone().map(Arg::from));
    Step::new(
        on_holders!("holders.lua", "release.lua"),
        all_keys(keys),
        args,
        ScriptReply::flag,
        move |keyspace| {
            requests::remove(keyspace, requests.as_deref(), field);
            let held = holders::load(keyspace, object, total);
            let mut queue = FairQueue::shared(keyspace, keys, total);
            let mut left = 0;
            if keep == 0 {
                left = queue.left_for_head().unwrap_or(0);
                // Also if another program has overwritten the object's key. Then, and in the queue of an object of the
                // other kind, the message that woke this owner is now meant for the next waiter.
                if queue.leave(field)?.is_some() && held.is_err() {
                    queue.wake_head()?;
                }
            }
            let is_held = held?.iter().any(|it| it.field == field);
            match (keep, is_held) {
                // A waiter has given up. That does not prolong the turn of a dead head.
                (0, false) => queue.wake_next(true).map(drop)?,
                (0, true) => {
                    holders::remove(queue.keyspace(), object, field)?;
                    queue.wake_after_release(left, grace)?;
                }
                (_, true) => holders::set(keyspace, object, total, (field, keep), lease)?,
                (_, false) => {}
            }
            Ok(is_held)
        },
    )
}

/// Ends all holds of one side, and serves the queue. Replies whether there were any.
pub(super) fn force(keys: &FairKeys, writes: bool, grace: Lease, total: u32) -> Step<'_, bool> {
    let object = &*keys.object;
    Step::new(
        on_holders!("holders.lua", "force.lua"),
        all_keys(keys),
        args![object.channel(), writes, grace, total],
        ScriptReply::flag,
        move |keyspace| {
            let mut held = holders::load(keyspace, object, total)?;
            held.retain(|it| is_writer_field(&it.field) == writes);
            let mut queue = FairQueue::shared(keyspace, keys, total);
            let left = queue.left_for_head()?;
            for it in &held {
                holders::remove(queue.keyspace(), object, &it.field)?;
            }
            if !held.is_empty() {
                queue.wake_after_release(left, grace)?;
            }
            Ok(!held.is_empty())
        },
    )
}

/// Returns the holders of one side.
pub(super) fn inspect(keys: &FairKeys, writes: bool, total: u32) -> Step<'_, Vec<Holder>> {
    Step::new(
        on_holders!("holders.lua", "inspect.lua"),
        all_keys(keys),
        args![total],
        move |reply| {
            let mut holders = Vec::new();
            for one in reply.list()? {
                let [field, count, left] = one.array()?;
                let (field, count) = (field.text()?, count.text()?.parse().unwrap_or(u32::MAX));
                if is_writer_field(&field) == writes {
                    holders.push(holder(&field, count, left.integer()?));
                }
            }
            Ok(holders)
        },
        move |keyspace| {
            let now = keyspace.now_ms();
            let held = holders::load(keyspace, &keys.object, total)?.into_iter();
            let held = held.filter(|it| is_writer_field(&it.field) == writes);
            let holder = |Held { field, count, ends }| holder(&field, count, ends - now);
            Ok(held.map(holder).collect())
        },
    )
}

/// Renews many holds.
pub(super) fn renew_script() -> &'static Script {
    script!("../../hold/requests.lua", "renew.lua")
}

/// Renews one hold, as the script does.
pub(super) fn renew(
    keyspace: &mut Keyspace,
    keys: &FairKeys,
    hold: &Hold,
    lease: Option<Lease>,
    total: u32,
) -> Result<Renewed> {
    let renewed = requests::find(keyspace, hold);
    let held = holders::current(keyspace, &keys.object, total)?;
    let Some(held) = held.into_iter().find(|it| *it.field == *hold.field) else {
        return Ok(Renewed::NotHeld);
    };
    let lease = lease.map(|lease| renewed.limit(lease.duration()));
    if let Some(lease) = lease.filter(|lease| !lease.is_zero()) {
        let lease = Some(Lease::from_remaining(lease));
        let hold = (&*hold.field, held.count);
        holders::set(keyspace, &keys.object, total, hold, lease)?;
    }
    Ok(renewed)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::Instant;

    use super::super::FairShared;
    use super::super::read_write::sides;
    use super::super::semaphore::permits;
    use super::*;
    use crate::hold::AcquireParams;
    use crate::locks::fair::FairTimes;
    use crate::step::differential::hold_with;

    /// Requests a hold that waits. With a request number it accepts a grant.
    fn request(keyspace: &mut Keyspace, hold: &Hold, request_number: i64) -> Result<Outcome> {
        let params = AcquireParams {
            waits: true,
            request_number,
            ..AcquireParams::without_waiting(hold, 1, Lease::WATCHDOG)
        };
        hold.kind.acquire(params).apply(keyspace)
    }

    fn release(keyspace: &mut Keyspace, hold: &Hold) -> Result<bool> {
        let (keep, lease) = (0, None);
        let params = ReleaseParams { hold, keep, lease };
        hold.kind.release(params).apply(keyspace)
    }

    fn connect(keyspace: &mut Keyspace, waiter: &Hold) {
        keyspace.set_subscriber_count(waiter.waiter_channel.as_deref().unwrap(), 1);
    }

    /// They have one queue. The waiter behind the head is woken, its request is refused, and it leaves the queue. The next one, for
    /// which the object is free, is woken then.
    #[test]
    fn waiter_of_another_kind_is_not_granted_the_object() {
        let (read, _) = sides("", "name");
        let semaphore = permits("", "name", 1, 3);
        let hold = |owner: &str, reads| match reads {
            true => hold_with(owner.into(), read.clone()),
            false => hold_with([owner, "#1"].concat(), semaphore.clone()),
        };
        for reads in [true, false] {
            let mut keyspace = Keyspace::new(Instant::now());
            let request = |keyspace: &mut Keyspace, hold: &Hold| {
                connect(keyspace, hold);
                request(keyspace, hold, 7)
            };
            let waits = |keyspace: &mut Keyspace, hold: &Hold| {
                assert!(matches!(request(keyspace, hold), Ok(Outcome::Wait(_))));
            };
            let [head, next] = ["one", "three"].map(|owner| hold(owner, reads));
            let other = hold("two", !reads);
            let queue = &mut FairQueue::new(&mut keyspace, &read.keys);
            queue.push_front(&head.field, i64::MAX / 2).unwrap();
            waits(&mut keyspace, &other);
            waits(&mut keyspace, &next);
            keyspace.take_published();
            let is_woken = |keyspace: &mut Keyspace, waiter: &Hold| {
                let published = keyspace.take_published();
                let published = published.iter().map(|it| (&*it.channel, it.payload));
                let woken = (waiter.waiter_channel.as_deref().unwrap(), 0);
                assert_eq!(Vec::from_iter(published), [woken]);
            };
            assert_eq!(request(&mut keyspace, &head), Ok(Outcome::ACQUIRED));
            is_woken(&mut keyspace, &other);
            let refused = request(&mut keyspace, &other).unwrap_err();
            assert!(matches!(refused, Error::WrongKind { .. }), "{refused}");
            release(&mut keyspace, &other).unwrap_err();
            is_woken(&mut keyspace, &next);
            assert_eq!(request(&mut keyspace, &next), Ok(Outcome::ACQUIRED));
        }
    }

    /// The grace period of the writer begins with the request of the reader behind it, although others read.
    #[test]
    fn reader_behind_a_dead_writer_retries_after_its_grace_period() {
        for grace in [100, 1000, 4000] {
            let grace = Duration::from_millis(grace);
            let (read, write) = sides("", "name");
            let times = FairTimes {
                grace_period: grace,
                ..FairTimes::default()
            };
            let reader = |owner: &str| {
                let kind = FairShared {
                    times,
                    ..read.clone()
                };
                hold_with(owner.into(), kind)
            };
            let mut keyspace = Keyspace::new(Instant::now());
            let mut request = |hold: &Hold, waited| {
                keyspace.now += waited;
                request(&mut keyspace, hold, 0).unwrap()
            };
            let dead = hold_with(writer_field("two"), write.clone());
            let no_time = Duration::ZERO;
            assert_eq!(request(&reader("one"), no_time), Outcome::ACQUIRED);
            assert!(matches!(request(&dead, no_time), Outcome::Wait(_)));
            let kept = Outcome::Wait(Expiry::In(grace));
            assert_eq!(request(&reader("three"), Duration::from_secs(6)), kept);
            assert_eq!(request(&reader("three"), grace), Outcome::ACQUIRED);
        }
    }

    /// The release grants the object to the head. The wait of the next waiter counts from then.
    #[test]
    fn waiter_behind_a_granted_one_keeps_its_place_while_it_reconnects() {
        let waiter = |owner: &str, n: u32, wait| {
            let mut kind = permits("", "name", n, 2);
            kind.times.wait_time = Duration::from_secs(wait);
            hold_with(format!("{owner}#{n}"), kind)
        };
        let mut keyspace = Keyspace::new(Instant::now());
        let request = |keyspace: &mut Keyspace, hold: &Hold| request(keyspace, hold, 7).unwrap();
        let [holder, granted] = [("one", 2), ("two", 1)].map(|(owner, n)| waiter(owner, n, 300));
        let [absent, last] = ["three", "four"].map(|owner| waiter(owner, 1, 20));
        for connected in [&granted, &last] {
            connect(&mut keyspace, connected);
        }
        assert_eq!(request(&mut keyspace, &holder), Outcome::ACQUIRED);
        for waits in [&granted, &absent, &last] {
            assert!(matches!(request(&mut keyspace, waits), Outcome::Wait(_)));
        }
        assert!(release(&mut keyspace, &holder).unwrap());
        let grace = FairTimes::default().grace_period;
        keyspace.now += grace - Duration::from_millis(1);
        assert!(matches!(request(&mut keyspace, &last), Outcome::Wait(_)));
        keyspace.now += Duration::from_millis(1);
        assert_eq!(request(&mut keyspace, &last), Outcome::ACQUIRED);
    }

    /// The head has died, and its time has passed, but no step has dropped it yet.
    #[test]
    fn waiter_behind_one_that_gives_up_keeps_its_place_although_the_head_is_dead() {
        let (_, mut write) = sides("", "name");
        let wait = Duration::from_secs(20);
        write.times.wait_time = wait;
        let writer = |owner: &str| hold_with(writer_field(owner), write.clone());
        let [holder, dead, leaves, next, last] = ["1", "2", "3", "4", "5"].map(writer);
        let mut keyspace = Keyspace::new(Instant::now());
        let request = |keyspace: &mut Keyspace, hold: &Hold| request(keyspace, hold, 0).unwrap();
        assert_eq!(request(&mut keyspace, &holder), Outcome::ACQUIRED);
        for connected in [&leaves, &next, &last] {
            connect(&mut keyspace, connected);
        }
        for waits in [&dead, &leaves, &next] {
            assert!(matches!(request(&mut keyspace, waits), Outcome::Wait(_)));
        }
        keyspace.now += Lease::WATCHDOG.duration() + 2 * wait;
        release(&mut keyspace, &leaves).unwrap();
        assert!(matches!(request(&mut keyspace, &last), Outcome::Wait(_)));
        assert_eq!(request(&mut keyspace, &next), Outcome::ACQUIRED);
    }

    /// The object is free for a waiter that has died. Each 20 ms another one joins behind it, and the first of ten gives up.
    #[test]
    fn waiters_that_give_up_do_not_prolong_the_turn_of_a_dead_head() {
        let (_, write) = sides("", "name");
        let mut keyspace = Keyspace::new(Instant::now());
        let waiter = |number: u32| hold_with(writer_field(&number.to_string()), write.clone());
        let request = |keyspace: &mut Keyspace, hold: &Hold| request(keyspace, hold, 0).unwrap();
        let release = |keyspace: &mut Keyspace, hold: &Hold| release(keyspace, hold).unwrap();
        let (holder, dead) = (waiter(0), waiter(1));
        assert_eq!(request(&mut keyspace, &holder), Outcome::ACQUIRED);
        assert!(matches!(request(&mut keyspace, &dead), Outcome::Wait(_)));
        assert!(release(&mut keyspace, &holder));
        let step = Duration::from_millis(20);
        let grace = FairTimes::default().grace_period;
        let steps = u32::try_from(grace.as_millis() / step.as_millis()).unwrap() + 1;
        let acquired = (2..2 + steps).find(|&number| {
            keyspace.now += step;
            let joins = waiter(number);
            connect(&mut keyspace, &joins);
            request(&mut keyspace, &joins);
            if number > 11 {
                assert!(!release(&mut keyspace, &waiter(number - 10)));
            }
            let first = waiter(number.saturating_sub(9).max(2));
            request(&mut keyspace, &first) == Outcome::ACQUIRED
        });
        assert!(acquired.is_some());
    }
}
