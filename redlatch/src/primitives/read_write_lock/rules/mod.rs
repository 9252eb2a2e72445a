//! The steps of the read-write lock: what each does, as plain code, beside the Lua that does the
//! same. Here what both sides have in common.

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

/// A script of the read-write lock, behind what they all have in common.
macro_rules! script {
    ($($file:literal),+) => {{
        static SCRIPT: Script =
            Script::new(concat!(include_str!("../readers.lua"), $(include_str!($file)),+))
                // The timeouts of all readers.
                .with_undeclared_keys();
        &SCRIPT
    }};
}
use script;

/// The hash of a read-write lock and its mode, if anybody holds it. An error if it is another's.
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

/// The key that says how long a reader's `n`-th hold lives.
fn timeout(own: &str, n: u32) -> String {
    format!("{own}:{n}")
}

/// How long one of those holds lives on. Zero: it has ended.
fn left_of(space: &mut Space, own: &str, n: u32, now: Instant) -> Duration {
    match space.remaining(&timeout(own, n), now) {
        // Without an end it is none that a reader made.
        None | Some(Duration::MAX) => Duration::ZERO,
        Some(left) => left,
    }
}

/// How many of somebody's holds live by a key of their own. Those beyond share the last one: a count
/// that somebody else has written must not keep the store busy.
fn keyed(count: u32) -> u32 {
    count.min(10_000)
}

/// How long somebody reads on who has that many holds, those before `first` not counted. Zero: not
/// any more.
fn longest(space: &mut Space, own: &str, first: u32, count: u32, now: Instant) -> Duration {
    let left = (first..=keyed(count)).map(|n| left_of(space, own, n, now));
    left.max().unwrap_or_default()
}

/// All who read, dead ones included, and how many holds they have.
fn readers(counts: &BTreeMap<String, u32>, place: &Place) -> Vec<(String, u32)> {
    let readers = counts.iter().filter(|(field, _)| !place.writes(field));
    readers
        .map(|(owner, count)| (owner.clone(), *count))
        .collect()
}

/// How long anybody reads on. Zero: nobody does. Who has died is cleared away, so that the dead do
/// not pile up for as long as there is always somebody who lives.
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

/// Ends the holds of a reader from the `first` on.
fn forget(space: &mut Space, own: &str, count: u32, first: u32) {
    for n in first..=keyed(count) {
        space.remove(&timeout(own, n));
    }
}

/// A side as scripts call it.
fn side(mode: Mode) -> &'static str {
    match mode {
        Mode::Read => "read",
        Mode::Write => "write",
    }
}

/// Who holds one side.
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

/// Takes one side from whoever holds it.
pub(super) struct Force<'a> {
    pub(super) place: &'a Place,
    pub(super) side: Mode,
}

impl Step for Force<'_> {
    /// Whether anybody held it.
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

/// Nobody writes any more: all who wait may look. Both messages, for the sake of Redisson's waiters
/// (see `call_all` in `readers.lua`).
fn call_all(space: &mut Space, place: &Place) {
    space.publish(place.channel(), WRITE_RELEASED);
    space.publish(place.channel(), READ_RELEASED);
}

/// What is published when the last reader has left.
const READ_RELEASED: i64 = 0;
/// What is published when the writer has left, or one that waited has given up: readers may go.
const WRITE_RELEASED: i64 = 1;
