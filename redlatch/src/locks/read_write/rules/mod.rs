//! The steps of the read-write lock in Rust, which the embedded store runs. Each has a Lua script
//! that does the same. This module contains the parts that both sides share.
//!
//! State: a hash with the fields `mode` (read or write), owner -> read holds, and owner:write ->
//! write holds. For each read hold a key that expires with the hold's lease. In mode read the hash
//! expires with the longest of them, in mode write with the writer's lease or later. For
//! [`prefer_writers`](super::ReadWriteLock::prefer_writers) a set of timestamps of the waiting
//! writers.
//!
//! * Read: wait if another owner writes. A new reader of a handle that prefers writers also waits
//!   while a waiting writer is marked. Otherwise set the count, and renew the key of the last hold.
//! * Write: possible without a hash, or if the owner already writes. An error if the owner itself
//!   reads. A writer that waits marks itself, for a limited time.
//! * Release of a read hold: pass its lease on to the remaining holds of the owner. The last reader
//!   deletes the hash and wakes a waiter; waiters are also woken if it now expires at least a
//!   second earlier.
//! * Release of the write side: if the owner still reads, the mode becomes read, otherwise the hash
//!   is deleted. All waiters are woken.
//! * A reader whose keys have all expired is dead: it blocks no owner and is removed by the next
//!   release.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::error::Result;
use crate::keyspace::{FoundKey, Holds, Keyspace, Mode};
use crate::lease::Expiry;
use crate::locks::Holder;
use crate::locks::rules::{FOREIGN_HASH, parse_forced, parse_holder, wrong_kind};
use crate::name::{ObjectKeys, ReadWriteKeys, is_writer_field, owner_of};
use crate::step::{ScriptReply, Step, args, script};

pub(super) mod read;
pub(super) mod write;

/// Returns the hash of a read-write lock and its mode, if it is held. An error if it is a hash of
/// another kind.
fn find<'a>(
    keyspace: &'a mut Keyspace,
    object: &ObjectKeys,
) -> Result<Option<(Mode, FoundKey<'a, Holds>)>> {
    let Some(holds) = keyspace.find::<Holds>(object.key())? else {
        return Ok(None);
    };
    match holds.value.mode {
        Some(mode) => Ok(Some((mode, holds))),
        None => Err(wrong_kind(object, FOREIGN_HASH)),
    }
}

/// Returns the key that lives as long as a reader's `n`-th hold.
fn timeout_key(own: &str, n: u32) -> String {
    format!("{own}:{n}")
}

/// Returns how long one of those holds still lives. Zero: it has ended.
fn hold_remaining(keyspace: &mut Keyspace, own: &str, n: u32) -> Duration {
    match keyspace.remaining(&timeout_key(own, n)) {
        // A key without expiry was not created by a reader.
        None | Some(Expiry::Never) => Duration::ZERO,
        Some(Expiry::In(left)) => left,
    }
}

/// Returns how many of a reader's holds have their own key. Further holds share the last one: a
/// count written by another program must not keep the store busy.
fn keyed_holds(count: u32) -> u32 {
    count.min(10_000)
}

/// Returns the longest remaining time of a reader's holds, from the hold `first` on. Zero: all have
/// ended.
fn longest_remaining(keyspace: &mut Keyspace, own: &str, first: u32, count: u32) -> Duration {
    let left = (first..=keyed_holds(count)).map(|n| hold_remaining(keyspace, own, n));
    left.max().unwrap_or_default()
}

/// Returns all readers, including dead ones, and their hold counts.
fn readers(counts: &BTreeMap<String, u32>) -> Vec<(String, u32)> {
    let readers = counts.iter().filter(|(field, _)| !is_writer_field(field));
    readers
        .map(|(owner, count)| (owner.clone(), *count))
        .collect()
}

/// Returns the longest remaining time of all readers. Zero: there are none. Removes dead readers,
/// so that they do not accumulate while others keep reading.
fn longest_reader_remaining(keyspace: &mut Keyspace, keys: &ReadWriteKeys) -> Result<Duration> {
    let all = match find(keyspace, &keys.read)? {
        Some((_, holds)) => readers(&holds.value.counts),
        None => Vec::new(),
    };
    let mut most = Duration::ZERO;
    for (owner, count) in all {
        let own = keys.reader_timeouts_prefix(&owner);
        let left = longest_remaining(keyspace, &own, 1, count);
        if left.is_zero()
            && let Some((_, holds)) = find(keyspace, &keys.read)?
        {
            holds.value.counts.remove(&owner);
        }
        most = most.max(left);
    }
    Ok(most)
}

/// Ends the holds of a reader from the hold `first` on.
fn delete_timeouts(keyspace: &mut Keyspace, own: &str, count: u32, first: u32) {
    for n in first..=keyed_holds(count) {
        keyspace.remove(&timeout_key(own, n));
    }
}

/// Returns a side's name in the scripts.
fn name_of(side: Mode) -> &'static str {
    match side {
        Mode::Read => "read",
        Mode::Write => "write",
    }
}

/// Returns the holders of one side.
pub(crate) fn inspect(keys: &ReadWriteKeys, side: Mode) -> Step<'_, Vec<Holder>> {
    Step::new(
        script!(undeclared "../readers.lua", "../sides.lua", "../inspect.lua"),
        [keys.read.key()],
        args![name_of(side), &*keys.timeouts_prefix],
        move |reply| match reply {
            ScriptReply::Integer(-1) => Err(wrong_kind(&keys.read, FOREIGN_HASH)),
            holders => holders.list()?.into_iter().map(parse_holder).collect(),
        },
        move |keyspace| {
            let Some((_, holds)) = find(keyspace, &keys.read)? else {
                return Ok(Vec::new());
            };
            let (left, counts) = (holds.remaining(), holds.value.counts.clone());
            let mut holders = Vec::new();
            for (field, holds) in counts {
                let writes = is_writer_field(&field);
                let remaining = match side {
                    Mode::Write if writes => left,
                    Mode::Read if !writes => Expiry::In(longest_remaining(
                        keyspace,
                        &keys.reader_timeouts_prefix(&field),
                        1,
                        holds,
                    )),
                    _ => continue,
                };
                if remaining > Expiry::In(Duration::ZERO) {
                    holders.push(Holder::new(owner_of(&field).into(), holds, remaining));
                }
            }
            Ok(holders)
        },
    )
}

/// Releases one side whichever owners hold it. Replies whether it was held.
pub(super) fn force(keys: &ReadWriteKeys, side: Mode) -> Step<'_, bool> {
    Step::new(
        script!(undeclared "../readers.lua", "../sides.lua", "../force.lua"),
        [keys.read.key()],
        args![keys.read.channel(), name_of(side), &*keys.timeouts_prefix],
        move |reply| parse_forced(&keys.read, reply),
        move |keyspace| {
            let Some((mode, holds)) = find(keyspace, &keys.read)? else {
                return Ok(false);
            };
            if (side, mode) == (Mode::Write, Mode::Read) {
                return Ok(false);
            }
            let reads = readers(&holds.value.counts);
            let counts = &mut holds.value.counts;
            counts.retain(|field, _| is_writer_field(field));
            let mut alive = false;
            for (owner, count) in reads {
                let own = keys.reader_timeouts_prefix(&owner);
                alive |= !longest_remaining(keyspace, &own, 1, count).is_zero();
                delete_timeouts(keyspace, &own, count, 1);
            }
            if side != mode {
                return Ok(alive);
            }
            keyspace.remove(keys.read.key());
            match mode {
                Mode::Read => {
                    keyspace.publish(keys.read.channel(), READ_RELEASED);
                }
                Mode::Write => wake_all(keyspace, &keys.read),
            }
            Ok(true)
        },
    )
}

/// Wakes all waiters, because there is no writer any more. It publishes both messages for
/// Redisson's waiters (see `wake_all` in `readers.lua`).
pub(super) fn wake_all(keyspace: &mut Keyspace, object: &ObjectKeys) {
    keyspace.publish(object.channel(), WRITE_RELEASED);
    keyspace.publish(object.channel(), READ_RELEASED);
}

/// The message that the last reader has left.
const READ_RELEASED: i64 = 0;
/// The message that the writer has left, or that a waiting writer has given up: readers may
/// proceed.
const WRITE_RELEASED: i64 = 1;
