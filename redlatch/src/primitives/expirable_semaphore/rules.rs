//! The semaphore's steps in Rust, which the embedded store runs. Each has a Lua script that does the same.
//!
//! State: the number of free permits, and a sorted set of the held permits: id -> date of expiry.
//!
//! * Every step except renewal first removes the expired permits from the set and adds them to the
//!   free ones ([`SemaphoreState::load`], `prelude.lua`).
//! * Acquire: the client chooses the ids. Ids that are already in the set were taken by an earlier
//!   attempt whose answer was lost, and are not counted again. If there are too few free permits,
//!   return when the first held permit expires.
//! * Release: remove the ids from the set, add them to the free permits, and publish their number.
//!   All steps that add free permits publish.
//! * Renew: extend the dates of a guard's permits, only if all of them are held.
//! * Without a number no permits are set, and the entries of the set belong to no semaphore.
//!
//! The embedded store keeps ids in hex, a server keeps their bytes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use smallvec::smallvec;
use tokio::time::Instant;

use super::permit_id::{PermitId, split_ids};
use crate::error::Result;
use crate::hold::Hold;
use crate::keyspace::Keyspace;
use crate::lease::{Expiry, Lease};
use crate::name::PermitKeys;
use crate::primitives::lock::Holder;
use crate::step::{Args, Keys, Outcome, Script, ScriptReply, Step, script, unexpected_reply};

/// The maximum number of permits of a semaphore: what a Java `int` holds, because Redisson counts
/// the same permits.
pub(super) const MAX_PERMITS: u32 = i32::MAX.unsigned_abs();

/// Dates on which permits expire, by id.
type Dates = BTreeMap<String, i64>;

/// The keys of every step except renewal.
fn all_keys(keys: &PermitKeys) -> Keys<'_> {
    smallvec![keys.object.key(), &*keys.deadlines]
}

/// The state after the prelude.
struct SemaphoreState {
    /// `None`: no permits are set.
    available: Option<i64>,
    /// The date, rounded up to whole milliseconds, so that a lease that begins now is not shortened
    /// by a part of a millisecond.
    now_rounded_up: i64,
}

impl SemaphoreState {
    /// Releases the expired permits. Permits of a deleted semaphore belong to no semaphore and stay as they are.
    fn load(keyspace: &mut Keyspace, keys: &PermitKeys, at: Instant) -> Result<SemaphoreState> {
        let now = keyspace.date(at);
        let now_rounded_up = rounded_up(keyspace, at);
        let Some(found) = keyspace.find::<i64>(keys.object.key(), at)? else {
            // An error, if it contains other data.
            dates(keyspace, keys, at)?;
            let available = None;
            return Ok(SemaphoreState {
                available,
                now_rounded_up,
            });
        };
        let mut sum = *found.value;
        let mut expired = 0;
        if let Some(held) = keyspace.find::<Dates>(&keys.deadlines, at)? {
            let before = held.value.len();
            held.value.retain(|_, date| *date > now);
            expired = before - held.value.len();
        }
        if expired > 0 {
            sum = add(keyspace, keys, signed(expired), at)?;
            if sum > 0 {
                keyspace.publish(keys.object.channel(), sum);
            }
        }
        let available = Some(sum);
        Ok(SemaphoreState {
            available,
            now_rounded_up,
        })
    }

    /// Returns the time until a date.
    fn left(&self, date: i64) -> Expiry {
        Expiry::from_millis(date.saturating_sub(self.now_rounded_up).max(0))
    }

    /// Returns the end of a lease that begins now.
    fn end(&self, lease: Lease) -> i64 {
        end(self.now_rounded_up, lease)
    }

    /// Adds free permits and publishes their number. Permits held of a deleted semaphore are not
    /// counted into one that is set again under the same name.
    fn add_and_publish(
        &self,
        keyspace: &mut Keyspace,
        keys: &PermitKeys,
        delta: i64,
        at: Instant,
    ) -> Result<()> {
        if self.available.is_none() {
            keyspace.remove(&keys.deadlines);
        }
        let sum = add(keyspace, keys, delta, at)?;
        keyspace.publish(keys.object.channel(), sum);
        Ok(())
    }

    /// Returns the number of held permits.
    fn held(&self, keyspace: &mut Keyspace, keys: &PermitKeys, at: Instant) -> Result<i64> {
        let held = dates(keyspace, keys, at)?.map_or(0, |held| signed(held.len()));
        Ok(self.available.map_or(0, |_| held))
    }
}

/// Changes the number of free permits. Returns the new number.
fn add(keyspace: &mut Keyspace, keys: &PermitKeys, delta: i64, at: Instant) -> Result<i64> {
    let available: &mut i64 = keyspace.find_or_create(keys.object.key(), at)?;
    *available = available.saturating_add(delta);
    Ok(*available)
}

/// Returns the dates on which permits expire, if there are any.
fn dates<'a>(
    keyspace: &'a mut Keyspace,
    keys: &PermitKeys,
    at: Instant,
) -> Result<Option<&'a mut Dates>> {
    let found = keyspace.find::<Dates>(&keys.deadlines, at)?;
    Ok(found.map(|found| found.value))
}

/// Returns how many of these permits are held.
fn count_held(keyspace: &mut Keyspace, keys: &PermitKeys, ids: &str, at: Instant) -> Result<usize> {
    let held = keyspace.find::<Dates>(&keys.deadlines, at)?;
    Ok(held.map_or(0, |held| {
        split_ids(ids)
            .filter(|id| held.value.contains_key(*id))
            .count()
    }))
}

/// Returns the date, rounded up to whole milliseconds.
fn rounded_up(keyspace: &mut Keyspace, at: Instant) -> i64 {
    // The first call defines where dates begin, so it must be made with the original time.
    keyspace.date(at);
    keyspace.date(at + Duration::from_nanos(999_999))
}

fn end(now_rounded_up: i64, lease: Lease) -> i64 {
    now_rounded_up.saturating_add(i64::try_from(lease.millis()).unwrap_or(i64::MAX))
}

fn signed(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// Acquires permits under ids that the client has chosen, or returns when the next one expires.
pub(super) struct Acquire<'a> {
    pub(super) keys: &'a PermitKeys,
    pub(super) ids: &'a str,
    pub(super) lease: Lease,
}

impl Step for Acquire<'_> {
    type Reply = Outcome;

    fn script(&self) -> &'static Script {
        script!("prelude.lua", "acquire.lua")
    }

    fn keys(&self) -> Keys<'_> {
        all_keys(self.keys)
    }

    fn args(&self, args: &mut dyn Args) {
        args.text(self.keys.object.channel());
        args.text(self.ids);
        args.number(self.lease.millis());
    }

    fn decode(&self, reply: ScriptReply) -> Result<Outcome> {
        match reply {
            ScriptReply::Nil => Ok(Outcome::Done(())),
            other => Ok(Outcome::Wait(Expiry::from_millis(other.integer()?))),
        }
    }

    fn apply(&self, keyspace: &mut Keyspace, at: Instant) -> Result<Outcome> {
        let state = SemaphoreState::load(keyspace, self.keys, at)?;
        let Some(available) = state.available else {
            return Ok(Outcome::Wait(Expiry::Never));
        };
        // Repeated because the answer was lost: the permits are already held.
        let missing = split_ids(self.ids).count() - count_held(keyspace, self.keys, self.ids, at)?;
        if missing > 0 {
            if available < signed(missing) {
                let held = keyspace.find::<Dates>(&self.keys.deadlines, at)?;
                let first = held.and_then(|held| held.value.values().min().copied());
                let wait = first.map_or(Expiry::Never, |first| state.left(first));
                return Ok(Outcome::Wait(wait));
            }
            add(keyspace, self.keys, -signed(missing), at)?;
        }
        let end = state.end(self.lease);
        let held: &mut Dates = keyspace.find_or_create(&self.keys.deadlines, at)?;
        for id in split_ids(self.ids) {
            let date = held.entry(id.to_owned()).or_insert(end);
            *date = end.max(*date);
        }
        Ok(Outcome::Done(()))
    }
}

/// Releases permits.
pub(super) struct Release<'a> {
    pub(super) keys: &'a PermitKeys,
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

impl Step for Release<'_> {
    /// How many of them were held.
    type Reply = usize;

    fn script(&self) -> &'static Script {
        script!("prelude.lua", "release.lua")
    }

    fn keys(&self) -> Keys<'_> {
        all_keys(self.keys)
    }

    fn args(&self, args: &mut dyn Args) {
        args.text(self.keys.object.channel());
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

    fn apply(&self, keyspace: &mut Keyspace, at: Instant) -> Result<usize> {
        let state = SemaphoreState::load(keyspace, self.keys, at)?;
        let held_count = match state.available {
            Some(_) => count_held(keyspace, self.keys, self.ids, at)?,
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
        if let Some(held) = keyspace.find::<Dates>(&self.keys.deadlines, at)? {
            for id in split_ids(self.ids) {
                held.value.remove(id);
            }
        }
        state.add_and_publish(keyspace, self.keys, signed(held_count), at)?;
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
    at: Instant,
) -> Result<bool> {
    let now = keyspace.date(at);
    let now_rounded_up = rounded_up(keyspace, at);
    let Some(held) = keyspace.find::<Dates>(&keys.deadlines, at)? else {
        return Ok(false);
    };
    let is_held = |id| held.value.get(id).is_some_and(|date| *date > now);
    if !split_ids(&hold.field).all(is_held) {
        return Ok(false);
    }
    let Some(end) = lease.map(|lease| end(now_rounded_up, lease)) else {
        return Ok(true);
    };
    for id in split_ids(&hold.field) {
        if let Some(date) = held.value.get_mut(id) {
            *date = end.max(*date);
        }
    }
    Ok(true)
}

/// Sets the total number of permits, including held ones.
pub(super) struct Set {
    pub(super) keys: Arc<PermitKeys>,
    pub(super) permits: u32,
    /// Only if none are set.
    pub(super) if_absent: bool,
}

impl Step for Set {
    /// Whether they were set.
    type Reply = bool;

    fn script(&self) -> &'static Script {
        script!("prelude.lua", "set.lua")
    }

    fn keys(&self) -> Keys<'_> {
        all_keys(&self.keys)
    }

    fn args(&self, args: &mut dyn Args) {
        args.text(self.keys.object.channel());
        args.number(self.permits.into());
        args.number(self.if_absent.into());
    }

    fn decode(&self, reply: ScriptReply) -> Result<bool> {
        reply.flag()
    }

    fn apply(&self, keyspace: &mut Keyspace, at: Instant) -> Result<bool> {
        let state = SemaphoreState::load(keyspace, &self.keys, at)?;
        if state.available.is_some() && self.if_absent {
            return Ok(false);
        }
        let wanted = i64::from(self.permits) - state.held(keyspace, &self.keys, at)?;
        if state.available != Some(wanted) {
            let delta = wanted - state.available.unwrap_or(0);
            state.add_and_publish(keyspace, &self.keys, delta, at)?;
        }
        Ok(true)
    }
}

/// Adds free permits, or removes some.
pub(super) struct Add {
    pub(super) keys: Arc<PermitKeys>,
    pub(super) delta: i64,
}

impl Step for Add {
    /// Whether they were added; otherwise there would be too many.
    type Reply = bool;

    fn script(&self) -> &'static Script {
        script!("prelude.lua", "add.lua")
    }

    fn keys(&self) -> Keys<'_> {
        all_keys(&self.keys)
    }

    fn args(&self, args: &mut dyn Args) {
        args.text(self.keys.object.channel());
        args.signed(self.delta);
        args.number(MAX_PERMITS.into());
    }

    fn decode(&self, reply: ScriptReply) -> Result<bool> {
        reply.flag()
    }

    fn apply(&self, keyspace: &mut Keyspace, at: Instant) -> Result<bool> {
        let state = SemaphoreState::load(keyspace, &self.keys, at)?;
        let sum = state.available.unwrap_or(0).saturating_add(self.delta);
        if sum.saturating_abs() > i64::from(MAX_PERMITS) {
            return Ok(false);
        }
        state.add_and_publish(keyspace, &self.keys, self.delta, at)?;
        Ok(true)
    }
}

/// Returns the numbers of permits.
pub(super) struct Count<'a> {
    pub(super) keys: &'a PermitKeys,
}

/// The reply of [`Count`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) available: i64,
    pub(super) acquired: i64,
}

impl Step for Count<'_> {
    type Reply = Counts;

    fn script(&self) -> &'static Script {
        script!("prelude.lua", "count.lua")
    }

    fn keys(&self) -> Keys<'_> {
        all_keys(self.keys)
    }

    fn args(&self, args: &mut dyn Args) {
        args.text(self.keys.object.channel());
    }

    fn decode(&self, reply: ScriptReply) -> Result<Counts> {
        let [available, acquired] = reply.array()?;
        Ok(Counts {
            available: available.integer()?,
            acquired: acquired.integer()?,
        })
    }

    fn apply(&self, keyspace: &mut Keyspace, at: Instant) -> Result<Counts> {
        let state = SemaphoreState::load(keyspace, self.keys, at)?;
        let Some(available) = state.available else {
            return Ok(Counts {
                available: 0,
                acquired: 0,
            });
        };
        Ok(Counts {
            available,
            acquired: state.held(keyspace, self.keys, at)?,
        })
    }
}

/// Sets the time at which a permit expires, earlier or later than before.
pub(super) struct UpdateLease<'a> {
    pub(super) keys: &'a PermitKeys,
    pub(super) id: &'a str,
    pub(super) lease: Lease,
}

impl Step for UpdateLease<'_> {
    /// Whether the permit is held.
    type Reply = bool;

    fn script(&self) -> &'static Script {
        script!("prelude.lua", "update_lease.lua")
    }

    fn keys(&self) -> Keys<'_> {
        all_keys(self.keys)
    }

    fn args(&self, args: &mut dyn Args) {
        args.text(self.keys.object.channel());
        args.text(self.id);
        args.number(self.lease.millis());
    }

    fn decode(&self, reply: ScriptReply) -> Result<bool> {
        reply.flag()
    }

    fn apply(&self, keyspace: &mut Keyspace, at: Instant) -> Result<bool> {
        let state = SemaphoreState::load(keyspace, self.keys, at)?;
        let Some(available) = state.available else {
            return Ok(false);
        };
        let end = state.end(self.lease);
        let held = dates(keyspace, self.keys, at)?;
        let Some(date) = held.and_then(|held| held.get_mut(self.id)) else {
            return Ok(false);
        };
        let expires_earlier = end < *date;
        *date = end;
        if expires_earlier {
            // Waiters sleep until the first permit expires, and this may be the first now.
            keyspace.publish(self.keys.object.channel(), available);
        }
        Ok(true)
    }
}

/// Returns when a permit expires.
pub(super) struct LeaseOf<'a> {
    pub(super) keys: &'a PermitKeys,
    pub(super) id: &'a str,
}

impl Step for LeaseOf<'_> {
    /// `None`: it is not held.
    type Reply = Option<Expiry>;

    fn script(&self) -> &'static Script {
        script!("prelude.lua", "lease_of.lua")
    }

    fn keys(&self) -> Keys<'_> {
        all_keys(self.keys)
    }

    fn args(&self, args: &mut dyn Args) {
        args.text(self.keys.object.channel());
        args.text(self.id);
    }

    fn decode(&self, reply: ScriptReply) -> Result<Option<Expiry>> {
        match reply {
            ScriptReply::Nil => Ok(None),
            other => Ok(Some(Expiry::from_millis(other.integer()?))),
        }
    }

    fn apply(&self, keyspace: &mut Keyspace, at: Instant) -> Result<Option<Expiry>> {
        let state = SemaphoreState::load(keyspace, self.keys, at)?;
        if state.available.is_none() {
            return Ok(None);
        }
        let date = dates(keyspace, self.keys, at)?.and_then(|held| held.get(self.id));
        Ok(date.map(|date| state.left(*date)))
    }
}

/// Returns the held permits and their remaining leases.
pub(super) struct Inspect<'a> {
    pub(super) keys: &'a PermitKeys,
}

impl Step for Inspect<'_> {
    type Reply = Vec<Holder>;

    fn script(&self) -> &'static Script {
        script!("prelude.lua", "inspect.lua")
    }

    fn keys(&self) -> Keys<'_> {
        all_keys(self.keys)
    }

    fn args(&self, args: &mut dyn Args) {
        args.text(self.keys.object.channel());
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

    fn apply(&self, keyspace: &mut Keyspace, at: Instant) -> Result<Vec<Holder>> {
        let state = SemaphoreState::load(keyspace, self.keys, at)?;
        if state.available.is_none() {
            return Ok(Vec::new());
        }
        let Some(held) = dates(keyspace, self.keys, at)? else {
            return Ok(Vec::new());
        };
        let holder = |(id, date): (&String, &i64)| holder(id.clone(), state.left(*date));
        Ok(held.iter().map(holder).collect())
    }
}

/// Returns a held permit in the form that all kinds share: its id takes the place of the owner.
fn holder(id: String, remaining: Expiry) -> Holder {
    Holder {
        owner: id.into(),
        holds: 1,
        remaining,
    }
}

/// Releases all held permits, whichever clients hold them.
pub(super) struct Force<'a> {
    pub(super) keys: &'a PermitKeys,
}

impl Step for Force<'_> {
    /// Whether any were held.
    type Reply = bool;

    fn script(&self) -> &'static Script {
        script!("prelude.lua", "force.lua")
    }

    fn keys(&self) -> Keys<'_> {
        all_keys(self.keys)
    }

    fn args(&self, args: &mut dyn Args) {
        args.text(self.keys.object.channel());
    }

    fn decode(&self, reply: ScriptReply) -> Result<bool> {
        reply.flag()
    }

    fn apply(&self, keyspace: &mut Keyspace, at: Instant) -> Result<bool> {
        let state = SemaphoreState::load(keyspace, self.keys, at)?;
        let held = match state.available {
            Some(_) => state.held(keyspace, self.keys, at)?,
            None => 0,
        };
        if held == 0 {
            return Ok(false);
        }
        keyspace.remove(&self.keys.deadlines);
        state.add_and_publish(keyspace, self.keys, held, at)?;
        Ok(true)
    }
}

/// Deletes the semaphore.
pub(super) struct Delete {
    pub(super) keys: Arc<PermitKeys>,
}

impl Step for Delete {
    /// Whether it existed.
    type Reply = bool;

    fn script(&self) -> &'static Script {
        script!("prelude.lua", "delete.lua")
    }

    fn keys(&self) -> Keys<'_> {
        all_keys(&self.keys)
    }

    fn args(&self, args: &mut dyn Args) {
        args.text(self.keys.object.channel());
    }

    fn decode(&self, reply: ScriptReply) -> Result<bool> {
        reply.flag()
    }

    fn apply(&self, keyspace: &mut Keyspace, at: Instant) -> Result<bool> {
        let state = SemaphoreState::load(keyspace, &self.keys, at)?;
        if state.available.is_none() {
            return Ok(false);
        }
        keyspace.remove(&self.keys.deadlines);
        keyspace.remove(self.keys.object.key());
        Ok(true)
    }
}
