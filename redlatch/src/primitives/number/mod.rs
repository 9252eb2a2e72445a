//! The part that semaphore and latch share: a number under a key that does not exist until it is
//! set.

use std::sync::Arc;

use redis::Value;
use tokio::time::Instant;

use crate::error::Result;
use crate::lease::Lease;
use crate::name::Place;
use crate::space::Space;
use crate::step::{Args, Script, Step, unexpected, yes_or_no};

/// Returns a script that uses numbers, with the function `number(key)` prepended.
macro_rules! script {
    ($file:literal) => {{
        static SCRIPT: $crate::step::Script = $crate::step::Script::new(concat!(
            include_str!("../number/number.lua"),
            include_str!($file)
        ));
        &SCRIPT
    }};
}

pub(crate) use script;

/// Returns the number; 0 if there is none.
pub(crate) struct Read<'a> {
    pub(crate) place: &'a Place,
}

impl Step for Read<'_> {
    type Reply = i64;

    fn script(&self) -> &'static Script {
        script!("read.lua")
    }

    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send {
        std::iter::once(self.place.key())
    }

    fn args(&self, _: &mut Args<'_>) {}

    fn reply(&self, raw: Value) -> Result<i64> {
        match raw {
            Value::Int(number) => Ok(number),
            other => Err(unexpected(&other)),
        }
    }

    fn apply(&self, space: &mut Space, now: Instant) -> Result<i64> {
        Ok(number(space, self.place, now)?.unwrap_or(0))
    }
}

/// Sets the number if there is none. Replies whether it was set.
pub(crate) struct Begin {
    pub(crate) place: Arc<Place>,
    pub(crate) number: u32,
    pub(crate) time_to_live: Option<Lease>,
    pub(crate) payload: u32,
    /// Whether only a number above zero counts; any other is treated as missing.
    pub(crate) above_zero: bool,
}

impl Step for Begin {
    type Reply = bool;

    fn script(&self) -> &'static Script {
        script!("begin.lua")
    }

    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send {
        std::iter::once(self.place.key())
    }

    fn args(&self, args: &mut Args<'_>) {
        args.number(self.number.into());
        args.number(self.time_to_live.map_or(0, Lease::millis));
        args.text(self.place.channel());
        args.number(self.payload.into());
        args.number(self.above_zero.into());
    }

    fn reply(&self, raw: Value) -> Result<bool> {
        yes_or_no(&raw)
    }

    fn apply(&self, space: &mut Space, now: Instant) -> Result<bool> {
        let counts = |number| number > 0 || !self.above_zero;
        if number(space, &self.place, now)?.is_some_and(counts) {
            return Ok(false);
        }
        let ends = self.time_to_live.map(|lives| now + lives.duration());
        space.set(self.place.key(), i64::from(self.number), ends, now);
        space.publish(self.place.channel(), self.payload.into());
        Ok(true)
    }
}

/// Deletes the number. Replies whether there was one.
pub(crate) struct Delete {
    pub(crate) place: Arc<Place>,
    /// The message to publish, if there may be waiters.
    pub(crate) payload: Option<u32>,
}

impl Step for Delete {
    type Reply = bool;

    fn script(&self) -> &'static Script {
        script!("delete.lua")
    }

    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send {
        std::iter::once(self.place.key())
    }

    fn args(&self, args: &mut Args<'_>) {
        match self.payload {
            Some(payload) => {
                args.text(self.place.channel());
                args.number(payload.into());
            }
            None => args.text(""),
        }
    }

    fn reply(&self, raw: Value) -> Result<bool> {
        yes_or_no(&raw)
    }

    fn apply(&self, space: &mut Space, now: Instant) -> Result<bool> {
        if number(space, &self.place, now)?.is_none() {
            return Ok(false);
        }
        space.remove(self.place.key());
        if let Some(payload) = self.payload {
            space.publish(self.place.channel(), payload.into());
        }
        Ok(true)
    }
}

/// Returns the number, if there is one.
pub(crate) fn number(space: &mut Space, place: &Place, now: Instant) -> Result<Option<i64>> {
    let found = space.find::<i64>(place.key(), now)?;
    Ok(found.map(|found| *found.value))
}
