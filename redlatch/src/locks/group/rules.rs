//! The steps on one value of a group in Rust, which the embedded store runs. Each has a Lua script
//! that does the same.
//!
//! State: one hash for the whole group. A held value has three fields: its owner, and for this
//! owner the timestamp at which the hold ends and the hold count. (The ends are in the hash,
//! because values of different owners share the key.) A hold that has ended leaves its fields
//! behind.
//!
//! * Acquire: if the named owner is another one whose hold has not ended, return its remaining
//!   lease. If the hold of another one has ended, remove its fields. Then write owner, count and
//!   end. The end of the owner's own hold may only move later.
//! * Release: set the count to the number of holds to keep; with 0, or if the hold has ended,
//!   remove the owner's fields, and the value if it names this owner. Publish if no other owner is
//!   named.
//! * Renew: move the end later if the value names the owner and the hold has not ended.
//! * Force: remove the fields of value and holder, and publish.
//!
//! Invariant: only one owner is named, and only it holds the value (mutant
//! `group-value-granted-twice`). What must not happen, and what prevents it:
//!
//! - *A value ends with another one.* The key lives at least as long as each hold in it: no step
//!   shortens its expiry, and a key without an expiry keeps none. Each owner changes only its own
//!   fields.
//! - *A late release frees the value of the next owner.* A holder is stopped beyond its lease, and
//!   releases after another owner has acquired the value. A release frees a value only if the value
//!   names its owner. Redisson's checks only that its own hold has not ended by its own clock, so
//!   an acquisition removes the fields of the hold that it replaces.
//! - *A hold that has ended is renewed.* The script compares its end with the server's clock.
//! - *A request waits for its own owner, or for another value.* Waiters for different values have
//!   queues of their own, although they share the channel. Mutant
//!   `group-values-exclude-each-other`.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::error::Result;
use crate::hold::{AcquireParams, Hold, ReleaseParams};
use crate::keyspace::Keyspace;
use crate::lease::{Expiry, Lease};
use crate::locks::Holder;
use crate::locks::reentrant::rules::parse_outcome;
use crate::locks::rules::{parse_holder, wrong_kind};
use crate::name::GroupKeys;
use crate::step::{Arg, Outcome, Script, ScriptReply, Step, args, script};

type Fields = BTreeMap<String, String>;

/// On `1` a waiter in Redisson wakes all threads that sleep, on `0` one, or the next that would
/// sleep.
const WAKE_MESSAGES: [i64; 2] = [1, 0];

/// A value in the hash of its group.
struct ValueState<'a> {
    keyspace: &'a mut Keyspace,
    keys: &'a GroupKeys,
}

impl ValueState<'_> {
    /// Returns the fields of the group, if it exists.
    fn fields(&mut self) -> Result<Option<&mut Fields>> {
        let found = self.keyspace.find::<Fields>(self.keys.object.key())?;
        Ok(found.map(|found| found.value))
    }

    /// Returns the named owner, whose hold may have ended.
    fn owner(&mut self) -> Result<Option<String>> {
        let value = &*self.keys.value;
        Ok(self.fields()?.and_then(|fields| fields.get(value).cloned()))
    }

    /// Returns the remaining milliseconds of an owner's hold; 0: it has ended.
    fn remaining(&mut self, owner: &str) -> Result<i64> {
        let (now, field) = (self.keyspace.now_ms(), self.keys.end_field(owner));
        let ends = self.fields()?.and_then(|fields| fields.get(&field));
        let ends = ends.and_then(|ends| ends.parse::<i64>().ok());
        Ok(ends.map_or(0, |ends| ends.saturating_sub(now).max(0)))
    }

    /// Returns how long the value is held by this owner; 0 if it is not.
    fn held_by(&mut self, owner: &str) -> Result<i64> {
        match self.owner()?.as_deref() == Some(owner) {
            true => self.remaining(owner),
            false => Ok(0),
        }
    }

    /// Returns the holder and its remaining milliseconds.
    fn holder(&mut self) -> Result<Option<(String, i64)>> {
        let Some(owner) = self.owner()? else {
            return Ok(None);
        };
        let left = self.remaining(&owner)?;
        Ok((left > 0).then_some((owner, left)))
    }

    fn set(&mut self, field: String, text: String) -> Result<()> {
        let fields: &mut Fields = self.keyspace.find_or_create(self.keys.object.key())?;
        fields.insert(field, text);
        Ok(())
    }

    fn remove(&mut self, field: &str) -> Result<()> {
        self.fields()?.map(|fields| fields.remove(field));
        Ok(())
    }

    fn remove_owner_fields(&mut self, owner: &str) -> Result<()> {
        self.remove(&self.keys.end_field(owner))?;
        self.remove(&self.keys.count_field(owner))
    }

    /// Sets the end of a hold to `lease` from now.
    fn set_end(&mut self, owner: &str, lease: Lease) -> Result<()> {
        let end = self
            .keyspace
            .now_ms_rounded_up()
            .saturating_add(lease.millis());
        self.set(self.keys.end_field(owner), end.to_string())
    }

    /// Moves the end of a hold to `lease` from now, if that is later, and that of the key. `left`:
    /// remaining milliseconds of the hold.
    fn extend(&mut self, owner: &str, left: i64, lease: Lease) -> Result<()> {
        if left < lease.millis() {
            self.set_end(owner, lease)?;
            self.keep_key(lease)?;
        }
        Ok(())
    }

    /// Makes the key live for at least `lease`.
    fn keep_key(&mut self, lease: Lease) -> Result<()> {
        if let Some(mut found) = self.keyspace.find::<Fields>(self.keys.object.key())?
            && found.remaining() != Expiry::Never
        {
            found.extend_to(lease.duration());
        }
        Ok(())
    }

    fn wake(&mut self) {
        for message in WAKE_MESSAGES {
            self.keyspace.publish(self.keys.object.channel(), message);
        }
    }
}

/// Acquires a value for an owner, or returns how long another owner may still hold it.
pub(super) fn acquire<'a>(params: AcquireParams<'a>, keys: &'a GroupKeys) -> Step<'a, Outcome> {
    let mut args = args![&*params.hold.field, params.lease, &*keys.value];
    if params.count > 1 {
        args.push(params.count.into());
    }
    Step::new(
        script!(batchable(1, 3) "../expire.lua", "holders.lua", "acquire.lua"),
        [keys.object.key()],
        args,
        move |reply| parse_outcome(&keys.object, reply),
        move |keyspace| {
            let AcquireParams {
                hold, count, lease, ..
            } = params;
            let owner = &*hold.field;
            let is_new = !keyspace.exists(keys.object.key());
            let mut state = ValueState { keyspace, keys };
            let named = state.owner()?;
            if let Some(fields) = state.fields()?
                && (fields.contains_key("mode") || (named.is_none() && fields.len() == 1))
            {
                return Err(wrong_kind(&keys.object, "a lock of another kind"));
            }
            let mut left = 0;
            if let Some(named) = &named {
                left = state.remaining(named)?;
                if named != owner {
                    if left > 0 {
                        return Ok(Outcome::Wait(Expiry::from_millis(left)));
                    }
                    if count == 1 {
                        state.remove_owner_fields(named)?;
                    }
                }
            }
            if left == 0 && count > 1 {
                // The hold to re-enter has been lost.
                return Ok(Outcome::Wait(Expiry::In(Duration::ZERO)));
            }
            state.set(keys.value.to_string(), owner.to_owned())?;
            state.set(keys.count_field(owner), count.to_string())?;
            if is_new && let Some(mut found) = state.keyspace.find::<Fields>(keys.object.key())? {
                found.expire_after(lease.duration());
            }
            state.extend(owner, left, lease)?;
            Ok(Outcome::ACQUIRED)
        },
    )
}

/// Sets an owner's hold count of a value to the number of holds to keep; 0 releases the value.
/// Replies whether the owner held the value. `restored_lease`: the remaining part of the previous
/// lease, if this undoes an acquisition. Then it wakes no waiter.
pub(super) fn release<'a>(
    params: ReleaseParams<'a>,
    keys: &'a GroupKeys,
    restored_lease: Option<Lease>,
) -> Step<'a, bool> {
    let ReleaseParams { hold, keep, lease } = params;
    let channel = match restored_lease {
        None => keys.object.channel(),
        Some(_) => "",
    };
    let mut args = args![&*hold.field, channel, &*keys.value];
    if keep > 0 {
        args.extend(args![keep, lease]);
        args.extend(restored_lease.map(Arg::from));
    }
    Step::new(
        script!(batchable(1, 3) "../expire.lua", "holders.lua", "release.lua"),
        [keys.object.key()],
        args,
        ScriptReply::flag,
        move |keyspace| {
            let owner = &*hold.field;
            let mut state = ValueState { keyspace, keys };
            let left = state.held_by(owner)?;
            if left == 0 || keep == 0 {
                let named = state.owner()?;
                state.remove_owner_fields(owner)?;
                if named.as_deref() == Some(owner) {
                    state.remove(&keys.value)?;
                }
                if restored_lease.is_none() && named.is_none_or(|named| named == owner) {
                    state.wake();
                }
                return Ok(left > 0);
            }
            state.set(keys.count_field(owner), keep.to_string())?;
            if let Some(lease) = lease {
                state.extend(owner, left, lease)?;
            }
            if let Some(restored_lease) = restored_lease
                && left > restored_lease.millis()
            {
                state.set_end(owner, restored_lease)?;
            }
            Ok(true)
        },
    )
}

/// Renews the leases of many values.
pub(super) fn renew_script() -> &'static Script {
    script!("../expire.lua", "holders.lua", "renew.lua")
}

/// Renews one value, as the script does.
pub(super) fn renew(
    keyspace: &mut Keyspace,
    keys: &GroupKeys,
    hold: &Hold,
    lease: Option<Lease>,
) -> Result<bool> {
    let mut state = ValueState { keyspace, keys };
    let left = state.held_by(&hold.field)?;
    if left > 0
        && let Some(lease) = lease
    {
        state.extend(&hold.field, left, lease)?;
    } else if state.owner()?.is_none() {
        state.wake();
    }
    Ok(left > 0)
}

/// Returns the holder of a value, with its hold count and remaining lease.
pub(super) fn inspect(keys: &GroupKeys) -> Step<'_, Vec<Holder>> {
    Step::new(
        script!("../expire.lua", "holders.lua", "inspect.lua"),
        [keys.object.key()],
        args![&*keys.value],
        move |reply| match reply {
            ScriptReply::Nil => Ok(Vec::new()),
            holder => Ok(vec![parse_holder(holder)?]),
        },
        move |keyspace| {
            let mut state = ValueState { keyspace, keys };
            let Some((owner, left)) = state.holder()? else {
                return Ok(Vec::new());
            };
            let count_field = keys.count_field(&owner);
            let fields = state.fields()?;
            let count = fields.and_then(|fields| fields.get(&count_field)?.parse().ok());
            let (count, remaining) = (count.unwrap_or(1), Expiry::from_millis(left));
            Ok(vec![Holder::new(owner.as_str().into(), count, remaining)])
        },
    )
}

/// Releases the value whichever owner holds it. Replies whether it was held.
pub(super) fn force(keys: &GroupKeys) -> Step<'_, bool> {
    Step::new(
        script!("../expire.lua", "holders.lua", "force.lua"),
        [keys.object.key()],
        args![keys.object.channel(), &*keys.value],
        ScriptReply::flag,
        move |keyspace| {
            let mut state = ValueState { keyspace, keys };
            let Some((owner, _)) = state.holder()? else {
                return Ok(false);
            };
            state.remove_owner_fields(&owner)?;
            state.remove(&keys.value)?;
            state.wake();
            Ok(true)
        },
    )
}
