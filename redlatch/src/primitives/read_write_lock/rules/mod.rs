//! The steps of the read-write lock in Rust, which the embedded store runs. Each has a Lua script
//! that does the same. This module contains the parts that both sides share.
//!
//! State: a hash with the fields `mode` (read or write), owner -> read holds, and owner:write ->
//! write holds. For each read hold a key that expires with the hold's lease. In mode read the hash
//! expires with the longest of them, in mode write with the writer's lease or later. For
//! [`prefer_writers`](super::ReadWriteLock::prefer_writers) a set of dates of the waiting writers.
//!
//! * Read: wait if another owner writes. A new reader of a handle that prefers writers also waits
//!   while a waiting writer is marked. Otherwise set the count, and renew the key of the last hold.
//! * Write: possible without a hash, or if the owner already writes. An error if the owner itself
//!   reads. A writer that waits marks itself, for a limited time.
//! * Release of a read hold: pass its lease on to the remaining holds of the owner. The last reader
//!   deletes the hash and wakes a waiter; waiters are also woken if the end moves nearer by a second.
//! * Release of the write side: if the owner still reads, the mode becomes read, otherwise the hash
//!   is deleted. All waiters are woken.
//! * A reader whose keys have all expired is dead: it blocks no owner and is removed by the next release.

use std::collections::BTreeMap;
use std::time::Duration;

use redis::Value;
use tokio::time::Instant;

use crate::error::Result;
use crate::name::Place;
use crate::primitives::handle::Holder;
use crate::primitives::lock::rules::{FOREIGN_HASH, holder, lasts, wrong_kind};
use crate::space::{Found, Holds, Mode, Space};
use crate::step::{Args, Script, Step, unexpected, yes_or_no};

pub(super) mod read;
pub(super) mod write;

/// Returns a script of the read-write lock, with the shared functions prepended.
macro_rules! script {
    ($($file:literal),+) => {{
        static SCRIPT: Script =
            Script::new(concat!(include_str!("../readers.lua"), $(include_str!($file)),+))
                // The timeout keys of all readers.
                .with_undeclared_keys();
        &SCRIPT
    }};
}
use script;

/// Returns the hash of a read-write lock and its mode, if it is held. An error if it is a hash of another kind.
fn find<'a>(
    space: &'a mut Space,
    place: &Place,
    now: Instant,
) -> Result<Option<(Mode, Found<'a, Holds>)>> {
    let Some(holds) = space.find::<Holds>(place.key(), now)? else {
        return Ok(None);
    };
    match holds.value.mode {
        Some(mode) => Ok(Some((mode, holds))),
        None => Err(wrong_kind(place, FOREIGN_HASH)),
    }
}

/// Returns the key that lives as long as a reader's `n`-th hold.
fn timeout(own: &str, n: u32) -> String {
    format!("{own}:{n}")
}

/// Returns how long one of those holds still lives. Zero: it has ended.
fn left_of(space: &mut Space, own: &str, n: u32, now: Instant) -> Duration {
    match space.remaining(&timeout(own, n), now) {
        // A key without expiry was not created by a reader.
        None | Some(Duration::MAX) => Duration::ZERO,
        Some(left) => left,
    }
}

/// Returns how many of a reader's holds have their own key. Further holds share the last one: a
/// count written by another program must not keep the store busy.
fn keyed(count: u32) -> u32 {
    count.min(10_000)
}

/// Returns the longest remaining time of a reader's holds, from the hold `first` on. Zero: all have ended.
fn longest(space: &mut Space, own: &str, first: u32, count: u32, now: Instant) -> Duration {
    let left = (first..=keyed(count)).map(|n| left_of(space, own, n, now));
    left.max().unwrap_or_default()
}

/// Returns all readers, including dead ones, and their hold counts.
fn readers(counts: &BTreeMap<String, u32>, place: &Place) -> Vec<(String, u32)> {
    let readers = counts.iter().filter(|(field, _)| !place.writes(field));
    readers
        .map(|(owner, count)| (owner.clone(), *count))
        .collect()
}

/// Returns the longest remaining time of all readers. Zero: there are none. Removes dead readers,
/// so that they do not accumulate while others keep reading.
fn longest_of_all(space: &mut Space, place: &Place, now: Instant) -> Result<Duration> {
    let all = match find(space, place, now)? {
        Some((_, holds)) => readers(&holds.value.counts, place),
        None => Vec::new(),
    };
    let mut most = Duration::ZERO;
    for (owner, count) in all {
        let left = longest(space, &place.timeouts_of(&owner), 1, count, now);
        if left.is_zero()
            && let Some((_, holds)) = find(space, place, now)?
        {
            holds.value.counts.remove(&owner);
        }
        most = most.max(left);
    }
    Ok(most)
}

/// Ends the holds of a reader from the hold `first` on.
fn forget(space: &mut Space, own: &str, count: u32, first: u32) {
    for n in first..=keyed(count) {
        space.remove(&timeout(own, n));
    }
}

/// Returns a side's name in the scripts.
fn side(mode: Mode) -> &'static str {
    match mode {
        Mode::Read => "read",
        Mode::Write => "write",
    }
}

/// Returns the holders of one side.
pub(crate) struct Inspect<'a> {
    pub(crate) place: &'a Place,
    pub(crate) side: Mode,
}

impl Step for Inspect<'_> {
    type Reply = Vec<Holder>;

    fn script(&self) -> &'static Script {
        script!("../sides.lua", "../inspect.lua")
    }

    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send {
        std::iter::once(self.place.key())
    }

    fn args(&self, args: &mut Args<'_>) {
        args.text(side(self.side));
        args.text(self.place.timeouts_begin());
    }

    fn reply(&self, raw: Value) -> Result<Vec<Holder>> {
        match raw {
            Value::Int(-1) => Err(wrong_kind(self.place, FOREIGN_HASH)),
            Value::Array(holders) => holders.into_iter().map(holder).collect(),
            other => Err(unexpected(&other)),
        }
    }

    fn apply(&self, space: &mut Space, now: Instant) -> Result<Vec<Holder>> {
        let Some((_, holds)) = find(space, self.place, now)? else {
            return Ok(Vec::new());
        };
        let (left, counts) = (holds.remaining(now), holds.value.counts.clone());
        let mut holders = Vec::new();
        for (field, holds) in counts {
            let writes = self.place.writes(&field);
            let remaining = match self.side {
                Mode::Write if writes => left,
                Mode::Read if !writes => {
                    longest(space, &self.place.timeouts_of(&field), 1, holds, now)
                }
                _ => Duration::ZERO,
            };
            if !remaining.is_zero() {
                holders.push(Holder {
                    owner: self.place.owner(&field).to_owned(),
                    holds,
                    remaining: lasts(remaining),
                });
            }
        }
        Ok(holders)
    }
}

/// Releases one side whichever owners hold it.
pub(super) struct Force<'a> {
    pub(super) place: &'a Place,
    pub(super) side: Mode,
}

impl Step for Force<'_> {
    /// Whether it was held.
    type Reply = bool;

    fn script(&self) -> &'static Script {
        script!("../sides.lua", "../force.lua")
    }

    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send {
        std::iter::once(self.place.key())
    }

    fn args(&self, args: &mut Args<'_>) {
        args.text(side(self.side));
        args.text(self.place.timeouts_begin());
        args.text(self.place.channel());
    }

    fn reply(&self, raw: Value) -> Result<bool> {
        match raw {
            Value::Int(-1) => Err(wrong_kind(self.place, FOREIGN_HASH)),
            other => yes_or_no(&other),
        }
    }

    fn apply(&self, space: &mut Space, now: Instant) -> Result<bool> {
        let Some((mode, holds)) = find(space, self.place, now)? else {
            return Ok(false);
        };
        if (self.side, mode) == (Mode::Write, Mode::Read) {
            return Ok(false);
        }
        let reads = readers(&holds.value.counts, self.place);
        let counts = &mut holds.value.counts;
        counts.retain(|field, _| self.place.writes(field));
        let mut alive = false;
        for (owner, count) in reads {
            let own = self.place.timeouts_of(&owner);
            alive |= !longest(space, &own, 1, count, now).is_zero();
            forget(space, &own, count, 1);
        }
        if self.side != mode {
            return Ok(alive);
        }
        space.remove(self.place.key());
        match mode {
            Mode::Read => {
                space.publish(self.place.channel(), READ_RELEASED);
            }
            Mode::Write => call_all(space, self.place),
        }
        Ok(true)
    }
}

/// Wakes all waiters, because there is no writer any more. It publishes both messages for
/// Redisson's waiters (see `call_all` in `readers.lua`).
fn call_all(space: &mut Space, place: &Place) {
    space.publish(place.channel(), WRITE_RELEASED);
    space.publish(place.channel(), READ_RELEASED);
}

/// The message that the last reader has left.
const READ_RELEASED: i64 = 0;
/// The message that the writer has left, or that a waiting writer has given up: readers may proceed.
const WRITE_RELEASED: i64 = 1;
