//! The steps of the write side.

use std::collections::BTreeMap;
use std::time::Duration;

use redis::Value;
use tokio::time::Instant;

use super::{WRITE_RELEASED, call_all, find, longest, longest_of_all, script};
use crate::error::{Error, Result};
use crate::hold::Hold;
use crate::lease::Lease;
use crate::primitives::handle::Ask;
use crate::primitives::lock::rules::{self as lock, ENDLESS, held_or_wait, is_gone, wrong_kind};
use crate::space::{Holds, Mode, Space};
use crate::step::{Args, Outcome, Script, Step, yes_or_no};

/// Acquires the write side for an owner, or returns how long others may still read or write.
pub(in super::super) struct Acquire<'a> {
    pub(in super::super) ask: Ask<'a>,
    /// How long new readers are blocked if this has to wait and does not retry.
    pub(in super::super) holds_back: Option<Lease>,
}

impl Acquire<'_> {
    /// Returns how long the store remembers this waiting writer, if it waits.
    fn mark(&self) -> Option<Lease> {
        self.holds_back.filter(|_| self.ask.waits)
    }

    fn reads_itself(&self) -> Error {
        Error::WriteWhileReading {
            name: self.ask.hold.place.name().to_owned(),
        }
    }
}

impl Step for Acquire<'_> {
    type Reply = Outcome;

    fn script(&self) -> &'static Script {
        script!("../write_acquire.lua")
    }

    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send {
        let place = &self.ask.hold.place;
        let keys = [place.key(), place.writers()];
        keys.into_iter()
            .take(1 + usize::from(self.holds_back.is_some()))
    }

    fn args(&self, args: &mut Args<'_>) {
        let place = &self.ask.hold.place;
        args.text(&self.ask.hold.field);
        args.number(self.ask.lease.millis());
        args.number(self.ask.count.into());
        args.text(place.timeouts_begin());
        args.text(place.owner(&self.ask.hold.field));
        args.number(self.mark().map_or(0, Lease::millis));
    }

    fn reply(&self, raw: Value) -> Result<Outcome> {
        match raw {
            Value::Int(-3) => Err(self.reads_itself()),
            other => held_or_wait(&self.ask.hold.place, &other),
        }
    }

    fn apply(&self, space: &mut Space, now: Instant) -> Result<Outcome> {
        let Ask {
            hold, count, lease, ..
        } = self.ask;
        let (place, field) = (&*hold.place, &*hold.field);
        let end = now + lease.duration();
        let Some((mode, mut holds)) = find(space, place, now)? else {
            if count > 1 {
                // The hold to re-enter has been lost.
                return Ok(Outcome::Wait(Duration::ZERO));
            }
            let holds = Holds {
                counts: BTreeMap::from([(field.to_owned(), count)]),
                mode: Some(Mode::Write),
            };
            space.set(place.key(), holds, Some(end), now);
            return self.waits_no_more(space, now);
        };
        let left = holds.remaining(now);
        if left == Duration::MAX {
            return Err(wrong_kind(place, ENDLESS));
        }
        if mode == Mode::Write
            && let Some(held) = holds.value.counts.get_mut(field)
        {
            *held = count;
            holds.extend_to(end);
            return self.waits_no_more(space, now);
        }
        if count > 1 {
            return Ok(Outcome::Wait(Duration::ZERO));
        }
        let owner = place.owner(field);
        let reads = holds.value.counts.get(owner).copied().unwrap_or(0);
        if !longest(space, &place.timeouts_of(owner), 1, reads, now).is_zero() {
            return Err(self.reads_itself());
        }
        let Some(mark) = self.mark() else {
            return Ok(Outcome::Wait(left));
        };
        let today = space.date(now);
        let until = today.saturating_add_unsigned(mark.millis());
        let writers: &mut BTreeMap<String, i64> = space.find_or_begin(place.writers(), now)?;
        writers.retain(|_, until| *until > today);
        writers.insert(field.to_owned(), until);
        if let Some(mut writers) = space.find::<BTreeMap<String, i64>>(place.writers(), now)? {
            writers.set_end(now + mark.duration());
        }
        // If the writer retries in time, its mark does not expire while it waits.
        Ok(Outcome::Wait(left.min(mark.third())))
    }
}

impl Acquire<'_> {
    /// Removes this writer's mark, because it holds the lock now.
    fn waits_no_more(&self, space: &mut Space, now: Instant) -> Result<Outcome> {
        if self.holds_back.is_some() {
            unmark(space, self.ask.hold, now)?;
        }
        Ok(Outcome::Done(()))
    }
}

/// Removes an owner from the waiting writers. Returns whether it was marked.
fn unmark(space: &mut Space, hold: &Hold, now: Instant) -> Result<bool> {
    let writers = space.find::<BTreeMap<String, i64>>(hold.place.writers(), now)?;
    Ok(writers.is_some_and(|writers| writers.value.remove(&*hold.field).is_some()))
}

/// Sets a writer's hold count to the number of holds to keep; 0 releases its side.
pub(in super::super) struct Release<'a> {
    pub(in super::super) hold: &'a Hold,
    pub(in super::super) keep: u32,
    /// The new lease; `None` leaves it unchanged.
    pub(in super::super) lease: Option<Lease>,
}

impl Step for Release<'_> {
    /// Whether the owner was writing.
    type Reply = bool;

    fn script(&self) -> &'static Script {
        script!("../write_release.lua")
    }

    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send {
        let place = &self.hold.place;
        [place.key(), place.writers()].into_iter()
    }

    fn args(&self, args: &mut Args<'_>) {
        args.text(&self.hold.field);
        args.number(self.keep.into());
        args.number(self.lease.map_or(0, Lease::millis));
        args.text(self.hold.place.timeouts_begin());
        args.text(self.hold.place.channel());
    }

    fn reply(&self, raw: Value) -> Result<bool> {
        yes_or_no(&raw)
    }

    fn apply(&self, space: &mut Space, now: Instant) -> Result<bool> {
        let (place, field) = (&*self.hold.place, &*self.hold.field);
        let found = find(space, place, now)?;
        let mine = found.filter(|(_, holds)| holds.value.counts.contains_key(field));
        let Some((_, mut holds)) = mine else {
            if self.keep == 0 && unmark(space, self.hold, now)? {
                space.publish(place.channel(), WRITE_RELEASED);
            } else if !space.is_there(place.key(), now) {
                call_all(space, place);
            }
            return Ok(false);
        };
        if self.keep > 0 {
            holds.value.counts.insert(field.to_owned(), self.keep);
            if let Some(lease) = self.lease {
                holds.extend_to(now + lease.duration());
            }
            return Ok(true);
        }
        holds.value.counts.remove(field);
        let most = longest_of_all(space, place, now)?;
        if most.is_zero() {
            space.remove(place.key());
        } else if let Some((_, mut holds)) = find(space, place, now)? {
            holds.value.mode = Some(Mode::Read);
            holds.set_end(now + most);
        }
        call_all(space, place);
        Ok(true)
    }
}

/// Renews the leases of many writers. A writer's lease is the expiry of the lock's key.
pub(in super::super) fn renew_script() -> &'static Script {
    static SCRIPT: Script = Script::new(concat!(
        include_str!("../readers.lua"),
        include_str!("../write_wake.lua"),
        include_str!("../../lock/renew.lua"),
    ));
    &SCRIPT
}

/// Renews one writer, as the script does.
pub(in super::super) fn renew(
    space: &mut Space,
    hold: &Hold,
    lease: Option<Lease>,
    now: Instant,
) -> Result<bool> {
    let held = lock::renew(space, hold, lease, now)?;
    if is_gone(space, held, &hold.place, now) {
        call_all(space, &hold.place);
    }
    Ok(held)
}
