//! The lock's steps: what each does, as plain code, beside the Lua that does the same.

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

/// Takes the lock for an owner, or says how long somebody else may still have it.
pub(crate) struct Acquire<'a> {
    pub(crate) place: &'a Place,
    pub(crate) owner: &'a str,
    /// The hold count wanted, so that sent twice is the same as sent once.
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

/// What a script says that takes something: nothing if it is held now, else how long to wait.
pub(crate) fn held_or_wait(place: &Place, raw: &Value) -> Result<Outcome> {
    match raw {
        Value::Nil => Ok(Outcome::Done(())),
        Value::Int(left) => wait(place, *left),
        other => Err(unexpected(other)),
    }
}

/// What the remaining milliseconds of somebody else's lease mean. A lock always has some; a key
/// that never expires is something else.
pub(crate) fn wait<T>(place: &Place, left: i64) -> Result<Outcome<T>> {
    match u64::try_from(left) {
        Ok(left) => Ok(Outcome::Wait(Duration::from_millis(left))),
        Err(_) => Err(wrong_kind(place, ENDLESS)),
    }
}

/// Takes a lock's hash for an owner, or says how long somebody else may still have it.
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
            // What was to be entered again has been lost.
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

/// Sets an owner's hold count to what it wants to keep; none gives the lock back.
pub(crate) struct Release<'a> {
    pub(crate) place: &'a Place,
    pub(crate) owner: &'a str,
    pub(crate) keep: u32,
    /// The lease to go on with; `None` leaves it as it is.
    pub(crate) lease: Option<Lease>,
    /// Whether to call who waits.
    pub(crate) tell: bool,
    /// What is left of the lease that there was before, when an acquisition is undone.
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

/// Sets an owner's hold count in a lock's hash. Whether it held the lock.
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

/// Whether an owner does not hold a lock because nothing holds it: it was deleted by FLUSHALL or DEL.
/// Then the step that finds this out wakes a waiter, because no other step does.
pub(crate) fn is_gone(space: &mut Space, held: bool, place: &Place, now: Instant) -> bool {
    !held && !space.is_there(place.key(), now)
}

/// The rule of the same, for one.
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

/// Takes the lock from whoever holds it.
pub(crate) struct Force<'a> {
    pub(crate) place: &'a Place,
}

impl Step for Force<'_> {
    /// Whether anybody held it.
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

/// Whether anybody holds a lock. An error if it is the hash of another kind.
pub(crate) fn is_held(space: &mut Space, place: &Place, now: Instant) -> Result<bool> {
    match space.find::<Holds>(place.key(), now)? {
        Some(holds) if holds.value.mode.is_some() => Err(wrong_kind(place, FOREIGN_HASH)),
        holds => Ok(holds.is_some()),
    }
}

/// Who holds the lock, how often, for how long.
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

/// A holder as scripts tell of one: owner, hold count, remaining milliseconds.
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

/// How long something lives, as it is told: `None` for ever.
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
