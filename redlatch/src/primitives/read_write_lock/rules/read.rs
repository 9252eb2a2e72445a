//! The steps of the read side.

use std::collections::BTreeMap;
use std::time::Duration;

use smallvec::smallvec;
use tokio::time::Instant;

use super::{
    READ_RELEASED, delete_timeouts, find, hold_remaining, keyed_holds, longest_reader_remaining,
    longest_remaining, timeout_key,
};
use crate::error::Result;
use crate::hold::Hold;
use crate::keyspace::{Holds, Keyspace, Mode};
use crate::lease::{Expiry, Lease};
use crate::name::{ReadWriteKeys, writer_field};
use crate::primitives::lock::AcquireParams;
use crate::primitives::reentrant::rules::{NO_EXPIRY, parse_outcome, wrong_kind};
use crate::step::{Args, Keys, Outcome, Script, ScriptReply, Step, script};

/// Acquires the read side for an owner, or returns how long another owner may still write.
pub(in super::super) struct Acquire<'a> {
    pub(in super::super) params: AcquireParams<'a>,
    pub(in super::super) keys: &'a ReadWriteKeys,
    /// Whether to wait behind waiting writers.
    pub(in super::super) prefers_writers: bool,
}

impl Step for Acquire<'_> {
    type Reply = Outcome;

    fn script(&self) -> &'static Script {
        script!(undeclared "../readers.lua", "../read_acquire.lua")
    }

    fn keys(&self) -> Keys<'_> {
        let writers = self.prefers_writers.then_some(&*self.keys.writers);
        let keys = [self.keys.read.key()].into_iter();
        keys.chain(writers).collect()
    }

    fn args(&self, args: &mut dyn Args) {
        args.text(&self.params.hold.field);
        args.number(self.params.lease.millis());
        args.number(self.params.count.into());
        args.text(&self.keys.timeouts_prefix);
    }

    fn decode(&self, reply: ScriptReply) -> Result<Outcome> {
        parse_outcome(&self.params.hold.object, reply)
    }

    fn apply(&self, keyspace: &mut Keyspace, now: Instant) -> Result<Outcome> {
        let AcquireParams {
            hold, count, lease, ..
        } = self.params;
        let (object, owner) = (&*hold.object, &*hold.field);
        let own = &self.keys.reader_timeouts_prefix(owner);
        let end = now + lease.duration();
        let mut held = 0;
        let mut writes = false;
        let found = find(keyspace, object, now)?;
        let free = found.is_none();
        if let Some((mode, holds)) = found {
            let left = holds.remaining(now);
            if left == Expiry::Never {
                return Err(wrong_kind(object, NO_EXPIRY));
            }
            writes = holds.value.counts.contains_key(&writer_field(owner));
            if mode == Mode::Write && !writes {
                return Ok(Outcome::Wait(left));
            }
            held = holds.value.counts.get(owner).copied().unwrap_or(0);
        }
        if longest_remaining(keyspace, own, 1, held, now).is_zero() {
            if count > 1 {
                // The hold to re-enter has been lost.
                return Ok(Outcome::Wait(Expiry::In(Duration::ZERO)));
            }
            if self.prefers_writers
                && !writes
                && let Some(left) = blocked_by_writers(keyspace, self.keys, now)?
            {
                return Ok(Outcome::Wait(Expiry::In(left)));
            }
        }
        if free {
            let holds = Holds {
                counts: BTreeMap::new(),
                mode: Some(Mode::Read),
            };
            keyspace.set(object.key(), holds, Some(end), now);
        }
        if let Some((_, mut holds)) = find(keyspace, object, now)? {
            holds.value.counts.insert(owner.to_owned(), count);
            holds.extend_to(end);
        }
        // Removes what earlier holds of the same owner left behind.
        let last = keyed_holds(count);
        delete_timeouts(keyspace, own, held, last + 1);
        if hold_remaining(keyspace, own, last, now) < lease.duration() {
            keyspace.set(&timeout_key(own, last), 1, Some(end), now);
        }
        Ok(Outcome::Done(()))
    }
}

/// Returns how long waiting writers block new readers.
fn blocked_by_writers(
    keyspace: &mut Keyspace,
    keys: &ReadWriteKeys,
    now: Instant,
) -> Result<Option<Duration>> {
    let now_ms = keyspace.date(now);
    let Some(writers) = keyspace.find::<BTreeMap<String, i64>>(&keys.writers, now)? else {
        return Ok(None);
    };
    let last = writers.value.values().max().copied().unwrap_or(now_ms);
    let left = u64::try_from(last - now_ms).unwrap_or(0);
    Ok((left > 0).then(|| Duration::from_millis(left)))
}

/// The minimum change of the end that is worth a message. If there are many leases that are renewed
/// at different times, neighboring ones differ by less.
const MIN_WAKE_CHANGE: Duration = Duration::from_secs(1);

/// Sets a reader's hold count to the number of holds to keep; 0 releases its side.
pub(in super::super) struct Release<'a> {
    pub(in super::super) keys: &'a ReadWriteKeys,
    pub(in super::super) hold: &'a Hold,
    pub(in super::super) keep: u32,
    /// The new lease; `None` leaves it unchanged.
    pub(in super::super) lease: Option<Lease>,
}

impl Step for Release<'_> {
    /// Whether the owner was reading.
    type Reply = bool;

    fn script(&self) -> &'static Script {
        script!(undeclared "../readers.lua", "../read_release.lua")
    }

    fn keys(&self) -> Keys<'_> {
        smallvec![self.hold.object.key()]
    }

    fn args(&self, args: &mut dyn Args) {
        args.text(&self.hold.field);
        args.number(self.keep.into());
        args.number(self.lease.map_or(0, Lease::millis));
        args.text(&self.keys.timeouts_prefix);
        args.text(self.hold.object.channel());
    }

    fn decode(&self, reply: ScriptReply) -> Result<bool> {
        reply.flag()
    }

    fn apply(&self, keyspace: &mut Keyspace, now: Instant) -> Result<bool> {
        let hold = self.hold;
        let (object, owner) = (&*hold.object, &*hold.field);
        let own = &self.keys.reader_timeouts_prefix(owner);
        let lease = self.lease.map_or(Duration::ZERO, Lease::duration);
        let Some((mode, holds)) = find(keyspace, object, now)? else {
            keyspace.publish(object.channel(), READ_RELEASED);
            return Ok(false);
        };
        let left = holds.remaining(now);
        let Some(count) = holds.value.counts.get(owner).copied() else {
            return Ok(false);
        };
        let held = !longest_remaining(keyspace, own, 1, count, now).is_zero();
        // A release never increases the count; a dead reader is always removed.
        let keep = if held { self.keep.min(count) } else { 0 };
        let last = keyed_holds(keep);
        if keep > 0 {
            // All holds of an owner last as long as the longest, so a released hold passes its lease on.
            let most = longest_remaining(keyspace, own, last, count, now).max(lease);
            if hold_remaining(keyspace, own, last, now) < most {
                keyspace.set(&timeout_key(own, last), 1, Some(now + most), now);
            }
        }
        delete_timeouts(keyspace, own, count, last + 1);
        let Some((_, mut holds)) = find(keyspace, object, now)? else {
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
        let most = longest_reader_remaining(keyspace, self.keys, now)?;
        if most.is_zero() {
            keyspace.remove(object.key());
        } else if let Some((_, mut holds)) = find(keyspace, object, now)? {
            holds.set_end(now + most);
        }
        // Writers sleep until the end that they received. If it is now much earlier, they are woken:
        // the remaining readers may be dead and never release.
        if most.is_zero() || left >= Expiry::In(most + MIN_WAKE_CHANGE) {
            keyspace.publish(object.channel(), READ_RELEASED);
        }
        Ok(held)
    }
}

/// Renews the holds of many readers.
pub(in super::super) fn renew_script() -> &'static Script {
    script!(undeclared "../readers.lua", "../read_renew.lua")
}

/// Renews one reader, as the script does.
pub(in super::super) fn renew(
    keyspace: &mut Keyspace,
    keys: &ReadWriteKeys,
    hold: &Hold,
    lease: Option<Lease>,
    now: Instant,
) -> Result<bool> {
    let own = &keys.reader_timeouts_prefix(&hold.field);
    let end = lease.map(|lease| now + lease.duration());
    let Some((_, holds)) = find(keyspace, &hold.object, now)? else {
        keyspace.publish(hold.object.channel(), READ_RELEASED);
        return Ok(false);
    };
    let count = holds.value.counts.get(&*hold.field).copied();
    let mut alive = false;
    for n in 1..=keyed_holds(count.unwrap_or(0)) {
        if hold_remaining(keyspace, own, n, now).is_zero() {
            continue;
        }
        alive = true;
        if let Some(end) = end
            && let Some(mut timeout) = keyspace.find::<i64>(&timeout_key(own, n), now)?
        {
            timeout.extend_to(end);
        }
    }
    if alive
        && let Some(end) = end
        && let Some((_, mut holds)) = find(keyspace, &hold.object, now)?
    {
        holds.extend_to(end);
    }
    Ok(alive)
}
