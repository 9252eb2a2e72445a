//! The semaphore and the count-down latch, whose state is a number under a key, and the steps that
//! both use. The key does not exist until a client sets the number.
//!
//! A counter has no owner, so there is no hold to renew or lose. A step that changes one cannot be
//! repeated. It is sent once, and if its caller drops it, a background task awaits the answer.

pub(crate) mod latch;
pub(crate) mod semaphore;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::Result;
use crate::keyspace::Keyspace;
use crate::lease::Lease;
use crate::name::ObjectKeys;
use crate::step::{ScriptReply, Step, args, script};

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
pub(crate) fn read(object: &ObjectKeys) -> Step<'_, i64> {
    Step::new(
        script!("counter.lua", "read.lua"),
        [object.key()],
        args![],
        ScriptReply::integer,
        |keyspace| Ok(read_number(keyspace, object.key())?.unwrap_or(0)),
    )
}

/// Sets the counter if it does not exist. Replies whether this step set it. `time_to_live`: `None`:
/// the counter never expires. `payload`: the message to publish if the counter is set.
/// `overwrites_nonpositive`: whether a value of zero or less is overwritten, as if the counter did
/// not exist.
pub(crate) fn set_if_absent(
    object: &ObjectKeys,
    number: u32,
    time_to_live: Option<Lease>,
    payload: u32,
    overwrites_nonpositive: bool,
) -> Step<'_, bool> {
    let args = args![
        number,
        time_to_live,
        object.channel(),
        payload,
        overwrites_nonpositive,
    ];
    Step::new(
        script!("counter.lua", "set_if_absent.lua"),
        [object.key()],
        args,
        ScriptReply::flag,
        move |keyspace| {
            let blocks = |number| number > 0 || !overwrites_nonpositive;
            if read_number(keyspace, object.key())?.is_some_and(blocks) {
                return Ok(false);
            }
            let time_to_live = time_to_live.map(Lease::duration);
            keyspace.set(object.key(), i64::from(number), time_to_live);
            keyspace.publish(object.channel(), payload.into());
            Ok(true)
        },
    )
}

/// Deletes the counter. Replies whether it existed. `payload`: the message to publish; `None` if
/// the deletion wakes no waiters.
pub(crate) fn delete(object: &ObjectKeys, payload: Option<u32>) -> Step<'_, bool> {
    let args = match payload {
        Some(payload) => args![object.channel(), payload],
        None => args![""],
    };
    Step::new(
        script!("counter.lua", "delete.lua"),
        [object.key()],
        args,
        ScriptReply::flag,
        move |keyspace| {
            if read_number(keyspace, object.key())?.is_none() {
                return Ok(false);
            }
            keyspace.remove(object.key());
            if let Some(payload) = payload {
                keyspace.publish(object.channel(), payload.into());
            }
            Ok(true)
        },
    )
}

/// Returns the number under a key, if there is one.
pub(crate) fn read_number(keyspace: &mut Keyspace, key: &str) -> Result<Option<i64>> {
    let found = keyspace.find::<i64>(key)?;
    Ok(found.map(|found| *found.value))
}
