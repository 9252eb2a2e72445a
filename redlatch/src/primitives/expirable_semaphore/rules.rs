//! The semaphore's steps in Rust, which the embedded store runs. Each has a Lua script that does the same.
//!
//! State: the number of free permits, and a sorted set of the held permits: id -> timestamp of expiry.
//!
//! * Every step except renewal first removes the expired permits from the set and adds them to the
//!   free ones ([`OnSemaphore`], `prelude.lua`).
//! * Acquire: if no permits are set, first set the number that the request carries, if any. The client chooses the ids. Ids that are already in the set were taken by an earlier
//!   attempt whose answer was lost, and are not counted again. If there are too few free permits,
//!   return when the first held permit expires.
//! * Release: remove the ids from the set, add them to the free permits, and publish their number.
//!   All steps that add free permits publish.
//! * Renew: extend the timestamps of a guard's permits, only if all of them are held.
//! * Without a number no permits are set, and the entries of the set belong to no semaphore.
//!
//! The embedded store keeps ids in hex, a server keeps their bytes.

use std::collections::BTreeMap;
use std::sync::Arc;

use smallvec::smallvec;

use super::permit_id::{PermitId, split_ids};
use crate::error::Result;
use crate::hold::Hold;
use crate::keyspace::Keyspace;
use crate::lease::{Expiry, Lease};
use crate::name::PermitKeys;
use crate::primitives::counter::read_number;
use crate::primitives::lock::Holder;
use crate::step::{Args, Keys, Outcome, Script, ScriptReply, Step, script, unexpected_reply};

/// The maximum number of permits of a semaphore: what a Java `int` holds, because Redisson counts
/// the same permits.
pub(super) const MAX_PERMITS: u32 = i32::MAX.unsigned_abs();

/// Timestamps on which permits expire, by id.
type Timestamps = BTreeMap<String, i64>;

/// A step on a semaphore: releases the expired permits, then runs the operation.
pub(super) struct OnSemaphore<O>(pub(super) Arc<PermitKeys>, pub(super) O);

/// What a step does after the expired permits were released.
pub(super) trait Operation: Send + Sync {
    type Reply: Send;

    /// The script, which begins with `prelude.lua`.
    fn script(&self) -> &'static Script;
    /// Adds the arguments of the script that follow the channel, if it has any.
    fn args(&self, args: &mut dyn Args) {
        let _ = args;
    }
    fn decode(&self, reply: ScriptReply) -> Result<Self::Reply>;
    fn apply(&self, semaphore: &mut SemaphoreState<'_>) -> Result<Self::Reply>;
}

impl<O: Operation> Step for OnSemaphore<O> {
    type Reply = O::Reply;

    fn script(&self) -> &'static Script {
        self.1.script()
    }

    fn keys(&self) -> Keys<'_> {
        smallvec![self.0.object.key(), &*self.0.deadlines]
    }

    fn args(&self, args: &mut dyn Args) {
        args.text(self.0.object.channel());
        self.1.args(args);
    }

    fn decode(&self, reply: ScriptReply) -> Result<O::Reply> {
        self.1.decode(reply)
    }

    fn apply(&self, keyspace: &mut Keyspace) -> Result<O::Reply> {
        self.1.apply(&mut SemaphoreState::load(keyspace, &self.0)?)
    }
}

/// The state after the prelude.
pub(super) struct SemaphoreState<'a> {
    keyspace: &'a mut Keyspace,
    keys: &'a PermitKeys,
    /// `None`: no permits are set.
    available: Option<i64>,
    /// The timestamp, rounded up to whole milliseconds, so that a lease that begins now is not shortened
    /// by a part of a millisecond.
    now_rounded_up: i64,
}

impl<'a> SemaphoreState<'a> {
    /// Releases the expired permits. Permits of a deleted semaphore belong to no semaphore and stay as they are.
    fn load(keyspace: &'a mut Keyspace, keys: &'a PermitKeys) -> Result<SemaphoreState<'a>> {
        let now = keyspace.now_ms();
        let mut state = SemaphoreState {
            now_rounded_up: keyspace.now_ms_rounded_up(),
            available: read_number(keyspace, keys.object.key())?,
            keyspace,
            keys,
        };
        let is_set = state.available.is_some();
        // An error, if the key contains other data.
        let held = state.timestamps()?;
        if let Some(held) = held.filter(|_| is_set) {
            let before = held.len();
            held.retain(|_, timestamp| *timestamp > now);
            let expired = signed(before - held.len());
            if expired > 0 {
                let sum = state.add(expired)?;
                state.available = Some(sum);
                if sum > 0 {
                    state.publish(sum);
                }
            }
        }
        Ok(state)
    }

    /// Returns the timestamps at which permits expire, if there are any.
    fn timestamps(&mut self) -> Result<Option<&mut Timestamps>> {
        let found = self.keyspace.find::<Timestamps>(&self.keys.deadlines)?;
        Ok(found.map(|found| found.value))
    }

    /// Returns the time until a timestamp.
    fn left(&self, timestamp: i64) -> Expiry {
        Expiry::from_millis(timestamp.saturating_sub(self.now_rounded_up).max(0))
    }

    /// Changes the number of free permits. Returns the new number.
    fn add(&mut self, delta: i64) -> Result<i64> {
        let available: &mut i64 = self.keyspace.find_or_create(self.keys.object.key())?;
        *available = available.saturating_add(delta);
        Ok(*available)
    }

    fn publish(&mut self, available: i64) {
        self.keyspace.publish(self.keys.object.channel(), available);
    }

    /// Adds free permits and publishes their number. Permits held of a deleted semaphore are not
    /// counted into one that is set again under the same name.
    fn add_and_publish(&mut self, delta: i64) -> Result<()> {
        if self.available.is_none() {
            self.keyspace.remove(&self.keys.deadlines);
        }
        let sum = self.add(delta)?;
        self.publish(sum);
        Ok(())
    }

    /// Returns the number of held permits.
    fn held(&mut self) -> Result<i64> {
        match self.available {
            Some(_) => Ok(self.timestamps()?.map_or(0, |held| signed(held.len()))),
            None => Ok(0),
        }
    }

    /// Returns how many of these permits are held.
    fn count_held(&mut self, ids: &str) -> Result<usize> {
        let held = self.timestamps()?;
        Ok(held.map_or(0, |held| {
            split_ids(ids).filter(|id| held.contains_key(*id)).count()
        }))
    }
}

/// Returns the end of a lease that begins now.
fn end(now_rounded_up: i64, lease: Lease) -> i64 {
    now_rounded_up.saturating_add(lease.millis())
}

fn signed(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// Acquires permits under ids that the client has chosen, or returns when the next one expires.
pub(super) struct Acquire<'a> {
    pub(super) ids: &'a str,
    pub(super) lease: Lease,
    /// The total number of permits, to set if none are set; 0: none.
    pub(super) permits: u32,
}

impl Operation for Acquire<'_> {
    /// `None`: no permits are set.
    type Reply = Option<Outcome>;

    fn script(&self) -> &'static Script {
        script!("prelude.lua", "acquire.lua")
    }

    fn args(&self, args: &mut dyn Args) {
        args.text(self.ids);
        args.number(self.lease.millis());
        args.number(self.permits.into());
    }

    fn decode(&self, reply: ScriptReply) -> Result<Option<Outcome>> {
        Ok(match reply {
            ScriptReply::Nil => Some(Outcome::ACQUIRED),
            ScriptReply::Integer(-2) => None,
            other => Some(Outcome::Wait(Expiry::from_millis(other.integer()?))),
        })
    }

    fn apply(&self, semaphore: &mut SemaphoreState<'_>) -> Result<Option<Outcome>> {
        let is_set = semaphore.available.is_some();
        let free = semaphore.available.unwrap_or(self.permits.into());
        if !is_set && free == 0 {
            return Ok(None);
        }
        // Repeated because the answer was lost: the permits are already held. Those of a deleted semaphore do not count.
        let held = match is_set {
            true => semaphore.count_held(self.ids)?,
            false => 0,
        };
        let missing = signed(split_ids(self.ids).count() - held);
        if missing > 0 {
            if free < missing {
                if !is_set {
                    semaphore.add_and_publish(free)?;
                }
                let held = semaphore.timestamps()?;
                let first = held.and_then(|held| held.values().min().copied());
                let wait = first.map_or(Expiry::Never, |first| semaphore.left(first));
                return Ok(Some(Outcome::Wait(wait)));
            }
            match is_set {
                true => drop(semaphore.add(-missing)?),
                false => semaphore.add_and_publish(free - missing)?,
            }
        }
        let end = end(semaphore.now_rounded_up, self.lease);
        let deadlines = &semaphore.keys.deadlines;
        let held: &mut Timestamps = semaphore.keyspace.find_or_create(deadlines)?;
        for id in split_ids(self.ids) {
            let timestamp = held.entry(id.to_owned()).or_insert(end);
            *timestamp = end.max(*timestamp);
        }
        Ok(Some(Outcome::ACQUIRED))
    }
}

/// Releases permits.
pub(super) struct Release<'a> {
    pub(super) ids: &'a str,
    pub(super) mode: ReleaseMode,
}

/// Which of the permits to release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReleaseMode {
    /// Those that are held.
    Held,
    /// All, if all are held; otherwise none.
    AllOrNone,
    /// None: only count.
    CountOnly,
}

impl Operation for Release<'_> {
    /// How many of them were held.
    type Reply = usize;

    fn script(&self) -> &'static Script {
        script!("prelude.lua", "release.lua")
    }

    fn args(&self, args: &mut dyn Args) {
        args.text(self.ids);
        args.text(match self.mode {
            ReleaseMode::Held => "any",
            ReleaseMode::AllOrNone => "all",
            ReleaseMode::CountOnly => "none",
        });
    }

    fn decode(&self, reply: ScriptReply) -> Result<usize> {
        Ok(usize::try_from(reply.integer()?).unwrap_or(0))
    }

    fn apply(&self, semaphore: &mut SemaphoreState<'_>) -> Result<usize> {
        let held_count = match semaphore.available {
            Some(_) => semaphore.count_held(self.ids)?,
            None => 0,
        };
        let kept = match self.mode {
            ReleaseMode::Held => false,
            ReleaseMode::AllOrNone => held_count < split_ids(self.ids).count(),
            ReleaseMode::CountOnly => true,
        };
        if held_count == 0 || kept {
            return Ok(held_count);
        }
        if let Some(held) = semaphore.timestamps()? {
            for id in split_ids(self.ids) {
                held.remove(id);
            }
        }
        semaphore.add_and_publish(signed(held_count))?;
        Ok(held_count)
    }
}

/// Renews the leases of many sets of permits.
pub(super) fn renew_script() -> &'static Script {
    script!("renew.lua")
}

/// Renews one set, as the script does.
pub(super) fn renew(
    keyspace: &mut Keyspace,
    keys: &PermitKeys,
    hold: &Hold,
    lease: Option<Lease>,
) -> Result<bool> {
    let now = keyspace.now_ms();
    let now_rounded_up = keyspace.now_ms_rounded_up();
    let Some(held) = keyspace.find::<Timestamps>(&keys.deadlines)? else {
        return Ok(false);
    };
    let is_held = |id| held.value.get(id).is_some_and(|timestamp| *timestamp > now);
    if !split_ids(&hold.field).all(is_held) {
        return Ok(false);
    }
    let Some(end) = lease.map(|lease| end(now_rounded_up, lease)) else {
        return Ok(true);
    };
    for id in split_ids(&hold.field) {
        if let Some(timestamp) = held.value.get_mut(id) {
            *timestamp = end.max(*timestamp);
        }
    }
    Ok(true)
}

/// Sets the total number of permits, including held ones.
pub(super) struct Set {
    pub(super) permits: u32,
    /// Only if none are set.
    pub(super) if_absent: bool,
}

impl Operation for Set {
    /// Whether they were set.
    type Reply = bool;

    fn script(&self) -> &'static Script {
        script!("prelude.lua", "set.lua")
    }

    fn args(&self, args: &mut dyn Args) {
        args.number(self.permits.into());
        args.number(self.if_absent.into());
    }

    fn decode(&self, reply: ScriptReply) -> Result<bool> {
        reply.flag()
    }

    fn apply(&self, semaphore: &mut SemaphoreState<'_>) -> Result<bool> {
        if semaphore.available.is_some() && self.if_absent {
            return Ok(false);
        }
        let wanted = i64::from(self.permits) - semaphore.held()?;
        if semaphore.available != Some(wanted) {
            semaphore.add_and_publish(wanted - semaphore.available.unwrap_or(0))?;
        }
        Ok(true)
    }
}

/// Adds a signed number to the free permits; the result may be negative.
pub(super) struct Add {
    pub(super) delta: i64,
}

impl Operation for Add {
    /// Whether it was added; otherwise the absolute value of the result would exceed [`MAX_PERMITS`].
    type Reply = bool;

    fn script(&self) -> &'static Script {
        script!("prelude.lua", "add.lua")
    }

    fn args(&self, args: &mut dyn Args) {
        args.number(self.delta);
        args.number(MAX_PERMITS.into());
    }

    fn decode(&self, reply: ScriptReply) -> Result<bool> {
        reply.flag()
    }

    fn apply(&self, semaphore: &mut SemaphoreState<'_>) -> Result<bool> {
        let sum = semaphore.available.unwrap_or(0).saturating_add(self.delta);
        if sum.saturating_abs() > i64::from(MAX_PERMITS) {
            return Ok(false);
        }
        semaphore.add_and_publish(self.delta)?;
        Ok(true)
    }
}

/// Returns the number of free permits and the number of held permits.
pub(super) struct Count;

/// The reply of [`Count`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) available: i64,
    pub(super) acquired: i64,
}

impl Operation for Count {
    type Reply = Counts;

    fn script(&self) -> &'static Script {
        script!("prelude.lua", "count.lua")
    }

    fn decode(&self, reply: ScriptReply) -> Result<Counts> {
        let [available, acquired] = reply.array()?;
        Ok(Counts {
            available: available.integer()?,
            acquired: acquired.integer()?,
        })
    }

    fn apply(&self, semaphore: &mut SemaphoreState<'_>) -> Result<Counts> {
        Ok(Counts {
            available: semaphore.available.unwrap_or(0),
            acquired: semaphore.held()?,
        })
    }
}

/// Sets the time at which a permit expires, earlier or later than before.
pub(super) struct UpdateLease<'a> {
    pub(super) id: &'a str,
    pub(super) lease: Lease,
}

impl Operation for UpdateLease<'_> {
    /// Whether the permit is held.
    type Reply = bool;

    fn script(&self) -> &'static Script {
        script!("prelude.lua", "update_lease.lua")
    }

    fn args(&self, args: &mut dyn Args) {
        args.text(self.id);
        args.number(self.lease.millis());
    }

    fn decode(&self, reply: ScriptReply) -> Result<bool> {
        reply.flag()
    }

    fn apply(&self, semaphore: &mut SemaphoreState<'_>) -> Result<bool> {
        let Some(available) = semaphore.available else {
            return Ok(false);
        };
        let end = end(semaphore.now_rounded_up, self.lease);
        let held = semaphore.timestamps()?;
        let Some(timestamp) = held.and_then(|held| held.get_mut(self.id)) else {
            return Ok(false);
        };
        let expires_earlier = end < *timestamp;
        *timestamp = end;
        if expires_earlier {
            // Waiters sleep until the first permit expires, and this may be the first now.
            semaphore.publish(available);
        }
        Ok(true)
    }
}

/// Returns when a permit expires.
pub(super) struct LeaseOf<'a> {
    pub(super) id: &'a str,
}

impl Operation for LeaseOf<'_> {
    /// `None`: it is not held.
    type Reply = Option<Expiry>;

    fn script(&self) -> &'static Script {
        script!("prelude.lua", "lease_of.lua")
    }

    fn args(&self, args: &mut dyn Args) {
        args.text(self.id);
    }

    fn decode(&self, reply: ScriptReply) -> Result<Option<Expiry>> {
        match reply {
            ScriptReply::Nil => Ok(None),
            other => Ok(Some(Expiry::from_millis(other.integer()?))),
        }
    }

    fn apply(&self, semaphore: &mut SemaphoreState<'_>) -> Result<Option<Expiry>> {
        if semaphore.available.is_none() {
            return Ok(None);
        }
        let timestamp = semaphore
            .timestamps()?
            .and_then(|held| held.get(self.id).copied());
        Ok(timestamp.map(|timestamp| semaphore.left(timestamp)))
    }
}

/// Returns the held permits and their remaining leases.
pub(super) struct Inspect;

impl Operation for Inspect {
    type Reply = Vec<Holder>;

    fn script(&self) -> &'static Script {
        script!("prelude.lua", "inspect.lua")
    }

    fn decode(&self, reply: ScriptReply) -> Result<Vec<Holder>> {
        let holder = |one: &[ScriptReply]| match one {
            [ScriptReply::Bytes(id), ScriptReply::Integer(left)] => {
                let id = PermitId::from_store(id)?;
                Some(Ok(holder(id.to_string(), Expiry::from_millis(*left))))
            }
            other => Some(Err(unexpected_reply(&other))),
        };
        reply.list()?.chunks(2).filter_map(holder).collect()
    }

    fn apply(&self, semaphore: &mut SemaphoreState<'_>) -> Result<Vec<Holder>> {
        if semaphore.available.is_none() {
            return Ok(Vec::new());
        }
        let held = semaphore.timestamps()?.cloned().unwrap_or_default();
        let holder = |(id, timestamp)| holder(id, semaphore.left(timestamp));
        Ok(held.into_iter().map(holder).collect())
    }
}

/// Returns a held permit in the form that all kinds share: its id takes the place of the owner.
fn holder(id: String, remaining: Expiry) -> Holder {
    Holder::new(id.into(), 1, remaining)
}

/// Releases all held permits, whichever clients hold them.
pub(super) struct Force;

impl Operation for Force {
    /// Whether any were held.
    type Reply = bool;

    fn script(&self) -> &'static Script {
        script!("prelude.lua", "force.lua")
    }

    fn decode(&self, reply: ScriptReply) -> Result<bool> {
        reply.flag()
    }

    fn apply(&self, semaphore: &mut SemaphoreState<'_>) -> Result<bool> {
        let held = semaphore.held()?;
        if held > 0 {
            semaphore.keyspace.remove(&semaphore.keys.deadlines);
            semaphore.add_and_publish(held)?;
        }
        Ok(held > 0)
    }
}

/// Deletes the semaphore.
pub(super) struct Delete;

impl Operation for Delete {
    /// Whether it existed.
    type Reply = bool;

    fn script(&self) -> &'static Script {
        script!("prelude.lua", "delete.lua")
    }

    fn decode(&self, reply: ScriptReply) -> Result<bool> {
        reply.flag()
    }

    fn apply(&self, semaphore: &mut SemaphoreState<'_>) -> Result<bool> {
        let existed = semaphore.available.is_some();
        if existed {
            semaphore.keyspace.remove(&semaphore.keys.deadlines);
            semaphore.keyspace.remove(semaphore.keys.object.key());
        }
        Ok(existed)
    }
}
