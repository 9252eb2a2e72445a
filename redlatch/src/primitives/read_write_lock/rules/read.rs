//! The steps of the read side.

use std::collections::BTreeMap;
use std::time::Duration;

use redis::Value;
use tokio::time::Instant;

use super::{
    READ_RELEASED, find, forget, keyed, left_of, longest, longest_of_all, script, timeout,
};
use crate::error::Result;
use crate::hold::Hold;
use crate::lease::Lease;
use crate::name::Place;
use crate::primitives::handle::Ask;
use crate::primitives::lock::rules::{ENDLESS, held_or_wait, wrong_kind};
use crate::space::{Holds, Mode, Space};
use crate::step::{Args, Outcome, Script, Step, yes_or_no};

/// Acquires the read side for an owner, or returns how long another owner may still write.
pub(in super::super) struct Acquire<'a> {
    pub(in super::super) ask: Ask<'a>,
    /// Whether to wait behind waiting writers.
    pub(in super::super) yields: bool,
}

impl Step for Acquire<'_> {
    type Reply = Outcome;

    fn script(&self) -> &'static Script {
        script!("../read_acquire.lua")
    }

    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send {
        let place = &self.ask.hold.place;
        let keys = [place.key(), place.writers()];
        keys.into_iter().take(1 + usize::from(self.yields))
    }

    fn args(&self, args: &mut Args<'_>) {
        args.text(&self.ask.hold.field);
        args.number(self.ask.lease.millis());
        args.number(self.ask.count.into());
        args.text(self.ask.hold.place.timeouts_begin());
    }

    fn reply(&self, raw: Value) -> Result<Outcome> {
        held_or_wait(&self.ask.hold.place, &raw)
    }

    fn apply(&self, space: &mut Space, now: Instant) -> Result<Outcome> {
        let Ask {
            hold, count, lease, ..
        } = self.ask;
        let (place, owner, own) = (&*hold.place, &*hold.field, &*hold.own);
        let end = now + lease.duration();
        let mut held = 0;
        let mut writes = false;
        let found = find(space, place, now)?;
        let free = found.is_none();
        if let Some((mode, holds)) = found {
            let left = holds.remaining(now);
            if left == Duration::MAX {
                return Err(wrong_kind(place, ENDLESS));
            }
            writes = holds.value.counts.contains_key(&place.writer(owner));
            if mode == Mode::Write && !writes {
                return Ok(Outcome::Wait(left));
            }
            held = holds.value.counts.get(owner).copied().unwrap_or(0);
        }
        if longest(space, own, 1, held, now).is_zero() {
            if count > 1 {
                // The hold to re-enter has been lost.
                return Ok(Outcome::Wait(Duration::ZERO));
            }
            if self.yields
                && !writes
                && let Some(left) = held_back(space, place, now)?
            {
                return Ok(Outcome::Wait(left));
            }
        }
        if free {
            let holds = Holds {
                counts: BTreeMap::new(),
                mode: Some(Mode::Read),
            };
            space.set(place.key(), holds, Some(end), now);
        }
        if let Some((_, mut holds)) = find(space, place, now)? {
            holds.value.counts.insert(owner.to_owned(), count);
            holds.extend_to(end);
        }
        // Removes what earlier holds of the same owner left behind.
        let last = keyed(count);
        forget(space, own, held, last + 1);
        if left_of(space, own, last, now) < lease.duration() {
            space.set(&timeout(own, last), 1, Some(end), now);
        }
        Ok(Outcome::Done(()))
    }
}

/// Returns how long waiting writers block new readers.
fn held_back(space: &mut Space, place: &Place, now: Instant) -> Result<Option<Duration>> {
    let today = space.date(now);
    let Some(writers) = space.find::<BTreeMap<String, i64>>(place.writers(), now)? else {
        return Ok(None);
    };
    let last = writers.value.values().max().copied().unwrap_or(today);
    let left = u64::try_from(last - today).unwrap_or(0);
    Ok((left > 0).then(|| Duration::from_millis(left)))
}

/// The minimum change of the end that is worth a message. If there are many leases that are renewed
/// at different times, neighboring ones differ by less.
const MUCH_NEARER: Duration = Duration::from_secs(1);

/// Sets a reader's hold count to the number of holds to keep; 0 releases its side.
pub(in super::super) struct Release<'a> {
    pub(in super::super) hold: &'a Hold,
    pub(in super::super) keep: u32,
    /// The new lease; `None` leaves it unchanged.
    pub(in super::super) lease: Option<Lease>,
}

impl Step for Release<'_> {
    /// Whether the owner was reading.
    type Reply = bool;

    fn script(&self) -> &'static Script {
        script!("../read_release.lua")
    }

    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send {
        std::iter::once(self.hold.place.key())
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
        let hold = self.hold;
        let (place, owner, own) = (&*hold.place, &*hold.field, &*hold.own);
        let lease = self.lease.map_or(Duration::ZERO, Lease::duration);
        let Some((mode, holds)) = find(space, place, now)? else {
            space.publish(place.channel(), READ_RELEASED);
            return Ok(false);
        };
        let left = holds.remaining(now);
        let Some(count) = holds.value.counts.get(owner).copied() else {
            return Ok(false);
        };
        let held = !longest(space, own, 1, count, now).is_zero();
        // A release never increases the count; a dead reader is always removed.
        let keep = if held { self.keep.min(count) } else { 0 };
        let last = keyed(keep);
        if keep > 0 {
            // All holds of an owner last as long as the longest, so a released hold passes its lease on.
            let most = longest(space, own, last, count, now).max(lease);
            if left_of(space, own, last, now) < most {
                space.set(&timeout(own, last), 1, Some(now + most), now);
            }
        }
        forget(space, own, count, last + 1);
        let Some((_, mut holds)) = find(space, place, now)? else {
            return Ok(held);
        };
        match keep {
            0 => drop(holds.value.counts.remove(owner)),
            _ => drop(holds.value.counts.insert(owner.to_owned(), keep)),
        }
        if mode == Mode::Write {
            // The owner also writes: its write hold does not change.
            if keep > 0 && !lease.is_zero() {
                holds.extend_to(now + lease);
            }
            return Ok(held);
        }
        let most = longest_of_all(space, place, now)?;
        if most.is_zero() {
            space.remove(place.key());
        } else if let Some((_, mut holds)) = find(space, place, now)? {
            holds.set_end(now + most);
        }
        // Writers sleep until the end that they received. If it is now much nearer, they are woken:
        // the remaining readers may be dead and never release.
        if most.is_zero() || left.saturating_sub(most) >= MUCH_NEARER {
            space.publish(place.channel(), READ_RELEASED);
        }
        Ok(held)
    }
}

/// Renews the holds of many readers.
pub(in super::super) fn renew_script() -> &'static Script {
    script!("../read_renew.lua")
}

/// Renews one reader, as the script does.
pub(in super::super) fn renew(
    space: &mut Space,
    hold: &Hold,
    lease: Option<Lease>,
    now: Instant,
) -> Result<bool> {
    let end = lease.map(|lease| now + lease.duration());
    let Some((_, holds)) = find(space, &hold.place, now)? else {
        space.publish(hold.place.channel(), READ_RELEASED);
        return Ok(false);
    };
    let count = holds.value.counts.get(&*hold.field).copied();
    let mut alive = false;
    for n in 1..=keyed(count.unwrap_or(0)) {
        if left_of(space, &hold.own, n, now).is_zero() {
            continue;
        }
        alive = true;
        if let Some(end) = end
            && let Some(mut timeout) = space.find::<i64>(&timeout(&hold.own, n), now)?
        {
            timeout.extend_to(end);
        }
    }
    if alive
        && let Some(end) = end
        && let Some((_, mut holds)) = find(space, &hold.place, now)?
    {
        holds.extend_to(end);
    }
    Ok(alive)
}
