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
use std::time::Duration;

use redis::Value;
use tokio::time::Instant;

use super::MAX_PERMITS;
use crate::error::{Error, Result};
use crate::keyspace::Keyspace;
use crate::name::ObjectKeys;
use crate::primitives::counter::{read_number, script};
use crate::step::{Args, Outcome, Script, Step, unexpected_reply};

/// Takes permits, if enough are available. Replies with the semaphore's remaining time to live;
/// [`Duration::MAX`] if it never expires.
pub(super) struct TakePermits<'a> {
    pub(super) object: &'a ObjectKeys,
    pub(super) permits: u32,
}

impl Step for TakePermits<'_> {
    type Reply = Outcome<Duration>;

    fn script(&self) -> &'static Script {
        script!("take.lua")
    }

    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send {
        std::iter::once(self.object.key())
    }

    fn args(&self, args: &mut Args<'_>) {
        args.number(self.permits.into());
    }

    fn reply(&self, raw: Value) -> Result<Outcome<Duration>> {
        match &raw {
            Value::Int(0) => Ok(Outcome::Wait(Duration::MAX)),
            Value::Array(ttl) => match ttl.as_slice() {
                [Value::Int(ttl)] => {
                    let ttl = u64::try_from(*ttl).map(Duration::from_millis);
                    Ok(Outcome::Done(ttl.unwrap_or(Duration::MAX)))
                }
                _ => Err(unexpected_reply(&raw)),
            },
            _ => Err(unexpected_reply(&raw)),
        }
    }

    fn apply(&self, keyspace: &mut Keyspace, now: Instant) -> Result<Outcome<Duration>> {
        let permits = i64::from(self.permits);
        match keyspace.find::<i64>(self.object.key(), now)? {
            Some(found) if *found.value >= permits => {
                *found.value -= permits;
                Ok(Outcome::Done(found.remaining(now)))
            }
            _ => Ok(Outcome::Wait(Duration::MAX)),
        }
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
        script!("add.lua")
    }

    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send {
        std::iter::once(self.object.key())
    }

    fn args(&self, args: &mut Args<'_>) {
        args.signed(self.permits.into());
        args.number(self.if_exists.into());
        args.text(self.object.channel());
        args.signed(MAX_PERMITS);
    }

    fn reply(&self, raw: Value) -> Result<Option<i64>> {
        match raw {
            Value::Int(0) => Ok(None),
            Value::Int(-1) => Err(self.out_of_range()),
            Value::Array(sum) => match sum.as_slice() {
                [Value::Int(sum)] => Ok(Some(*sum)),
                _ => Err(unexpected_reply(&Value::Array(sum))),
            },
            other => Err(unexpected_reply(&other)),
        }
    }

    fn apply(&self, keyspace: &mut Keyspace, now: Instant) -> Result<Option<i64>> {
        let value = read_number(keyspace, &self.object, now)?;
        if value.is_none() && self.if_exists {
            return Ok(None);
        }
        let added = i64::from(self.permits);
        let sum = value.unwrap_or(0).saturating_add(added);
        if (added > 0 && sum > MAX_PERMITS) || (added < 0 && sum < -MAX_PERMITS) {
            return Err(self.out_of_range());
        }
        // A new key gets no expiry; an existing one keeps its own.
        *keyspace.find_or_create::<i64>(self.object.key(), now)? = sum;
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
        script!("drain.lua")
    }

    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send {
        std::iter::once(self.object.key())
    }

    fn args(&self, _: &mut Args<'_>) {}

    fn reply(&self, raw: Value) -> Result<i64> {
        match raw {
            Value::Int(permits) => Ok(permits),
            other => Err(unexpected_reply(&other)),
        }
    }

    fn apply(&self, keyspace: &mut Keyspace, now: Instant) -> Result<i64> {
        let found = keyspace.find::<i64>(self.object.key(), now)?;
        Ok(found.map_or(0, |found| std::mem::take(found.value)))
    }
}
