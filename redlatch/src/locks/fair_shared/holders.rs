//! The holders of a fair object that several owners may hold: `holders.lua` in Rust.
//!
//! An object has a number of permits. A holder has one of them, or as many as its field says
//! (`owner#permits`), or all if it writes (`owner:write`). The object is free for a waiter if it has
//! as many permits as the waiter wants. A read-write lock has more permits than it will ever have
//! readers.

use std::collections::BTreeMap;

use crate::error::Result;
use crate::keyspace::Keyspace;
use crate::lease::{Expiry, Lease};
use crate::locks::Holder;
use crate::locks::rules::{FOREIGN_HASH, wrong_kind};
use crate::name::{GROUP_END, ObjectKeys, is_writer_field, owner_of, permits_of};

type Fields = BTreeMap<String, String>;

/// The number of permits of a read-write lock.
pub(crate) const UNLIMITED: u32 = u32::MAX;

/// The values of the field `mode`.
const MODES: [&str; 2] = ["fair_rwlock", "fair_semaphore"];

/// Returns the value of the field `mode` of an object with so many permits.
pub(crate) fn mode_of(total: u32) -> &'static str {
    MODES[usize::from(total != UNLIMITED)]
}

/// How long a waiter sleeps that wants more permits than there are, in milliseconds.
const MAX_SLEEP: i64 = 5000;

/// One owner's hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) field: String,
    pub(crate) count: u32,
    /// When it ends, as a timestamp in milliseconds.
    pub(crate) ends: i64,
}

/// Returns the fields that name a hold and its end.
fn fields_of(field: &str) -> [String; 2] {
    [field.to_owned(), [field, GROUP_END].concat()]
}

/// Returns the holds that last in the hash of an object. `None`: it has other data.
pub(crate) fn read(fields: &BTreeMap<String, String>, now: i64) -> Option<Vec<Held>> {
    fields
        .get("mode")
        .filter(|mode| MODES.contains(&&***mode))?;
    let hold = |(field, ends): (&String, &String)| {
        let field = field.strip_suffix(GROUP_END)?;
        let ends = ends.parse().ok().filter(|&ends| ends > now)?;
        let count = fields.get(field)?.parse().unwrap_or(1);
        let field = field.to_owned();
        Some(Held { field, count, ends })
    };
    Some(fields.iter().filter_map(hold).collect())
}

/// Returns a holder: the hold count of permits is their number.
pub(crate) fn holder(field: &str, count: u32, left: i64) -> Holder {
    let holds = count.saturating_mul(permits_of(field));
    Holder::new(owner_of(field).into(), holds, Expiry::from_millis(left))
}

/// Returns the holders.
pub(crate) fn current(
    keyspace: &mut Keyspace,
    object: &ObjectKeys,
    total: u32,
) -> Result<Vec<Held>> {
    let now = keyspace.now_ms();
    let Some(found) = keyspace.find::<Fields>(object.key())? else {
        return Ok(Vec::new());
    };
    let mode = found.value.get("mode");
    let is_own = mode.is_some_and(|mode| mode == mode_of(total));
    let held = read(found.value, now).filter(|_| is_own);
    held.ok_or_else(|| wrong_kind(object, FOREIGN_HASH))
}

/// Returns the holders, and removes those whose holds have ended.
pub(super) fn load(keyspace: &mut Keyspace, object: &ObjectKeys, total: u32) -> Result<Vec<Held>> {
    let held = current(keyspace, object, total)?;
    let lasting: Vec<_> = held.iter().flat_map(|it| fields_of(&it.field)).collect();
    if held.is_empty() {
        keyspace.remove(object.key());
    } else if let Some(found) = keyspace.find::<Fields>(object.key())? {
        let lasts = |field: &String| field == "mode" || lasting.contains(field);
        found.value.retain(|field, _| lasts(field));
    }
    Ok(held)
}

/// Returns the permits of a hold or a waiter, of so many.
fn permits(field: &str, total: u32) -> i64 {
    match is_writer_field(field) {
        true => total.into(),
        false => permits_of(field).into(),
    }
}

/// Returns after how many milliseconds the object is free for a waiter, unless its holders renew
/// their leases. `None`: it is free now.
pub(crate) fn left_for(
    keyspace: &mut Keyspace,
    object: &ObjectKeys,
    total: u32,
    field: &str,
) -> Result<Option<i64>> {
    let now = keyspace.now_ms();
    let mut held = load(keyspace, object, total)?;
    let used: i64 = held.iter().map(|it| permits(&it.field, total)).sum();
    let (wanted, mut free) = (permits(field, total), i64::from(total) - used);
    if wanted <= free {
        return Ok(None);
    }
    held.sort_by_key(|it| it.ends);
    for it in held {
        free += permits(&it.field, total);
        if wanted <= free {
            return Ok(Some(it.ends - now));
        }
    }
    // More than there are: a client with a higher number may serve it.
    Ok(Some(MAX_SLEEP))
}

/// Sets the hold count of an owner. With a lease, the hold may only end later.
pub(crate) fn set(
    keyspace: &mut Keyspace,
    object: &ObjectKeys,
    total: u32,
    (field, count): (&str, u32),
    lease: Option<Lease>,
) -> Result<()> {
    let now = keyspace.now_ms_rounded_up();
    let [count_field, end_field] = fields_of(field);
    let fields: &mut Fields = keyspace.find_or_create(object.key())?;
    fields.insert("mode".to_owned(), mode_of(total).to_owned());
    fields.insert(count_field, count.to_string());
    let Some(lease) = lease else {
        return Ok(());
    };
    let old = fields.get(&end_field).and_then(|ends| ends.parse().ok());
    let new = now.saturating_add(lease.millis());
    fields.insert(end_field, new.max(old.unwrap_or(0)).to_string());
    if let Some(mut found) = keyspace.find::<Fields>(object.key())? {
        found.extend_to(lease.duration());
    }
    Ok(())
}

/// Ends the hold of an owner.
pub(super) fn remove(keyspace: &mut Keyspace, object: &ObjectKeys, field: &str) -> Result<()> {
    if let Some(found) = keyspace.find::<Fields>(object.key())? {
        let ended = fields_of(field);
        found.value.retain(|field, _| !ended.contains(field));
        if found.value.len() == 1 {
            keyspace.remove(object.key());
        }
    }
    Ok(())
}
