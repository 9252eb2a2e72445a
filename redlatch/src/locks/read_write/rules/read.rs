//! The steps of the read side.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{
    READ_RELEASED, delete_timeouts, find, hold_remaining, keyed_holds, longest_reader_remaining,
    longest_remaining, timeout_key,
};
use crate::error::Result;
use crate::hold::{AcquireParams, Hold, ReleaseParams};
use crate::keyspace::{Holds, Keyspace, Mode};
use crate::lease::{Expiry, Lease};
use crate::locks::reentrant::rules::parse_outcome;
use crate::locks::rules::{NO_EXPIRY, wrong_kind};
use crate::name::{ReadWriteKeys, writer_field};
use crate::step::{Outcome, Script, ScriptReply, Step, args, script};

/// Acquires the read side for an owner, or returns how long another owner may still write.
/// `prefers_writers`: whether to wait behind waiting writers.
pub(in super::super) fn acquire<'a>(
    params: AcquireParams<'a>,
    keys: &'a ReadWriteKeys,
    prefers_writers: bool,
) -> Step<'a, Outcome> {
    let (prefix, writers) = (
        &*keys.timeouts_prefix,
        prefers_writers.then_some(&*keys.writers),
    );
    Step::new(
        script!(undeclared "../../expire.lua", "../readers.lua", "../read_acquire.lua"),
        [keys.read.key()].into_iter().chain(writers),
        args![&*params.hold.field, params.lease, params.count, prefix],
        move |reply| parse_outcome(&params.hold.object, reply),
        move |keyspace| {
            let AcquireParams {
                hold, count, lease, ..
            } = params;
            let (object, owner) = (&*hold.object, &*hold.field);
            let own = &keys.reader_timeouts_prefix(owner);
            let lease = lease.duration();
            let mut held = 0;
            let mut writes = false;
            let found = find(keyspace, object)?;
            let free = found.is_none();
            if let Some((mode, holds)) = found {
                let left = holds.remaining();
                if left == Expiry::Never {
                    return Err(wrong_kind(object, NO_EXPIRY));
                }
                writes = holds.value.counts.contains_key(&writer_field(owner));
                if mode == Mode::Write && !writes {
                    return Ok(Outcome::Wait(left));
                }
                held = holds.value.counts.get(owner).copied().unwrap_or(0);
            }
            if longest_remaining(keyspace, own, 1, held).is_zero() {
                if count > 1 {
                    // The hold to re-enter has been lost.
                    return Ok(Outcome::Wait(Expiry::In(Duration::ZERO)));
                }
                if prefers_writers
                    && !writes
                    && let Some(left) = blocked_by_writers(keyspace, keys)?
                {
                    return Ok(Outcome::Wait(Expiry::In(left)));
                }
            }
            if free {
                let holds = Holds {
                    counts: BTreeMap::new(),
                    mode: Some(Mode::Read),
                };
                keyspace.set(object.key(), holds, Some(lease));
            }
            if let Some((_, mut holds)) = find(keyspace, object)? {
                holds.value.counts.insert(owner.to_owned(), count);
                holds.extend_to(lease);
            }
            // Removes what earlier holds of the same owner left behind.
            let last = keyed_holds(count);
            delete_timeouts(keyspace, own, held, last + 1);
            if hold_remaining(keyspace, own, last) < lease {
                keyspace.set(&timeout_key(own, last), 1, Some(lease));
            }
            Ok(Outcome::ACQUIRED)
        },
    )
}

/// Returns how long waiting writers block new readers.
fn blocked_by_writers(keyspace: &mut Keyspace, keys: &ReadWriteKeys) -> Result<Option<Duration>> {
    let now_ms = keyspace.now_ms();
    let Some(writers) = keyspace.find::<BTreeMap<String, i64>>(&keys.writers)? else {
        return Ok(None);
    };
    let last = writers.value.values().max().copied().unwrap_or(now_ms);
    let left = u64::try_from(last - now_ms).unwrap_or(0);
    Ok((left > 0).then(|| Duration::from_millis(left)))
}

/// The minimum change of the end that is worth a message. If there are many leases that are renewed
/// at different times, neighboring ones differ by less.
const MIN_WAKE_CHANGE: Duration = Duration::from_secs(1);

/// Sets a reader's hold count to the number of holds to keep; 0 releases its side. Replies whether
/// the owner was reading.
pub(in super::super) fn release<'a>(
    keys: &'a ReadWriteKeys,
    params: ReleaseParams<'a>,
) -> Step<'a, bool> {
    let ReleaseParams { hold, keep, lease } = params;
    let args = args![
        &*hold.field,
        hold.object.channel(),
        keep,
        lease,
        &*keys.timeouts_prefix,
    ];
    Step::new(
        script!(undeclared "../readers.lua", "../read_release.lua"),
        [hold.object.key()],
        args,
        ScriptReply::flag,
        move |keyspace| {
            let (object, owner) = (&*hold.object, &*hold.field);
            let own = &keys.reader_timeouts_prefix(owner);
            let lease = lease.map_or(Duration::ZERO, Lease::duration);
            let Some((mode, holds)) = find(keyspace, object)? else {
                keyspace.publish(object.channel(), READ_RELEASED);
                return Ok(false);
            };
            let left = holds.remaining();
            let Some(count) = holds.value.counts.get(owner).copied() else {
                return Ok(false);
            };
            let held = !longest_remaining(keyspace, own, 1, count).is_zero();
            // A release never increases the count; a dead reader is always removed.
            let keep = if held { keep.min(count) } else { 0 };
            let last = keyed_holds(keep);
            if keep > 0 {
                // All holds of an owner last as long as the longest, so a released hold passes its
                // lease on.
                let most = longest_remaining(keyspace, own, last, count).max(lease);
                if hold_remaining(keyspace, own, last) < most {
                    keyspace.set(&timeout_key(own, last), 1, Some(most));
                }
            }
            delete_timeouts(keyspace, own, count, last + 1);
            let Some((_, mut holds)) = find(keyspace, object)? else {
                return Ok(held);
            };
            match keep {
                0 => drop(holds.value.counts.remove(owner)),
                _ => drop(holds.value.counts.insert(owner.to_owned(), keep)),
            }
            if mode == Mode::Write {
                // The owner also writes: its write hold does not change.
                if keep > 0 && !lease.is_zero() {
                    holds.extend_to(lease);
                }
                return Ok(held);
            }
            let most = longest_reader_remaining(keyspace, keys)?;
            // Writers sleep until the end that they received. If it is now much earlier, they are
            // woken: the remaining readers may be dead and never release. Otherwise it stays, so that
            // small steps do not add up.
            let earlier = left >= Expiry::In(most + MIN_WAKE_CHANGE);
            if most.is_zero() {
                keyspace.remove(object.key());
            } else if (earlier || left < Expiry::In(most))
                && let Some((_, mut holds)) = find(keyspace, object)?
            {
                holds.expire_after(most);
            }
            if most.is_zero() || earlier {
                keyspace.publish(object.channel(), READ_RELEASED);
            }
            Ok(held)
        },
    )
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
) -> Result<bool> {
    let own = &keys.reader_timeouts_prefix(&hold.field);
    let Some((_, holds)) = find(keyspace, &hold.object)? else {
        keyspace.publish(hold.object.channel(), READ_RELEASED);
        return Ok(false);
    };
    let count = holds.value.counts.get(&*hold.field).copied();
    let mut alive = false;
    for n in 1..=keyed_holds(count.unwrap_or(0)) {
        if hold_remaining(keyspace, own, n).is_zero() {
            continue;
        }
        alive = true;
        if let Some(lease) = lease
            && let Some(mut timeout) = keyspace.find::<i64>(&timeout_key(own, n))?
        {
            timeout.extend_to(lease.duration());
        }
    }
    if alive
        && let Some(lease) = lease
        && let Some((_, mut holds)) = find(keyspace, &hold.object)?
    {
        holds.extend_to(lease.duration());
    }
    Ok(alive)
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::super::super::sides;
    use super::*;
    use crate::step::differential::hold_with;

    /// A writer sleeps until the end of which it was told. Readers release in either order. The last one is dead, and never does:
    /// the writer sleeps for less than a second longer than that one has its lease.
    #[test]
    fn writer_sleeps_at_most_a_second_longer_than_the_readers_have_their_leases() {
        let (read, write) = sides("", "name");
        let reader = |n: u64| hold_with(n.to_string(), read.clone());
        let writer = hold_with(writer_field("writer"), write);
        for apart in [300, 900, 999, 1000, 1001] {
            for newest_first in [true, false] {
                let mut keyspace = Keyspace::new(Instant::now());
                let acquire = |keyspace: &mut Keyspace, hold: &Hold, lease| {
                    let params = AcquireParams::without_waiting(hold, 1, lease);
                    hold.kind.acquire(params).apply(keyspace).unwrap()
                };
                let lease = |n| Lease::from_remaining(Duration::from_millis(5000 + n * apart));
                for n in 0..=10 {
                    let acquired = acquire(&mut keyspace, &reader(n), lease(n));
                    assert_eq!(acquired, Outcome::ACQUIRED);
                }
                let mut told = acquire(&mut keyspace, &writer, Lease::WATCHDOG);
                keyspace.take_published();
                for n in 1..=10 {
                    let hold = reader(if newest_first { 11 - n } else { n });
                    let params = ReleaseParams {
                        hold: &hold,
                        keep: 0,
                        lease: None,
                    };
                    assert!(hold.kind.release(params).apply(&mut keyspace).unwrap());
                    if !keyspace.take_published().is_empty() {
                        told = acquire(&mut keyspace, &writer, Lease::WATCHDOG);
                    }
                }
                let Outcome::Wait(Expiry::In(sleep)) = told else {
                    panic!("{told:?}");
                };
                let longest = lease(0).duration() + MIN_WAKE_CHANGE;
                assert!(
                    sleep < longest,
                    "{apart} ms apart, {newest_first}: {sleep:?}"
                );
            }
        }
    }
}
