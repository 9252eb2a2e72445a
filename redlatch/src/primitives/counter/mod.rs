//! Counter that semaphores and latches share: an integer under a key. The key does not exist until the
//! counter is set.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::smallvec;

use crate::error::Result;
use crate::keyspace::Keyspace;
use crate::lease::Lease;
use crate::name::ObjectKeys;
use crate::step::{Args, Keys, Script, ScriptReply, Step, script};

/// Warns that the number of a semaphore's permits is not set: once, until it is set.
#[derive(Debug, Clone, Default)]
pub(crate) struct UnsetWarning(Arc<AtomicBool>);

impl UnsetWarning {
    pub(crate) fn record(&self, semaphore: &str, is_set: bool) {
        if !self.0.swap(!is_set, Ordering::Relaxed) && !is_set {
            tracing::warn!(semaphore, "no permits are set; no request gets any");
        }
    }
}

/// Returns the counter's value; 0 if it does not exist.
pub(crate) struct Read<'a> {
    pub(crate) object: &'a ObjectKeys,
}

impl Step for Read<'_> {
    type Reply = i64;

    fn script(&self) -> &'static Script {
        script!("counter.lua", "read.lua")
    }

    fn keys(&self) -> Keys<'_> {
        smallvec![self.object.key()]
    }

    fn decode(&self, reply: ScriptReply) -> Result<i64> {
        reply.integer()
    }

    fn apply(&self, keyspace: &mut Keyspace) -> Result<i64> {
        Ok(read_number(keyspace, self.object.key())?.unwrap_or(0))
    }
}

/// Sets the counter if it does not exist. Replies whether this step set it.
pub(crate) struct SetIfAbsent {
    pub(crate) object: Arc<ObjectKeys>,
    pub(crate) number: u32,
    /// `None`: the counter never expires.
    pub(crate) time_to_live: Option<Lease>,
    /// The message to publish if the counter is set.
    pub(crate) payload: u32,
    /// Whether a value of zero or less is overwritten, as if the counter did not exist.
    pub(crate) overwrites_nonpositive: bool,
}

impl Step for SetIfAbsent {
    type Reply = bool;

    fn script(&self) -> &'static Script {
        script!("counter.lua", "set_if_absent.lua")
    }

    fn keys(&self) -> Keys<'_> {
        smallvec![self.object.key()]
    }

    fn args(&self, args: &mut dyn Args) {
        args.number(self.number.into());
        args.number(self.time_to_live.map_or(0, Lease::millis));
        args.text(self.object.channel());
        args.number(self.payload.into());
        args.number(self.overwrites_nonpositive.into());
    }

    fn decode(&self, reply: ScriptReply) -> Result<bool> {
        reply.flag()
    }

    fn apply(&self, keyspace: &mut Keyspace) -> Result<bool> {
        let blocks = |number| number > 0 || !self.overwrites_nonpositive;
        if read_number(keyspace, self.object.key())?.is_some_and(blocks) {
            return Ok(false);
        }
        let time_to_live = self.time_to_live.map(Lease::duration);
        keyspace.set(self.object.key(), i64::from(self.number), time_to_live);
        keyspace.publish(self.object.channel(), self.payload.into());
        Ok(true)
    }
}

/// Deletes the counter. Replies whether it existed.
pub(crate) struct Delete {
    pub(crate) object: Arc<ObjectKeys>,
    /// The message to publish; `None` if the deletion wakes no waiters.
    pub(crate) payload: Option<u32>,
}

impl Step for Delete {
    type Reply = bool;

    fn script(&self) -> &'static Script {
        script!("counter.lua", "delete.lua")
    }

    fn keys(&self) -> Keys<'_> {
        smallvec![self.object.key()]
    }

    fn args(&self, args: &mut dyn Args) {
        match self.payload {
            Some(payload) => {
                args.text(self.object.channel());
                args.number(payload.into());
            }
            None => args.text(""),
        }
    }

    fn decode(&self, reply: ScriptReply) -> Result<bool> {
        reply.flag()
    }

    fn apply(&self, keyspace: &mut Keyspace) -> Result<bool> {
        if read_number(keyspace, self.object.key())?.is_none() {
            return Ok(false);
        }
        keyspace.remove(self.object.key());
        if let Some(payload) = self.payload {
            keyspace.publish(self.object.channel(), payload.into());
        }
        Ok(true)
    }
}

/// Returns the number under a key, if there is one.
pub(crate) fn read_number(keyspace: &mut Keyspace, key: &str) -> Result<Option<i64>> {
    let found = keyspace.find::<i64>(key)?;
    Ok(found.map(|found| *found.value))
}
