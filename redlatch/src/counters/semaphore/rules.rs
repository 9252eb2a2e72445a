//! The semaphore's steps. State: one number, the available permits.
//!
//! * Take: subtract the permits if enough are available. Also return the semaphore's time to live,
//!   so that the guard does not release permits to a later semaphore of the same name.
//! * Add: add (or subtract) permits within the valid range, and publish the new number if it grew.
//! * Drain: set the number to zero and return it.
//!
//! No step may be sent twice: each changes the number by a difference, and the store does not
//! record which client did it.

use crate::counters::read_number;
use crate::error::Error;
use crate::lease::Expiry;
use crate::name::ObjectKeys;
use crate::step::{Outcome, ScriptReply, Step, args, script};

/// The maximum number of permits, available or (below zero) missing: what a Java `int` holds.
pub(super) const MAX_PERMITS: i64 = i32::MAX as i64;

/// Takes permits, if enough are available. Replies when the semaphore expires; `None` if no permits
/// are set.
pub(super) fn take_permits(object: &ObjectKeys, permits: u32) -> Step<'_, Option<Outcome<Expiry>>> {
    Step::new(
        script!(batchable(1, 1) "../counter.lua", "take.lua"),
        [object.key()],
        args![permits],
        |reply| {
            match reply {
                ScriptReply::Integer(-1) => return Ok(None),
                ScriptReply::Integer(0) => return Ok(Some(Outcome::Wait(Expiry::Never))),
                _ => {}
            }
            let [ttl] = reply.array()?;
            let ttl = Expiry::from_millis(ttl.integer()?);
            Ok(Some(Outcome::Done(ttl)))
        },
        move |keyspace| {
            let permits = i64::from(permits);
            Ok(match keyspace.find::<i64>(object.key())? {
                Some(found) if *found.value >= permits => {
                    *found.value -= permits;
                    Some(Outcome::Done(found.remaining()))
                }
                Some(_) => Some(Outcome::Wait(Expiry::Never)),
                None => None,
            })
        },
    )
}

fn out_of_range(permits: i32) -> Error {
    Error::InvalidCount {
        count: permits.into(),
        reason: "added to the existing permits, the sum is more than 2147483647 or less than \
                 -2147483647",
    }
}

/// Adds permits, or removes some. Replies with the new number; `None` if there is no semaphore and
/// none may be created.
pub(super) fn add(object: &ObjectKeys, permits: i32, if_exists: bool) -> Step<'_, Option<i64>> {
    Step::new(
        script!(batchable(1, 4) "../counter.lua", "add.lua"),
        [object.key()],
        args![i64::from(permits), if_exists, object.channel(), MAX_PERMITS],
        move |reply| match reply {
            ScriptReply::Integer(0) => Ok(None),
            ScriptReply::Integer(-1) => Err(out_of_range(permits)),
            sum => {
                let [sum] = sum.array()?;
                sum.integer().map(Some)
            }
        },
        move |keyspace| {
            let value = read_number(keyspace, object.key())?;
            if value.is_none() && if_exists {
                return Ok(None);
            }
            let added = i64::from(permits);
            let sum = value.unwrap_or(0).saturating_add(added);
            if (added > 0 && sum > MAX_PERMITS) || (added < 0 && sum < -MAX_PERMITS) {
                return Err(out_of_range(permits));
            }
            // A new key gets no expiry; an existing one keeps its own.
            *keyspace.find_or_create::<i64>(object.key())? = sum;
            if added > 0 {
                keyspace.publish(object.channel(), sum);
            }
            Ok(Some(sum))
        },
    )
}

/// Takes all available permits. A negative number becomes zero. Replies how many permits were
/// available.
pub(super) fn drain(object: &ObjectKeys) -> Step<'_, i64> {
    Step::new(
        script!("../counter.lua", "drain.lua"),
        [object.key()],
        args![],
        ScriptReply::integer,
        move |keyspace| {
            let found = keyspace.find::<i64>(object.key())?;
            Ok(found.map_or(0, |found| std::mem::take(found.value)))
        },
    )
}
