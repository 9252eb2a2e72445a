//! The lock's steps in Rust, which the embedded store runs. Each has a Lua script that does the
//! same.
//!
//! State: a hash owner -> hold count, whose expiry is the lease. At most one owner has a field.
//!
//! * Acquire: without a hash, create it with the requested count and the lease. If the owner
//!   already has a field, set its count; the expiry may only move later. Otherwise return the
//!   holder's remaining lease.
//! * Release: set the owner's count to the number of holds to keep, with 0 delete the hash, and
//!   then publish to wake one waiter. If another client deleted the hash, publish as well, because
//!   no other step wakes the waiters.
//! * Hand off: put a successor in the place of the owner (`handoff`).
//! * Renew: extend the expiry if the owner has a field, but not beyond the time until which it may
//!   be renewed, if it was asked to release the lock.
//! * Force: delete the hash and publish.
//!
//! Steps carry the resulting count instead of a difference, so that sending a step twice has the
//! effect of sending it once. A hash with a `mode` is a read-write lock, and an error.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::error::Result;
use crate::hold::{AcquireParams, requests};
use crate::hold::{Hold, ReleaseParams, Renewed};
use crate::keyspace::{Holds, Keyspace};
use crate::lease::{Expiry, Lease};
use crate::locks::Holder;
use crate::locks::rules::{
    FOREIGN_HASH, NO_EXPIRY, READ_WRITE, is_held, parse_forced, parse_holder, wrong_kind,
};
use crate::name::ObjectKeys;
use crate::step::{Arg, Outcome, Script, ScriptReply, Step, args, script};

/// Acquires the lock for an owner, or returns how long another owner may still hold it.
pub(crate) fn acquire(params: AcquireParams<'_>) -> Step<'_, Outcome> {
    let AcquireParams {
        hold, count, lease, ..
    } = params;
    let mut args = args![&*hold.field, lease];
    if count > 1 {
        args.push(count.into());
    }
    Step::new(
        script!(batchable(1, 2) "../expire.lua", "acquire.lua"),
        [hold.object.key()],
        args,
        |reply| parse_outcome(&hold.object, reply),
        move |keyspace| try_acquire(keyspace, params),
    )
}

/// Interprets the reply of an acquisition: nil if it is held now, else how long to wait.
pub(crate) fn parse_outcome(object: &ObjectKeys, reply: ScriptReply) -> Result<Outcome> {
    match reply {
        ScriptReply::Nil => Ok(Outcome::ACQUIRED),
        left => wait_outcome(object, Expiry::from_millis(left.integer()?)),
    }
}

/// Interprets another owner's remaining lease. A lock always has one; a key that never expires is
/// not a lock.
pub(crate) fn wait_outcome(object: &ObjectKeys, left: Expiry) -> Result<Outcome> {
    match left {
        Expiry::In(_) => Ok(Outcome::Wait(left)),
        Expiry::Never => Err(wrong_kind(object, NO_EXPIRY)),
    }
}

/// Acquires a lock's hash for an owner, or returns how long another owner may still hold it.
pub(crate) fn try_acquire(keyspace: &mut Keyspace, params: AcquireParams<'_>) -> Result<Outcome> {
    let (object, owner) = (&*params.hold.object, &*params.hold.field);
    let lease = params.lease.duration();
    let Some(mut holds) = keyspace.find::<Holds>(object.key())? else {
        if params.count > 1 {
            // The hold to re-enter has been lost.
            return Ok(Outcome::Wait(Expiry::In(Duration::ZERO)));
        }
        let holds = Holds {
            counts: BTreeMap::from([(owner.to_owned(), params.count)]),
            mode: None,
        };
        keyspace.set(object.key(), holds, Some(lease));
        return Ok(Outcome::ACQUIRED);
    };
    if holds.value.mode.is_some() {
        return Err(wrong_kind(object, READ_WRITE));
    }
    let Some(held) = holds.value.counts.get_mut(owner) else {
        return wait_outcome(object, holds.remaining());
    };
    *held = params.count;
    holds.extend_to(lease);
    Ok(Outcome::ACQUIRED)
}

/// Sets an owner's hold count to the number of holds to keep; 0 releases the lock. Replies whether
/// the owner held it. `channel`: on which it wakes a waiter; empty if waiters poll.
pub(crate) fn release<'a>(params: ReleaseParams<'a>, channel: &'a str) -> Step<'a, bool> {
    release_and(params, channel, params.requests_key(), None)
}

/// Undoes an acquisition: sets the hold count back to `keep`, and the lease to `restored_lease`,
/// the rest of the previous one.
pub(crate) fn undo(hold: &Hold, keep: u32, restored_lease: Lease) -> Step<'_, bool> {
    let lease = None;
    let params = ReleaseParams { hold, keep, lease };
    release_and(params, "", None, Some(restored_lease))
}

fn release_and<'a>(
    params: ReleaseParams<'a>,
    channel: &'a str,
    requests: Option<String>,
    restored_lease: Option<Lease>,
) -> Step<'a, bool> {
    let ReleaseParams { hold, keep, lease } = params;
    let object = &hold.object;
    let mut args = args![&*hold.field, channel];
    if keep > 0 {
        args.extend(args![keep, lease]);
        args.extend(restored_lease.map(Arg::from));
    } else {
        args.extend(requests.clone().map(Arg::from));
    }
    let script = match requests {
        None => script!(batchable(1, 2) "release.lua"),
        // The same script, but batches of it have another number of arguments.
        Some(_) => script!(batchable(1, 3) "release.lua"),
    };
    let apply = move |keyspace: &mut Keyspace| {
        requests::remove(keyspace, requests.as_deref(), &hold.field);
        let held = set_hold_count(keyspace, params)?;
        let released = held && keep == 0;
        if !channel.is_empty() && (released || was_deleted(keyspace, held, object)) {
            keyspace.publish(channel, 0);
        }
        if held
            && let Some(restored_lease) = restored_lease
            && let Some(mut holds) = keyspace.find::<Holds>(object.key())?
        {
            holds.shorten_to(restored_lease.duration());
        }
        Ok(held)
    };
    Step::new(script, [object.key()], args, ScriptReply::flag, apply)
}

/// Sets an owner's hold count in a lock's hash. Returns whether it held the lock.
pub(crate) fn set_hold_count(keyspace: &mut Keyspace, params: ReleaseParams<'_>) -> Result<bool> {
    let ReleaseParams { hold, keep, lease } = params;
    let Some(mut holds) = keyspace.find::<Holds>(hold.object.key())? else {
        return Ok(false);
    };
    let Some(count) = holds.value.counts.get_mut(&*hold.field) else {
        return Ok(false);
    };
    if keep == 0 {
        keyspace.remove(hold.object.key());
    } else {
        *count = keep;
        if let Some(lease) = lease {
            holds.extend_to(lease.duration());
        }
    }
    Ok(true)
}

/// Renews the leases of many locks.
pub(crate) fn renew_script() -> &'static Script {
    script!("../../hold/requests.lua", "wake.lua", "renew.lua")
}

/// Returns whether an owner does not hold a lock because there is no hash: it was deleted by
/// FLUSHALL or DEL. The step that detects this wakes a waiter, because no other step does.
pub(crate) fn was_deleted(keyspace: &mut Keyspace, held: bool, object: &ObjectKeys) -> bool {
    !held && !keyspace.exists(object.key())
}

/// Renews one lock, as the script does.
pub(crate) fn renew(keyspace: &mut Keyspace, hold: &Hold, lease: Option<Lease>) -> Result<Renewed> {
    let renewed = requests::find(keyspace, hold);
    match keyspace.find::<Holds>(hold.object.key())? {
        Some(mut holds) if holds.value.counts.contains_key(&*hold.field) => {
            let lease = lease.map(|lease| renewed.limit(lease.duration()));
            if let Some(lease) = lease.filter(|lease| !lease.is_zero()) {
                holds.extend_to(lease);
            }
            Ok(renewed)
        }
        _ => Ok(Renewed::NotHeld),
    }
}

/// Releases the lock whichever owner holds it. Replies whether it was held.
pub(crate) fn force(object: &ObjectKeys) -> Step<'_, bool> {
    Step::new(
        script!("force.lua"),
        [object.key()],
        args![object.channel()],
        |reply| parse_forced(object, reply),
        |keyspace| {
            let held = is_held(keyspace, object)?;
            if held {
                keyspace.remove(object.key());
                keyspace.publish(object.channel(), 0);
            }
            Ok(held)
        },
    )
}

/// Returns the holder of the lock, with its hold count and remaining lease.
pub(crate) fn inspect(object: &ObjectKeys) -> Step<'_, Vec<Holder>> {
    Step::new(
        script!("inspect.lua"),
        [object.key()],
        args![],
        |reply| match reply {
            ScriptReply::Nil => Ok(Vec::new()),
            ScriptReply::Integer(_) => Err(wrong_kind(object, FOREIGN_HASH)),
            other => Ok(vec![parse_holder(other)?]),
        },
        |keyspace| {
            is_held(keyspace, object)?;
            let Some(holds) = keyspace.find::<Holds>(object.key())? else {
                return Ok(Vec::new());
            };
            let remaining = holds.remaining();
            let holder = |(owner, count): (&String, &u32)| {
                Holder::new(owner.as_str().into(), *count, remaining)
            };
            Ok(holds.value.counts.iter().map(holder).collect())
        },
    )
}
