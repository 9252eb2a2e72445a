//! The fenced lock's steps: those of the lock, with a token.
//!
//! State: the lock's hash, and a number that only grows, in a separate key that never expires.
//!
//! An acquisition that changes the hold count increments the number and returns it as the token.
//! One that asks for the count that the owner already has is a repetition after a lost answer, and
//! returns the current number. The number is incremented before the hash is written, so a number
//! that cannot be incremented leaves the lock unchanged.

use std::sync::Arc;

use redis::Value;
use tokio::time::Instant;

use crate::error::Result;
use crate::name::Place;
use crate::primitives::handle::Ask;
use crate::primitives::lock::rules::{take, wait, wrong_kind};
use crate::space::{Holds, Space};
use crate::step::{Args, Outcome, Script, Step, unexpected, yes_or_no};

/// Acquires the lock for an owner and increments the token, or returns how long another owner may still hold it.
pub(super) struct Acquire<'a> {
    pub(super) ask: Ask<'a>,
}

impl Step for Acquire<'_> {
    type Reply = Outcome<u64>;

    fn script(&self) -> &'static Script {
        static SCRIPT: Script = Script::new(include_str!("acquire.lua"));
        &SCRIPT
    }

    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send {
        let place = &self.ask.hold.place;
        [place.key(), place.token()].into_iter()
    }

    fn args(&self, args: &mut Args<'_>) {
        args.text(&self.ask.hold.field);
        args.number(self.ask.lease.millis());
        args.number(self.ask.count.into());
    }

    fn reply(&self, raw: Value) -> Result<Outcome<u64>> {
        match raw {
            Value::Array(token) => match token.as_slice() {
                // A token that is not a number here became so after it was incremented, so the step
                // may have changed the lock.
                [Value::BulkString(text)] => match number(text) {
                    Some(token) => Ok(Outcome::Done(token)),
                    None => Err(unexpected(&Value::Array(token))),
                },
                _ => Err(unexpected(&Value::Array(token))),
            },
            Value::Int(left) => wait(&self.ask.hold.place, left),
            other => Err(unexpected(&other)),
        }
    }

    fn apply(&self, space: &mut Space, now: Instant) -> Result<Outcome<u64>> {
        let Ask {
            hold, count, lease, ..
        } = self.ask;
        let place = &hold.place;
        let found = space.find::<Holds>(place.key(), now)?;
        let free = found.is_none() && count == 1;
        let held = found.and_then(|holds| holds.value.counts.get(&*hold.field).copied());
        let token = space.find::<i64>(place.token(), now);
        let token = token.map(|token| token.map_or(0, |token| *token.value));
        let token = if held == Some(count) {
            // Repeated because the answer was lost: the owner already has its token.
            token?
        } else if free || held.is_some() {
            let next = token.ok().and_then(|token| token.checked_add(1));
            next.ok_or_else(|| wrong_kind(place, NO_TOKEN))?
        } else {
            0
        };
        if let Outcome::Wait(left) = take(space, place, &hold.field, count, lease, now)? {
            return Ok(Outcome::Wait(left));
        }
        if held != Some(count) {
            space.set(place.token(), token, None, now);
        }
        Ok(Outcome::Done(unsigned(token)))
    }
}

/// Returns the token of the latest acquisition.
pub(super) struct Current<'a> {
    pub(super) place: &'a Place,
}

impl Step for Current<'_> {
    type Reply = u64;

    fn script(&self) -> &'static Script {
        static SCRIPT: Script = Script::new(include_str!("current.lua"));
        &SCRIPT
    }

    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send {
        std::iter::once(self.place.token())
    }

    fn args(&self, _: &mut Args<'_>) {}

    fn reply(&self, raw: Value) -> Result<u64> {
        match raw {
            Value::BulkString(text) => {
                number(&text).ok_or_else(|| wrong_kind(self.place, NO_TOKEN))
            }
            other => Err(unexpected(&other)),
        }
    }

    fn apply(&self, space: &mut Space, now: Instant) -> Result<u64> {
        let token = space.find::<i64>(self.place.token(), now)?;
        Ok(token.map_or(0, |token| unsigned(*token.value)))
    }
}

/// Raises the token to at least a number.
pub(super) struct Advance<'a> {
    pub(super) place: &'a Place,
    pub(super) at_least: i64,
}

impl Step for Advance<'_> {
    type Reply = u64;

    fn script(&self) -> &'static Script {
        static SCRIPT: Script = Script::new(include_str!("advance.lua"));
        &SCRIPT
    }

    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send {
        std::iter::once(self.place.token())
    }

    fn args(&self, args: &mut Args<'_>) {
        args.signed(self.at_least);
    }

    fn reply(&self, raw: Value) -> Result<u64> {
        Current { place: self.place }.reply(raw)
    }

    fn apply(&self, space: &mut Space, now: Instant) -> Result<u64> {
        let token = space.find::<i64>(self.place.token(), now)?;
        let token = token.map_or(0, |token| *token.value);
        if token < self.at_least {
            space.set(self.place.token(), self.at_least, None, now);
        }
        Ok(unsigned(token.max(self.at_least)))
    }
}

/// Deletes the token of a free lock.
pub(super) struct DeleteToken {
    pub(super) place: Arc<Place>,
}

impl Step for DeleteToken {
    /// Whether the lock was free.
    type Reply = bool;

    fn script(&self) -> &'static Script {
        static SCRIPT: Script = Script::new(include_str!("delete.lua"));
        &SCRIPT
    }

    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send {
        [self.place.key(), self.place.token()].into_iter()
    }

    fn args(&self, _: &mut Args<'_>) {}

    fn reply(&self, raw: Value) -> Result<bool> {
        yes_or_no(&raw)
    }

    fn apply(&self, space: &mut Space, now: Instant) -> Result<bool> {
        let free = !space.is_there(self.place.key(), now);
        if free {
            space.remove(self.place.token());
        }
        Ok(free)
    }
}

const NO_TOKEN: &str = "its token is no number that can be counted up";

/// Parses a token as the store writes it.
fn number(text: &[u8]) -> Option<u64> {
    let number = std::str::from_utf8(text).ok()?.parse().ok()?;
    Some(unsigned(number))
}

fn unsigned(token: i64) -> u64 {
    u64::try_from(token).unwrap_or_default()
}
