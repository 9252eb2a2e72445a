//! The lock's steps: what each does, as plain code, beside the Lua that does the same.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use redis::Value;
use tokio::time::Instant;

use super::Holder;
use crate::error::{Error, Result};
use crate::hold::{Hold, Kind};
use crate::lease::Lease;
use crate::name::Place;
use crate::space::{Holds, Space};
use crate::step::{Args, Outcome, Script, Step, unexpected};
use crate::store::{Answer, Lane, Sent, Store};

/// Takes the lock for an owner, or says how long somebody else may still have it.
pub(crate) struct Acquire<'a> {
    pub(crate) place: &'a Place,
    pub(crate) owner: &'a str,
    /// The hold count wanted, so that sent twice is the same as sent once.
    pub(crate) count: u32,
    pub(crate) lease: Lease,
}

impl<'a> Acquire<'a> {
    pub(crate) fn new(hold: &'a Hold, count: u32, lease: Lease) -> Acquire<'a> {
        Acquire {
            place: &hold.place,
            owner: &hold.field,
            count,
            lease,
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
        args.number(self.count.into());
    }

    fn reply(&self, raw: Value) -> Result<Outcome> {
        match raw {
            Value::Nil => Ok(Outcome::Done),
            Value::Int(millis) => match u64::try_from(millis) {
                Ok(left) => Ok(Outcome::Wait(Duration::from_millis(left))),
                Err(_) => Err(not_a_lock(self.place, "it has no time to live")),
            },
            other => Err(unexpected(&other)),
        }
    }

    fn apply(&self, space: &mut Space, now: Instant) -> Result<Outcome> {
        let end = now + self.lease.duration();
        let Some(holds) = space.holds(self.place.key(), now) else {
            if self.count > 1 {
                // What was to be entered again has been lost.
                return Ok(Outcome::Wait(Duration::ZERO));
            }
            let holds = Holds {
                counts: BTreeMap::from([(self.owner.to_owned(), self.count)]),
                ends: end,
            };
            space.set(self.place.key(), holds, now);
            return Ok(Outcome::Done);
        };
        let Some(count) = holds.counts.get_mut(self.owner) else {
            return Ok(Outcome::Wait(holds.remaining(now)));
        };
        *count = self.count;
        holds.extend_to(end);
        Ok(Outcome::Done)
    }
}

/// Sets an owner's hold count to what it wants to keep; none gives the lock back.
pub(crate) struct Release<'a> {
    pub(crate) place: &'a Place,
    pub(crate) owner: &'a str,
    pub(crate) keep: u32,
    /// The lease to go on with; `None` leaves it as it is.
    pub(crate) lease: Option<Lease>,
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
        args.number(self.keep.into());
        args.number(self.lease.map_or(0, Lease::millis));
        args.text(self.place.channel());
    }

    fn reply(&self, raw: Value) -> Result<bool> {
        match raw {
            Value::Int(held) => Ok(held == 1),
            other => Err(unexpected(&other)),
        }
    }

    fn apply(&self, space: &mut Space, now: Instant) -> Result<bool> {
        let Some(holds) = space.holds(self.place.key(), now) else {
            return Ok(false);
        };
        let Some(count) = holds.counts.get_mut(self.owner) else {
            return Ok(false);
        };
        if self.keep == 0 {
            space.remove(self.place.key());
            space.publish(self.place.channel());
        } else {
            *count = self.keep;
            if let Some(lease) = self.lease {
                holds.extend_to(now + lease.duration());
            }
        }
        Ok(true)
    }
}

/// How a lock is kept and given back.
pub(super) static LOCK: LockKind = LockKind;

pub(super) struct LockKind;

impl Kind for LockKind {
    fn renew_script(&self) -> &'static Script {
        static SCRIPT: Script = Script::new(include_str!("renew.lua"));
        &SCRIPT
    }

    fn renew(
        &self,
        space: &mut Space,
        place: &Place,
        owner: &str,
        lease: Lease,
        now: Instant,
    ) -> bool {
        match space.holds(place.key(), now) {
            Some(holds) if holds.counts.contains_key(owner) => {
                holds.extend_to(now + lease.duration());
                true
            }
            _ => false,
        }
    }

    fn release<'a>(
        &self,
        store: &'a Store,
        hold: &'a Hold,
        keep: u32,
        lease: Option<Lease>,
    ) -> Pin<Box<dyn Future<Output = Result<Answer<bool>>> + Send + 'a>> {
        Box::pin(async move {
            let step = Release {
                place: &hold.place,
                owner: &hold.field,
                keep,
                lease,
            };
            store.run(&step, Lane::First, &Sent::default()).await
        })
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
            Value::Int(-1) => Err(not_a_lock(self.place, FOREIGN_HASH)),
            Value::Int(unlocked) => Ok(unlocked == 1),
            other => Err(unexpected(&other)),
        }
    }

    fn apply(&self, space: &mut Space, now: Instant) -> Result<bool> {
        let held = space.holds(self.place.key(), now).is_some();
        if held {
            space.remove(self.place.key());
            space.publish(self.place.channel());
        }
        Ok(held)
    }
}

/// Who holds each of some locks, how often, for how long.
pub(crate) struct Inspect<'a> {
    pub(crate) keys: &'a [&'a str],
}

/// What [`Inspect`] sees under one key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Seen {
    Free,
    Held(Holder),
    NotALock(&'static str),
}

impl Step for Inspect<'_> {
    type Reply = Vec<Seen>;

    fn script(&self) -> &'static Script {
        static SCRIPT: Script = Script::new(include_str!("inspect.lua"));
        &SCRIPT
    }

    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send {
        self.keys.iter().copied()
    }

    fn args(&self, _: &mut Args<'_>) {}

    fn reply(&self, raw: Value) -> Result<Vec<Seen>> {
        match raw {
            Value::Array(all) if all.len() == self.keys.len() => {
                all.into_iter().map(Seen::from_reply).collect()
            }
            other => Err(unexpected(&other)),
        }
    }

    fn apply(&self, space: &mut Space, now: Instant) -> Result<Vec<Seen>> {
        let seen = |key: &&str| {
            let Some(holds) = space.holds(key, now) else {
                return Seen::Free;
            };
            let remaining = Some(holds.remaining(now));
            match holds.counts.first_key_value() {
                Some((owner, holds)) => Seen::Held(Holder {
                    owner: owner.clone(),
                    holds: *holds,
                    remaining,
                }),
                None => Seen::Free,
            }
        };
        Ok(self.keys.iter().map(seen).collect())
    }
}

impl Seen {
    fn from_reply(raw: Value) -> Result<Seen> {
        let parts = match raw {
            Value::Nil => return Ok(Seen::Free),
            Value::Int(-1) => return Ok(Seen::NotALock(FOREIGN_HASH)),
            Value::Int(-2) => return Ok(Seen::NotALock(FOREIGN_TYPE)),
            Value::Array(parts) => parts,
            other => return Err(unexpected(&other)),
        };
        match parts.as_slice() {
            [
                Value::BulkString(owner),
                Value::BulkString(holds),
                Value::Int(left),
            ] => Ok(Seen::Held(Holder {
                owner: String::from_utf8_lossy(owner).into_owned(),
                holds: String::from_utf8_lossy(holds).parse().unwrap_or(u32::MAX),
                remaining: u64::try_from(*left).ok().map(Duration::from_millis),
            })),
            _ => Err(unexpected(&Value::Array(parts))),
        }
    }
}

const FOREIGN_TYPE: &str = "a key of another type";
const FOREIGN_HASH: &str = "a hash of another kind";

pub(super) fn not_a_lock(place: &Place, reason: &'static str) -> Error {
    Error::NotALock {
        name: place.name().to_owned(),
        reason,
    }
}
