//! The lock's steps in Rust, which the embedded store runs. Each has a Lua script that does the same.
//!
//! State: a hash owner -> hold count, whose expiry is the lease. At most one owner has a field.
//!
//! * Acquire: without a hash, create it with the requested count and the lease. If the owner
//!   already has a field, set its count; the expiry may only move later. Otherwise return the
//!   holder's remaining lease.
//! * Release: set the owner's count to the number of holds to keep, with 0 delete the hash, and
//!   then publish to wake one waiter. If another client deleted the hash, publish as well, because
//!   no other step wakes the waiters.
//! * Transfer: put a waiter of the same client in the place of the owner, unless other clients wait.
//! * Renew: extend the expiry if the owner has a field, but not beyond the time until which it may be renewed, if it was
//!   asked to release the lock.
//! * Force: delete the hash and publish.
//!
//! Steps carry the resulting count instead of a difference, so that sending a step twice has the
//! effect of sending it once. A hash with a `mode` is a read-write lock, and an error.

use std::collections::BTreeMap;
use std::time::Duration;

use smallvec::smallvec;

use crate::error::Result;
use crate::hold::requests;
use crate::hold::{Hold, ReleaseParams, Renewed};
use crate::keyspace::{Holds, Keyspace};
use crate::lease::{Expiry, Lease};
use crate::name::ObjectKeys;
use crate::primitives::lock::rules::{
    FOREIGN_HASH, NO_EXPIRY, READ_WRITE, is_held, parse_forced, parse_holder, wrong_kind,
};
use crate::primitives::lock::{AcquireParams, Holder};
use crate::step::{Args, Keys, Outcome, Script, ScriptReply, Step, script};

/// Acquires the lock for an owner, or returns how long another owner may still hold it.
pub(crate) struct Acquire<'a>(pub(crate) AcquireParams<'a>);

impl Step for Acquire<'_> {
    type Reply = Outcome;

    fn script(&self) -> &'static Script {
        script!(batchable(1, 2) "../expire.lua", "acquire.lua")
    }

    fn keys(&self) -> Keys<'_> {
        smallvec![self.0.hold.object.key()]
    }

    fn args(&self, args: &mut dyn Args) {
        args.text(&self.0.hold.field);
        args.number(self.0.lease.millis());
        if self.0.count > 1 {
            args.number(self.0.count.into());
        }
    }

    fn decode(&self, reply: ScriptReply) -> Result<Outcome> {
        parse_outcome(&self.0.hold.object, reply)
    }

    fn apply(&self, keyspace: &mut Keyspace) -> Result<Outcome> {
        try_acquire(keyspace, self.0)
    }
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

/// Sets an owner's hold count to the number of holds to keep; 0 releases the lock.
pub(crate) struct Release<'a> {
    pub(crate) params: ReleaseParams<'a>,
    /// Whether to wake a waiter.
    pub(crate) wakes_waiter: bool,
    /// The key of the requests from which a full release removes the owner, if it has to.
    pub(crate) requests: Option<String>,
    /// The remaining part of the previous lease, if this undoes an acquisition.
    pub(crate) restored_lease: Option<Lease>,
}

impl Step for Release<'_> {
    /// Whether the owner held the lock.
    type Reply = bool;

    fn script(&self) -> &'static Script {
        match self.requests {
            None => script!(batchable(1, 2) "release.lua"),
            // The same script, but batches of it have another number of arguments.
            Some(_) => script!(batchable(1, 3) "release.lua"),
        }
    }

    fn keys(&self) -> Keys<'_> {
        smallvec![self.params.hold.object.key()]
    }

    fn args(&self, args: &mut dyn Args) {
        let ReleaseParams { hold, keep, lease } = self.params;
        args.text(&hold.field);
        args.text(match self.wakes_waiter {
            true => hold.object.channel(),
            false => "",
        });
        if keep > 0 {
            args.number(keep.into());
            args.number(lease.map_or(0, Lease::millis));
            if let Some(restored_lease) = self.restored_lease {
                args.number(restored_lease.millis());
            }
        } else if let Some(requests) = &self.requests {
            args.text(requests);
        }
    }

    fn decode(&self, reply: ScriptReply) -> Result<bool> {
        reply.flag()
    }

    fn apply(&self, keyspace: &mut Keyspace) -> Result<bool> {
        let object = &self.params.hold.object;
        requests::remove(keyspace, self.requests.as_deref(), &self.params.hold.field);
        let held = set_hold_count(keyspace, self.params)?;
        let released = held && self.params.keep == 0;
        if self.wakes_waiter && (released || was_deleted(keyspace, held, object)) {
            keyspace.publish(object.channel(), 0);
        }
        if held
            && let Some(restored_lease) = self.restored_lease
            && let Some(mut holds) = keyspace.find::<Holds>(object.key())?
        {
            holds.shorten_to(restored_lease.duration());
        }
        Ok(held)
    }
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
    script!("wake.lua", "renew.lua")
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

/// Releases the lock whichever owner holds it.
pub(crate) struct Force<'a> {
    pub(crate) object: &'a ObjectKeys,
}

impl Step for Force<'_> {
    /// Whether it was held.
    type Reply = bool;

    fn script(&self) -> &'static Script {
        script!("force.lua")
    }

    fn keys(&self) -> Keys<'_> {
        smallvec![self.object.key()]
    }

    fn args(&self, args: &mut dyn Args) {
        args.text(self.object.channel());
    }

    fn decode(&self, reply: ScriptReply) -> Result<bool> {
        parse_forced(self.object, reply)
    }

    fn apply(&self, keyspace: &mut Keyspace) -> Result<bool> {
        let held = is_held(keyspace, self.object)?;
        if held {
            keyspace.remove(self.object.key());
            keyspace.publish(self.object.channel(), 0);
        }
        Ok(held)
    }
}

/// Returns the holder of the lock, with its hold count and remaining lease.
pub(crate) struct Inspect<'a> {
    pub(crate) object: &'a ObjectKeys,
}

impl Step for Inspect<'_> {
    type Reply = Vec<Holder>;

    fn script(&self) -> &'static Script {
        script!("inspect.lua")
    }

    fn keys(&self) -> Keys<'_> {
        smallvec![self.object.key()]
    }

    fn decode(&self, reply: ScriptReply) -> Result<Vec<Holder>> {
        match reply {
            ScriptReply::Nil => Ok(Vec::new()),
            ScriptReply::Integer(_) => Err(wrong_kind(self.object, FOREIGN_HASH)),
            other => Ok(vec![parse_holder(other)?]),
        }
    }

    fn apply(&self, keyspace: &mut Keyspace) -> Result<Vec<Holder>> {
        is_held(keyspace, self.object)?;
        let Some(holds) = keyspace.find::<Holds>(self.object.key())? else {
            return Ok(Vec::new());
        };
        let remaining = holds.remaining();
        let holder =
            |(owner, count): (&String, &u32)| Holder::new(owner.as_str().into(), *count, remaining);
        Ok(holds.value.counts.iter().map(holder).collect())
    }
}
