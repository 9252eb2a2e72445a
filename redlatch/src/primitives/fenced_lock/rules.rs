//! The fenced lock's steps: those of the lock, with a token.

use redis::Value;
use tokio::time::Instant;

use crate::error::Result;
use crate::name::Place;
use crate::primitives::handle::Ask;
use crate::primitives::lock::rules::{take, wait};
use crate::space::{Holds, Space};
use crate::step::{Args, Outcome, Script, Step, unexpected};

/// Takes the lock for an owner and counts the token up, or says how long somebody else may still
/// have it.
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
                [Value::Int(token)] => Ok(Outcome::Done(unsigned(*token))),
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
        let token = match space.find::<i64>(place.token(), now)? {
            Some(token) => *token.value,
            None => 0,
        };
        let held = match space.find::<Holds>(place.key(), now)? {
            Some(holds) => holds.value.counts.get(&*hold.field).copied(),
            None => None,
        };
        if let Outcome::Wait(left) = take(space, place, &hold.field, count, lease, now)? {
            return Ok(Outcome::Wait(left));
        }
        if held == Some(count) {
            // Asked for again because the answer was lost: it has its token already.
            return Ok(Outcome::Done(unsigned(token)));
        }
        space.set(place.token(), token + 1, None, now);
        Ok(Outcome::Done(unsigned(token + 1)))
    }
}

/// The token of the latest acquisition.
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
            Value::Int(token) => Ok(unsigned(token)),
            other => Err(unexpected(&other)),
        }
    }

    fn apply(&self, space: &mut Space, now: Instant) -> Result<u64> {
        let token = space.find::<i64>(self.place.token(), now)?;
        Ok(token.map_or(0, |token| unsigned(*token.value)))
    }
}

fn unsigned(token: i64) -> u64 {
    u64::try_from(token).unwrap_or_default()
}
