//! The latch's own step; the others come from `number`.

use std::sync::Arc;

use redis::Value;
use tokio::time::Instant;

use crate::error::Result;
use crate::name::Place;
use crate::primitives::number::{number, script};
use crate::space::Space;
use crate::step::{Args, Script, Step, unexpected};

/// The message that a latch is open.
pub(super) const OPENED: u32 = 0;
/// The message that a new count was set.
pub(super) const CHANGED: u32 = 1;

/// Decrements a latch's count; at zero it is open, and its key is deleted. May not be sent twice.
pub(super) struct CountDown {
    pub(super) place: Arc<Place>,
    pub(super) by: u32,
}

impl Step for CountDown {
    /// The new count.
    type Reply = u64;

    fn script(&self) -> &'static Script {
        script!("count_down.lua")
    }

    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send {
        std::iter::once(self.place.key())
    }

    fn args(&self, args: &mut Args<'_>) {
        args.number(self.by.into());
        args.text(self.place.channel());
    }

    fn reply(&self, raw: Value) -> Result<u64> {
        match raw {
            Value::Int(left) => Ok(count(left)),
            other => Err(unexpected(&other)),
        }
    }

    fn apply(&self, space: &mut Space, now: Instant) -> Result<u64> {
        let value = number(space, &self.place, now)?.unwrap_or(0);
        let left = value.saturating_sub(self.by.into());
        if left > 0 {
            *space.find_or_begin::<i64>(self.place.key(), now)? = left;
        } else {
            space.remove(self.place.key());
            if value > 0 {
                space.publish(self.place.channel(), OPENED.into());
            }
        }
        Ok(count(left))
    }
}

/// Converts a stored number to a count: a negative number counts as zero.
pub(super) fn count(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}
