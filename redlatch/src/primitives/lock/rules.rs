//! The lock's steps in Rust, which the embedded store runs. Each has a Lua script that does the same.
//!
//! State: a hash owner -> hold count, whose expiry is the lease. At most one owner has a field.
//!
//! * Acquire: without a hash, create it with the requested count and the lease. If the owner
//!   already has a field, set its count; the expiry may only move later. Otherwise return the
//!   holder's remaining lease.
//! * Release: set the owner's count to the number of holds to keep, with 0 delete the hash, and
//!   then publish to wake one waiter. If another client deleted the hash, publish as well, because
//!   no other step wakes the waiters.
//! * Renew: extend the expiry if the owner has a field.
//! * Force: delete the hash and publish.
//!
//! Steps carry the resulting count instead of a difference, so that sending a step twice has the
//! effect of sending it once. A hash with a `mode` is a read-write lock, and an error.

use std::collections::BTreeMap;
use std::time::Duration;

use redis::Value;
use tokio::time::Instant;

use crate::error::{Error, Result};
use crate::hold::Hold;
use crate::lease::Lease;
use crate::name::Place;
use crate::primitives::handle::{Ask, Holder};
use crate::space::{Holds, Space};
use crate::step::{Args, Outcome, Script, Step, unexpected, yes_or_no};

/// Acquires the lock for an owner, or returns how long another owner may still hold it.
pub(crate) struct Acquire<'a> {
    pub(crate) place: &'a Place,
    pub(crate) owner: &'a str,
    /// The requested hold count, so that sending the step twice has the effect of sending it once.
    pub(crate) count: u32,
    pub(crate) lease: Lease,
}

impl<'a> Acquire<'a> {
    pub(crate) fn new(ask: Ask<'a>) -> Acquire<'a> {
        Acquire {
            place: &ask.hold.place,
            owner: &ask.hold.field,
            count: ask.count,
            lease: ask.lease,
        }
    }
}

impl Step for Acquire<'_> {
    type Reply = Outcome;

    fn script(&self) -> &'static Script {
        static SCRIPT: Script = Script::new(include_str!("acquire.lua"));
        &SCRIPT
    }

    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send {
        std::iter::once(self.place.key())
    }

    fn args(&self, args: &mut Args<'_>) {
        args.text(self.owner);
        args.number(self.lease.millis());
        if self.count > 1 {
            args.number(self.count.into());
        }
    }

    fn reply(&self, raw: Value) -> Result<Outcome> {
        held_or_wait(self.place, &raw)
    }

    fn apply(&self, space: &mut Space, now: Instant) -> Result<Outcome> {
        take(space, self.place, self.owner, self.count, self.lease, now)
    }
}

/// Interprets the reply of an acquisition: nil if it is held now, else how long to wait.
pub(crate) fn held_or_wait(place: &Place, raw: &Value) -> Result<Outcome> {
    match raw {
        Value::Nil => Ok(Outcome::Done(())),
        Value::Int(left) => wait(place, *left),
        other => Err(unexpected(other)),
    }
}

/// Interprets another owner's remaining lease in ms. A lock always has one; a key that never
/// expires is not a lock.
pub(crate) fn wait<T>(place: &Place, left: i64) -> Result<Outcome<T>> {
    match u64::try_from(left) {
        Ok(left) => Ok(Outcome::Wait(Duration::from_millis(left))),
        Err(_) => Err(wrong_kind(place, ENDLESS)),
    }
}

/// Acquires a lock's hash for an owner, or returns how long another owner may still hold it.
pub(crate) fn take(
    space: &mut Space,
    place: &Place,
    owner: &str,
    count: u32,
    lease: Lease,
    now: Instant,
) -> Result<Outcome> {
    let end = now + lease.duration();
    let Some(mut holds) = space.find::<Holds>(place.key(), now)? else {
        if count > 1 {
            // The hold to re-enter has been lost.
            return Ok(Outcome::Wait(Duration::ZERO));
        }
        let holds = Holds {
            counts: BTreeMap::from([(owner.to_owned(), count)]),
            mode: None,
        };
        space.set(place.key(), holds, Some(end), now);
        return Ok(Outcome::Done(()));
    };
    if holds.value.mode.is_some() {
        return Err(wrong_kind(place, READ_WRITE));
    }
    let Some(held) = holds.value.counts.get_mut(owner) else {
        return match lasts(holds.remaining(now)) {
            Some(left) => Ok(Outcome::Wait(left)),
            None => Err(wrong_kind(place, ENDLESS)),
        };
    };
    *held = count;
    holds.extend_to(end);
    Ok(Outcome::Done(()))
}

/// Sets an owner's hold count to the number of holds to keep; 0 releases the lock.
pub(crate) struct Release<'a> {
    pub(crate) place: &'a Place,
    pub(crate) owner: &'a str,
    pub(crate) keep: u32,
    /// The new lease; `None` leaves it unchanged.
    pub(crate) lease: Option<Lease>,
    /// Whether to wake a waiter.
    pub(crate) tell: bool,
    /// The remaining part of the previous lease, if this undoes an acquisition.
    pub(crate) back: Option<Lease>,
}

impl<'a> Release<'a> {
    pub(crate) fn new(hold: &'a Hold, keep: u32, lease: Option<Lease>) -> Release<'a> {
        Release {
            place: &hold.place,
            owner: &hold.field,
            keep,
            lease,
            tell: true,
            back: None,
        }
    }
}

impl Step for Release<'_> {
    /// Whether the owner held the lock.
    type Reply = bool;

    fn script(&self) -> &'static Script {
        static SCRIPT: Script = Script::new(include_str!("release.lua"));
        &SCRIPT
    }

    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send {
        std::iter::once(self.place.key())
    }

    fn args(&self, args: &mut Args<'_>) {
        args.text(self.owner);
        args.text(if self.tell { self.place.channel() } else { "" });
        if self.keep > 0 {
            args.number(self.keep.into());
            args.number(self.lease.map_or(0, Lease::millis));
            if let Some(back) = self.back {
                args.number(back.millis());
            }
        }
    }

    fn reply(&self, raw: Value) -> Result<bool> {
        yes_or_no(&raw)
    }

    fn apply(&self, space: &mut Space, now: Instant) -> Result<bool> {
        let held = give_back(space, self.place, self.owner, self.keep, self.lease, now)?;
        let released = held && self.keep == 0;
        if self.tell && (released || is_gone(space, held, self.place, now)) {
            space.publish(self.place.channel(), 0);
        }
        if held
            && let Some(back) = self.back
            && let Some(mut holds) = space.find::<Holds>(self.place.key(), now)?
        {
            holds.shorten_to(now + back.duration());
        }
        Ok(held)
    }
}

/// Sets an owner's hold count in a lock's hash. Returns whether it held the lock.
pub(crate) fn give_back(
    space: &mut Space,
    place: &Place,
    owner: &str,
    keep: u32,
    lease: Option<Lease>,
    now: Instant,
) -> Result<bool> {
    let Some(mut holds) = space.find::<Holds>(place.key(), now)? else {
        return Ok(false);
    };
    let Some(count) = holds.value.counts.get_mut(owner) else {
        return Ok(false);
    };
    if keep == 0 {
        space.remove(place.key());
    } else {
        *count = keep;
        if let Some(lease) = lease {
            holds.extend_to(now + lease.duration());
        }
    }
    Ok(true)
}

/// Renews the leases of many locks.
pub(crate) fn renew_script() -> &'static Script {
    static SCRIPT: Script =
        Script::new(concat!(include_str!("wake.lua"), include_str!("renew.lua")));
    &SCRIPT
}

/// Returns whether an owner does not hold a lock because there is no hash: it was deleted by
/// FLUSHALL or DEL. The step that detects this wakes a waiter, because no other step does.
pub(crate) fn is_gone(space: &mut Space, held: bool, place: &Place, now: Instant) -> bool {
    !held && !space.is_there(place.key(), now)
}

/// Renews one lock, as the script does.
pub(crate) fn renew(
    space: &mut Space,
    hold: &Hold,
    lease: Option<Lease>,
    now: Instant,
) -> Result<bool> {
    match space.find::<Holds>(hold.place.key(), now)? {
        Some(mut holds) if holds.value.counts.contains_key(&*hold.field) => {
            if let Some(lease) = lease {
                holds.extend_to(now + lease.duration());
            }
            Ok(true)
        }
        _ => Ok(false),
    }
}

/// Releases the lock whichever owner holds it.
pub(crate) struct Force<'a> {
    pub(crate) place: &'a Place,
}

impl Step for Force<'_> {
    /// Whether it was held.
    type Reply = bool;

    fn script(&self) -> &'static Script {
        static SCRIPT: Script = Script::new(include_str!("force.lua"));
        &SCRIPT
    }

    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send {
        std::iter::once(self.place.key())
    }

    fn args(&self, args: &mut Args<'_>) {
        args.text(self.place.channel());
    }

    fn reply(&self, raw: Value) -> Result<bool> {
        match raw {
            Value::Int(-1) => Err(wrong_kind(self.place, FOREIGN_HASH)),
            other => yes_or_no(&other),
        }
    }

    fn apply(&self, space: &mut Space, now: Instant) -> Result<bool> {
        let held = is_held(space, self.place, now)?;
        if held {
            space.remove(self.place.key());
            space.publish(self.place.channel(), 0);
        }
        Ok(held)
    }
}

/// Returns whether any owner holds a lock. An error if it is a hash of another kind.
pub(crate) fn is_held(space: &mut Space, place: &Place, now: Instant) -> Result<bool> {
    match space.find::<Holds>(place.key(), now)? {
        Some(holds) if holds.value.mode.is_some() => Err(wrong_kind(place, FOREIGN_HASH)),
        holds => Ok(holds.is_some()),
    }
}

/// Returns the holder of the lock, with its hold count and remaining lease.
pub(crate) struct Inspect<'a> {
    pub(crate) place: &'a Place,
}

impl Step for Inspect<'_> {
    type Reply = Vec<Holder>;

    fn script(&self) -> &'static Script {
        static SCRIPT: Script = Script::new(include_str!("inspect.lua"));
        &SCRIPT
    }

    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send {
        std::iter::once(self.place.key())
    }

    fn args(&self, _: &mut Args<'_>) {}

    fn reply(&self, raw: Value) -> Result<Vec<Holder>> {
        match raw {
            Value::Nil => Ok(Vec::new()),
            Value::Int(_) => Err(wrong_kind(self.place, FOREIGN_HASH)),
            other => Ok(vec![holder(other)?]),
        }
    }

    fn apply(&self, space: &mut Space, now: Instant) -> Result<Vec<Holder>> {
        is_held(space, self.place, now)?;
        let Some(holds) = space.find::<Holds>(self.place.key(), now)? else {
            return Ok(Vec::new());
        };
        let remaining = lasts(holds.remaining(now));
        let holder = |(owner, count): (&String, &u32)| Holder {
            owner: owner.clone(),
            holds: *count,
            remaining,
        };
        Ok(holds.value.counts.iter().map(holder).collect())
    }
}

/// Parses a holder from a script's reply: owner, hold count, remaining milliseconds.
pub(crate) fn holder(raw: Value) -> Result<Holder> {
    let Value::Array(parts) = raw else {
        return Err(unexpected(&raw));
    };
    match parts.as_slice() {
        [
            Value::BulkString(owner),
            Value::BulkString(holds),
            Value::Int(left),
        ] => Ok(Holder {
            owner: String::from_utf8_lossy(owner).into_owned(),
            holds: String::from_utf8_lossy(holds).parse().unwrap_or(u32::MAX),
            remaining: u64::try_from(*left).ok().map(Duration::from_millis),
        }),
        _ => Err(unexpected(&Value::Array(parts))),
    }
}

/// Converts a remaining time for callers: `None` for a key that never expires.
pub(crate) fn lasts(remaining: Duration) -> Option<Duration> {
    (remaining != Duration::MAX).then_some(remaining)
}

pub(crate) const ENDLESS: &str = "it has no time to live";
pub(crate) const FOREIGN_HASH: &str = "a hash of another kind";
pub(crate) const READ_WRITE: &str = "a read-write lock";

pub(crate) fn wrong_kind(place: &Place, reason: &'static str) -> Error {
    Error::WrongKind {
        name: place.name().to_owned(),
        reason,
    }
}
