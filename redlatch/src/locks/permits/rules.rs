//! The semaphore's steps in Rust, which the embedded store runs. Each has a Lua script that does
//! the same.
//!
//! State: the number of free permits, and a sorted set of the held permits: id -> timestamp of
//! expiry.
//!
//! * Every step except renewal first removes the expired permits from the set and adds them to the
//!   free ones ([`on_semaphore`], `prelude.lua`).
//! * Acquire: if no permits are set, first set the number that the request carries, if any. The
//!   client chooses the ids. Ids that are already in the set were taken by an earlier attempt whose
//!   answer was lost, and are not counted again. If there are too few free permits, return when the
//!   first held permit expires.
//! * Release: remove the ids from the set, add them to the free permits, and publish their number.
//!   All steps that add free permits publish.
//! * Renew: extend the timestamps of a guard's permits, only if all of them are held.
//! * Ask: record a request for a permit beside the semaphore (`hold/requests`), and publish. Renewals do
//!   not extend the leases of a guard beyond the earliest limit of its permits.
//! * Without a number no permits are set, and the entries of the set belong to no semaphore.
//!
//! The embedded store keeps ids in hex, a server keeps their bytes.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::Duration;

use super::permit_id::{PermitId, split_ids};
use crate::counters::read_number;
use crate::error::Result;
use crate::hold::{Hold, Renewed, requests};
use crate::keyspace::Keyspace;
use crate::lease::{Expiry, Lease, millis};
use crate::locks::Holder;
use crate::name::PermitKeys;
use crate::step::{Arg, Args, Outcome, Script, ScriptReply, Step, args, script, unexpected_reply};

/// The maximum number of permits of a semaphore: what a Java `int` holds, because Redisson counts
/// the same permits.
pub(crate) const MAX_PERMITS: u32 = i32::MAX.unsigned_abs();

/// Timestamps on which permits expire, by id.
type Timestamps = BTreeMap<String, i64>;

/// Returns a step on a semaphore: it releases the expired permits, then runs the operation.
/// `script`: begins with `prelude.lua`. `args`: those of the operation.
fn on_semaphore<'a, R>(
    keys: &'a PermitKeys,
    script: &'static Script,
    args: Args<'a>,
    decode: impl Fn(ScriptReply) -> Result<R> + Send + Sync + 'a,
    operation: impl Fn(&mut SemaphoreState<'_>) -> Result<R> + Send + Sync + 'a,
) -> Step<'a, R> {
    let mut all = args![keys.object.channel()];
    all.extend(args);
    Step::new(
        script,
        [keys.object.key(), &*keys.deadlines],
        all,
        decode,
        move |keyspace| operation(&mut SemaphoreState::load(keyspace, keys)?),
    )
}

/// The state after the prelude.
pub(super) struct SemaphoreState<'a> {
    keyspace: &'a mut Keyspace,
    keys: &'a PermitKeys,
    /// `None`: no permits are set.
    available: Option<i64>,
    /// The timestamp, rounded up to whole milliseconds, so that a lease that begins now is not
    /// shortened by a part of a millisecond.
    now_rounded_up: i64,
}

impl<'a> SemaphoreState<'a> {
    /// Releases the expired permits. Permits of a deleted semaphore belong to no semaphore and stay
    /// as they are.
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
/// Replies `None` if no permits are set. `permits`: the total number of permits, to set if none are
/// set; 0: none.
pub(super) fn acquire<'a>(
    keys: &'a PermitKeys,
    ids: &'a str,
    lease: Lease,
    permits: u32,
) -> Step<'a, Option<Outcome>> {
    on_semaphore(
        keys,
        script!("prelude.lua", "acquire.lua"),
        args![ids, lease, permits],
        |reply| {
            Ok(match reply {
                ScriptReply::Nil => Some(Outcome::ACQUIRED),
                ScriptReply::Integer(-2) => None,
                other => Some(Outcome::Wait(Expiry::from_millis(other.integer()?))),
            })
        },
        move |semaphore| {
            let is_set = semaphore.available.is_some();
            let free = semaphore.available.unwrap_or(permits.into());
            if !is_set && free == 0 {
                return Ok(None);
            }
            // Repeated because the answer was lost: the permits are already held. Those of a
            // deleted semaphore do not count.
            let held = match is_set {
                true => semaphore.count_held(ids)?,
                false => 0,
            };
            let missing = signed(split_ids(ids).count() - held);
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
            let end = end(semaphore.now_rounded_up, lease);
            let deadlines = &semaphore.keys.deadlines;
            let held: &mut Timestamps = semaphore.keyspace.find_or_create(deadlines)?;
            for id in split_ids(ids) {
                let timestamp = held.entry(id.to_owned()).or_insert(end);
                *timestamp = end.max(*timestamp);
            }
            Ok(Some(Outcome::ACQUIRED))
        },
    )
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

/// Releases permits. Replies how many of them were held. `requests`: from which the ids are removed, because they may be acquired
/// again.
pub(super) fn release<'a>(
    keys: &'a PermitKeys,
    ids: &'a str,
    mode: ReleaseMode,
    requests: Option<String>,
) -> Step<'a, usize> {
    let which = match mode {
        ReleaseMode::Held => "any",
        ReleaseMode::AllOrNone => "all",
        ReleaseMode::CountOnly => "none",
    };
    let mut args = args![ids, which];
    args.extend(requests.clone().map(Arg::from));
    on_semaphore(
        keys,
        script!("prelude.lua", "release.lua"),
        args,
        |reply| Ok(usize::try_from(reply.integer()?).unwrap_or(0)),
        move |semaphore| {
            for id in split_ids(ids) {
                requests::remove(semaphore.keyspace, requests.as_deref(), id);
            }
            let held_count = match semaphore.available {
                Some(_) => semaphore.count_held(ids)?,
                None => 0,
            };
            let kept = match mode {
                ReleaseMode::Held => false,
                ReleaseMode::AllOrNone => held_count < split_ids(ids).count(),
                ReleaseMode::CountOnly => true,
            };
            if held_count == 0 || kept {
                return Ok(held_count);
            }
            if let Some(held) = semaphore.timestamps()? {
                for id in split_ids(ids) {
                    held.remove(id);
                }
            }
            semaphore.add_and_publish(signed(held_count))?;
            Ok(held_count)
        },
    )
}

/// Renews the leases of many sets of permits.
pub(super) fn renew_script() -> &'static Script {
    script!("../../hold/requests.lua", "renew.lua")
}

/// Renews one set, as the script does.
pub(super) fn renew(
    keyspace: &mut Keyspace,
    keys: &PermitKeys,
    hold: &Hold,
    lease: Option<Lease>,
) -> Result<Renewed> {
    let renewed = requests::find_first(keyspace, hold, split_ids(&hold.field));
    let now = keyspace.now_ms();
    let now_rounded_up = keyspace.now_ms_rounded_up();
    let Some(held) = keyspace.find::<Timestamps>(&keys.deadlines)? else {
        return Ok(Renewed::NotHeld);
    };
    let is_held = |id| held.value.get(id).is_some_and(|timestamp| *timestamp > now);
    if !split_ids(&hold.field).all(is_held) {
        return Ok(Renewed::NotHeld);
    }
    let lease = lease.map(|lease| renewed.limit(lease.duration()));
    let Some(lease) = lease.filter(|lease| !lease.is_zero()) else {
        return Ok(renewed);
    };
    let end = now_rounded_up.saturating_add(millis(lease));
    for id in split_ids(&hold.field) {
        if let Some(timestamp) = held.value.get_mut(id) {
            *timestamp = end.max(*timestamp);
        }
    }
    Ok(renewed)
}

/// Asks the holder of a permit to release it. Replies whether the permit is held. `limit`: how long it may still be renewed,
/// if that is limited. Whole milliseconds, at most ten years.
pub(super) fn ask<'a>(
    keys: &'a PermitKeys,
    id: &'a str,
    limit: Option<Duration>,
) -> Step<'a, bool> {
    let object = &keys.object;
    let mut args = args![object.channel(), id];
    args.extend(limit.map(|limit| Arg::from(millis(limit))));
    Step::new(
        script!(
            "../expire.lua",
            "prelude.lua",
            "../../hold/record.lua",
            "ask.lua"
        ),
        [
            Cow::from(object.key()),
            (&*keys.deadlines).into(),
            object.requests_key().into(),
        ],
        args,
        ScriptReply::flag,
        move |keyspace| {
            let mut semaphore = SemaphoreState::load(keyspace, keys)?;
            let held = match semaphore.available {
                Some(_) => semaphore.timestamps()?.cloned().unwrap_or_default(),
                None => Timestamps::new(),
            };
            let Some(timestamp) = held.get(id) else {
                return Ok(false);
            };
            let left = semaphore.left(*timestamp).duration().unwrap_or_default();
            let is_held = |id: &str| held.contains_key(id);
            requests::record(keyspace, object, id, left, limit, is_held)?;
            Ok(true)
        },
    )
}

/// Sets the total number of permits, including held ones. Replies whether they were set.
/// `if_absent`: only if none are set.
pub(super) fn set(keys: &PermitKeys, permits: u32, if_absent: bool) -> Step<'_, bool> {
    on_semaphore(
        keys,
        script!("prelude.lua", "set.lua"),
        args![permits, if_absent],
        ScriptReply::flag,
        move |semaphore| {
            if semaphore.available.is_some() && if_absent {
                return Ok(false);
            }
            let wanted = i64::from(permits) - semaphore.held()?;
            if semaphore.available != Some(wanted) {
                semaphore.add_and_publish(wanted - semaphore.available.unwrap_or(0))?;
            }
            Ok(true)
        },
    )
}

/// Adds a signed number to the free permits; the result may be negative. Replies whether it was
/// added; otherwise the absolute value of the result would exceed [`MAX_PERMITS`].
pub(super) fn add(keys: &PermitKeys, delta: i64) -> Step<'_, bool> {
    on_semaphore(
        keys,
        script!("prelude.lua", "add.lua"),
        args![delta, MAX_PERMITS],
        ScriptReply::flag,
        move |semaphore| {
            let sum = semaphore.available.unwrap_or(0).saturating_add(delta);
            if sum.saturating_abs() > i64::from(MAX_PERMITS) {
                return Ok(false);
            }
            semaphore.add_and_publish(delta)?;
            Ok(true)
        },
    )
}

/// The reply of [`count`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) available: i64,
    pub(super) acquired: i64,
}

/// Returns the number of free permits and the number of held permits.
pub(super) fn count(keys: &PermitKeys) -> Step<'_, Counts> {
    on_semaphore(
        keys,
        script!("prelude.lua", "count.lua"),
        args![],
        |reply| {
            let [available, acquired] = reply.array()?;
            Ok(Counts {
                available: available.integer()?,
                acquired: acquired.integer()?,
            })
        },
        move |semaphore| {
            Ok(Counts {
                available: semaphore.available.unwrap_or(0),
                acquired: semaphore.held()?,
            })
        },
    )
}

/// Sets the time at which a permit expires, earlier or later than before. Replies whether the
/// permit is held.
pub(super) fn update_lease<'a>(keys: &'a PermitKeys, id: &'a str, lease: Lease) -> Step<'a, bool> {
    on_semaphore(
        keys,
        script!("prelude.lua", "update_lease.lua"),
        args![id, lease],
        ScriptReply::flag,
        move |semaphore| {
            let Some(available) = semaphore.available else {
                return Ok(false);
            };
            let end = end(semaphore.now_rounded_up, lease);
            let held = semaphore.timestamps()?;
            let Some(timestamp) = held.and_then(|held| held.get_mut(id)) else {
                return Ok(false);
            };
            let expires_earlier = end < *timestamp;
            *timestamp = end;
            if expires_earlier {
                // Waiters sleep until the first permit expires, and this may be the first now.
                semaphore.publish(available);
            }
            Ok(true)
        },
    )
}

/// Returns when a permit expires. Replies `None` if it is not held.
pub(super) fn lease_of<'a>(keys: &'a PermitKeys, id: &'a str) -> Step<'a, Option<Expiry>> {
    on_semaphore(
        keys,
        script!("prelude.lua", "lease_of.lua"),
        args![id],
        |reply| match reply {
            ScriptReply::Nil => Ok(None),
            other => Ok(Some(Expiry::from_millis(other.integer()?))),
        },
        move |semaphore| {
            if semaphore.available.is_none() {
                return Ok(None);
            }
            let timestamp = semaphore
                .timestamps()?
                .and_then(|held| held.get(id).copied());
            Ok(timestamp.map(|timestamp| semaphore.left(timestamp)))
        },
    )
}

/// Returns the held permits and their remaining leases.
pub(super) fn inspect(keys: &PermitKeys) -> Step<'_, Vec<Holder>> {
    on_semaphore(
        keys,
        script!("prelude.lua", "inspect.lua"),
        args![],
        |reply| {
            let holder = |one: &[ScriptReply]| match one {
                [ScriptReply::Bytes(id), ScriptReply::Integer(left)] => {
                    let id = PermitId::from_store(id)?;
                    Some(Ok(holder(id.to_string(), Expiry::from_millis(*left))))
                }
                other => Some(Err(unexpected_reply(&other))),
            };
            reply.list()?.chunks(2).filter_map(holder).collect()
        },
        move |semaphore| {
            if semaphore.available.is_none() {
                return Ok(Vec::new());
            }
            let held = semaphore.timestamps()?.cloned().unwrap_or_default();
            let holder = |(id, timestamp)| holder(id, semaphore.left(timestamp));
            Ok(held.into_iter().map(holder).collect())
        },
    )
}

/// Returns a held permit in the form that all kinds share: its id takes the place of the owner.
fn holder(id: String, remaining: Expiry) -> Holder {
    Holder::new(id.into(), 1, remaining)
}

/// Releases all held permits, whichever clients hold them. Replies whether any were held.
pub(super) fn force(keys: &PermitKeys) -> Step<'_, bool> {
    on_semaphore(
        keys,
        script!("prelude.lua", "force.lua"),
        args![],
        ScriptReply::flag,
        move |semaphore| {
            let held = semaphore.held()?;
            if held > 0 {
                semaphore.keyspace.remove(&semaphore.keys.deadlines);
                semaphore.add_and_publish(held)?;
            }
            Ok(held > 0)
        },
    )
}

/// Deletes the semaphore. Replies whether it existed.
pub(super) fn delete(keys: &PermitKeys) -> Step<'_, bool> {
    on_semaphore(
        keys,
        script!("prelude.lua", "delete.lua"),
        args![],
        ScriptReply::flag,
        move |semaphore| {
            let existed = semaphore.available.is_some();
            if existed {
                semaphore.keyspace.remove(&semaphore.keys.deadlines);
                semaphore.keyspace.remove(semaphore.keys.object.key());
            }
            Ok(existed)
        },
    )
}
