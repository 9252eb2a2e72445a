//! The semaphore's steps. State: one number, the available permits.
//!
//! * Take: subtract the permits if enough are available. Also return the semaphore's time to live,
//!   so that the guard does not release permits to a later semaphore of the same name.
//! * Add: add (or subtract) permits within the valid range, and publish the new number if it grew.
//! * Drain: set the number to zero and return it.
//!
//! No step may be sent twice: each changes the number by a difference, and the store does not
//! record which client did it.

use std::sync::Arc;

use smallvec::smallvec;

use crate::error::{Error, Result};
use crate::keyspace::Keyspace;
use crate::lease::Expiry;
use crate::name::ObjectKeys;
use crate::primitives::counter::read_number;
use crate::step::{Args, Keys, Outcome, Script, ScriptReply, Step, script};

/// The maximum number of permits, available or (below zero) missing: what a Java `int` holds.
pub(super) const MAX_PERMITS: i64 = i32::MAX as i64;

/// Takes permits, if enough are available. Replies when the semaphore expires.
pub(super) struct TakePermits<'a> {
    pub(super) object: &'a ObjectKeys,
    pub(super) permits: u32,
}

impl Step for TakePermits<'_> {
    /// `None`: no permits are set.
    type Reply = Option<Outcome<Expiry>>;

    fn script(&self) -> &'static Script {
        script!(batchable(1, 1) "../counter/counter.lua", "take.lua")
    }

    fn keys(&self) -> Keys<'_> {
        smallvec![self.object.key()]
    }

    fn args(&self, args: &mut dyn Args) {
        args.number(self.permits.into());
    }

    fn decode(&self, reply: ScriptReply) -> Result<Option<Outcome<Expiry>>> {
        match reply {
            ScriptReply::Integer(-1) => return Ok(None),
            ScriptReply::Integer(0) => return Ok(Some(Outcome::Wait(Expiry::Never))),
            _ => {}
        }
        let [ttl] = reply.array()?;
        let ttl = Expiry::from_millis(ttl.integer()?);
        Ok(Some(Outcome::Done(ttl)))
    }

    fn apply(&self, keyspace: &mut Keyspace) -> Result<Option<Outcome<Expiry>>> {
        let permits = i64::from(self.permits);
        Ok(match keyspace.find::<i64>(self.object.key())? {
            Some(found) if *found.value >= permits => {
                *found.value -= permits;
                Some(Outcome::Done(found.remaining()))
            }
            Some(_) => Some(Outcome::Wait(Expiry::Never)),
            None => None,
        })
    }
}

/// Adds permits, or removes some. Replies with the new number; `None` if there is no semaphore and
/// none may be created.
pub(super) struct Add {
    pub(super) object: Arc<ObjectKeys>,
    pub(super) permits: i32,
    pub(super) if_exists: bool,
}

impl Add {
    fn out_of_range(&self) -> Error {
        Error::InvalidCount {
            count: self.permits.into(),
            reason: "added to the existing permits, the sum is more than 2147483647 or less than \
                     -2147483647",
        }
    }
}

impl Step for Add {
    type Reply = Option<i64>;

    fn script(&self) -> &'static Script {
        script!(batchable(1, 4) "../counter/counter.lua", "add.lua")
    }

    fn keys(&self) -> Keys<'_> {
        smallvec![self.object.key()]
    }

    fn args(&self, args: &mut dyn Args) {
        args.number(self.permits.into());
        args.number(self.if_exists.into());
        args.text(self.object.channel());
        args.number(MAX_PERMITS);
    }

    fn decode(&self, reply: ScriptReply) -> Result<Option<i64>> {
        match reply {
            ScriptReply::Integer(0) => Ok(None),
            ScriptReply::Integer(-1) => Err(self.out_of_range()),
            sum => {
                let [sum] = sum.array()?;
                sum.integer().map(Some)
            }
        }
    }

    fn apply(&self, keyspace: &mut Keyspace) -> Result<Option<i64>> {
        let value = read_number(keyspace, self.object.key())?;
        if value.is_none() && self.if_exists {
            return Ok(None);
        }
        let added = i64::from(self.permits);
        let sum = value.unwrap_or(0).saturating_add(added);
        if (added > 0 && sum > MAX_PERMITS) || (added < 0 && sum < -MAX_PERMITS) {
            return Err(self.out_of_range());
        }
        // A new key gets no expiry; an existing one keeps its own.
        *keyspace.find_or_create::<i64>(self.object.key())? = sum;
        if added > 0 {
            keyspace.publish(self.object.channel(), sum);
        }
        Ok(Some(sum))
    }
}

/// Takes all available permits. A negative number becomes zero.
pub(super) struct Drain {
    pub(super) object: Arc<ObjectKeys>,
}

impl Step for Drain {
    /// How many permits were available.
    type Reply = i64;

    fn script(&self) -> &'static Script {
        script!("../counter/counter.lua", "drain.lua")
    }

    fn keys(&self) -> Keys<'_> {
        smallvec![self.object.key()]
    }

    fn decode(&self, reply: ScriptReply) -> Result<i64> {
        reply.integer()
    }

    fn apply(&self, keyspace: &mut Keyspace) -> Result<i64> {
        let found = keyspace.find::<i64>(self.object.key())?;
        Ok(found.map_or(0, |found| std::mem::take(found.value)))
    }
}
