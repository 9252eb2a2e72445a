//! The latch's own step; the others come from `counter`.

use std::sync::Arc;

use smallvec::smallvec;

use crate::error::Result;
use crate::keyspace::Keyspace;
use crate::name::ObjectKeys;
use crate::primitives::counter::read_number;
use crate::step::{Args, Keys, Script, ScriptReply, Step, script};

/// The message that is published when a latch opens or is deleted.
pub(super) const OPENED: u32 = 0;
/// The message that is published when a new count is set.
pub(super) const CHANGED: u32 = 1;

/// Decrements a latch's count; at zero it is open, and its key is deleted. Not idempotent: must be executed at most once.
pub(super) struct CountDown {
    pub(super) object: Arc<ObjectKeys>,
    pub(super) by: u32,
}

impl Step for CountDown {
    /// The new count.
    type Reply = u64;

    fn script(&self) -> &'static Script {
        script!("../counter/counter.lua", "count_down.lua")
    }

    fn keys(&self) -> Keys<'_> {
        smallvec![self.object.key()]
    }

    fn args(&self, args: &mut dyn Args) {
        args.number(self.by.into());
        args.text(self.object.channel());
    }

    fn decode(&self, reply: ScriptReply) -> Result<u64> {
        reply.integer().map(count)
    }

    fn apply(&self, keyspace: &mut Keyspace) -> Result<u64> {
        let value = read_number(keyspace, self.object.key())?.unwrap_or(0);
        let left = value.saturating_sub(self.by.into());
        if left > 0 {
            *keyspace.find_or_create::<i64>(self.object.key())? = left;
        } else {
            keyspace.remove(self.object.key());
            if value > 0 {
                keyspace.publish(self.object.channel(), OPENED.into());
            }
        }
        Ok(count(left))
    }
}

/// Converts a stored number to a count: a negative number counts as zero.
pub(super) fn count(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}
