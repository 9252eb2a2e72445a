//! The steps of the write side.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{WRITE_RELEASED, find, longest_reader_remaining, longest_remaining, wake_all};
use crate::error::{Error, Result};
use crate::hold::{AcquireParams, requests};
use crate::hold::{Hold, ReleaseParams, Renewed};
use crate::keyspace::{Holds, Keyspace, Mode};
use crate::lease::{Expiry, Lease};
use crate::locks::reentrant::rules::{self as reentrant, parse_outcome, was_deleted};
use crate::locks::rules::{NO_EXPIRY, wrong_kind};
use crate::name::{ReadWriteKeys, owner_of};
use crate::step::{Arg, Outcome, Script, ScriptReply, Step, args, script};

/// Acquires the write side for an owner, or returns how long others may still read or write.
#[derive(Clone, Copy)]
pub(in super::super) struct Acquire<'a> {
    pub(in super::super) params: AcquireParams<'a>,
    pub(in super::super) keys: &'a ReadWriteKeys,
    /// How long new readers are blocked if this has to wait and does not retry.
    pub(in super::super) blocks_readers_for: Option<Lease>,
}

impl<'a> Acquire<'a> {
    pub(in super::super) fn step(self) -> Step<'a, Outcome> {
        let AcquireParams {
            hold, count, lease, ..
        } = self.params;
        let args = args![
            &*hold.field,
            lease,
            count,
            &*self.keys.timeouts_prefix,
            owner_of(&hold.field),
            self.waiter_ttl(),
        ];
        let writers = self.blocks_readers_for.map(|_| &*self.keys.writers);
        let decode = move |reply| match reply {
            ScriptReply::Integer(-3) => Err(self.write_while_reading()),
            other => parse_outcome(&hold.object, other),
        };
        Step::new(
            script!(undeclared "../../expire.lua", "../readers.lua", "../write_acquire.lua"),
            [self.keys.write.key()].into_iter().chain(writers),
            args,
            decode,
            move |keyspace| self.apply(keyspace),
        )
    }

    /// Returns how long the store remembers this waiting writer, if it waits.
    fn waiter_ttl(&self) -> Option<Lease> {
        self.blocks_readers_for.filter(|_| self.params.waits)
    }

    fn write_while_reading(&self) -> Error {
        Error::WriteWhileReading {
            name: self.params.hold.object.name().to_owned(),
        }
    }

    fn apply(&self, keyspace: &mut Keyspace) -> Result<Outcome> {
        let AcquireParams {
            hold, count, lease, ..
        } = self.params;
        let keys = self.keys;
        let (object, field) = (&*hold.object, &*hold.field);
        let lease = lease.duration();
        let Some((mode, mut holds)) = find(keyspace, object)? else {
            if count > 1 {
                // The hold to re-enter has been lost.
                return Ok(Outcome::Wait(Expiry::In(Duration::ZERO)));
            }
            let holds = Holds {
                counts: BTreeMap::from([(field.to_owned(), count)]),
                mode: Some(Mode::Write),
            };
            keyspace.set(object.key(), holds, Some(lease));
            return self.finish_acquisition(keyspace);
        };
        let left = holds.remaining();
        if left == Expiry::Never {
            return Err(wrong_kind(object, NO_EXPIRY));
        }
        if mode == Mode::Write
            && let Some(held) = holds.value.counts.get_mut(field)
        {
            *held = count;
            holds.extend_to(lease);
            return self.finish_acquisition(keyspace);
        }
        if count > 1 {
            return Ok(Outcome::Wait(Expiry::In(Duration::ZERO)));
        }
        let owner = owner_of(field);
        let reads = holds.value.counts.get(owner).copied().unwrap_or(0);
        let own = keys.reader_timeouts_prefix(owner);
        if !longest_remaining(keyspace, &own, 1, reads).is_zero() {
            return Err(self.write_while_reading());
        }
        let Some(ttl) = self.waiter_ttl() else {
            return Ok(Outcome::Wait(left));
        };
        let now_ms = keyspace.now_ms();
        let until = now_ms.saturating_add(ttl.millis());
        let writers: &mut BTreeMap<String, i64> = keyspace.find_or_create(&keys.writers)?;
        writers.retain(|_, until| *until > now_ms);
        writers.insert(field.to_owned(), until);
        if let Some(mut writers) = keyspace.find::<BTreeMap<String, i64>>(&keys.writers)? {
            writers.expire_after(ttl.duration());
        }
        // If the writer retries in time, its mark does not expire while it waits.
        Ok(Outcome::Wait(left.min(Expiry::In(ttl.renewal_interval()))))
    }

    /// Removes this writer's mark, because it holds the lock now.
    fn finish_acquisition(&self, keyspace: &mut Keyspace) -> Result<Outcome> {
        if self.blocks_readers_for.is_some() {
            remove_waiting_writer(keyspace, self.keys, self.params.hold)?;
        }
        Ok(Outcome::ACQUIRED)
    }
}

/// Removes an owner from the waiting writers. Returns whether it was marked.
fn remove_waiting_writer(
    keyspace: &mut Keyspace,
    keys: &ReadWriteKeys,
    hold: &Hold,
) -> Result<bool> {
    let writers = keyspace.find::<BTreeMap<String, i64>>(&keys.writers)?;
    Ok(writers.is_some_and(|writers| writers.value.remove(&*hold.field).is_some()))
}

/// Sets a writer's hold count to the number of holds to keep; 0 releases its side. Replies whether
/// the owner was writing.
pub(in super::super) fn release<'a>(
    keys: &'a ReadWriteKeys,
    params: ReleaseParams<'a>,
) -> Step<'a, bool> {
    let ReleaseParams { hold, keep, lease } = params;
    let requests = params.requests_key();
    let mut args = args![
        &*hold.field,
        hold.object.channel(),
        keep,
        lease,
        &*keys.timeouts_prefix,
    ];
    args.extend(requests.clone().map(Arg::from));
    Step::new(
        script!(undeclared "../readers.lua", "../write_release.lua"),
        [keys.write.key(), &*keys.writers],
        args,
        ScriptReply::flag,
        move |keyspace| {
            let (object, field) = (&*hold.object, &*hold.field);
            requests::remove(keyspace, requests.as_deref(), field);
            let found = find(keyspace, object)?;
            let mine = found.filter(|(_, holds)| holds.value.counts.contains_key(field));
            let Some((_, mut holds)) = mine else {
                if keep == 0 && remove_waiting_writer(keyspace, keys, hold)? {
                    keyspace.publish(object.channel(), WRITE_RELEASED);
                } else if !keyspace.exists(object.key()) {
                    wake_all(keyspace, object);
                }
                return Ok(false);
            };
            if keep > 0 {
                holds.value.counts.insert(field.to_owned(), keep);
                if let Some(lease) = lease {
                    holds.extend_to(lease.duration());
                }
                return Ok(true);
            }
            holds.value.counts.remove(field);
            let most = longest_reader_remaining(keyspace, keys)?;
            if most.is_zero() {
                keyspace.remove(object.key());
            } else if let Some((_, mut holds)) = find(keyspace, object)? {
                holds.value.mode = Some(Mode::Read);
                holds.expire_after(most);
            }
            wake_all(keyspace, object);
            Ok(true)
        },
    )
}

/// Renews the leases of many writers. A writer's lease is the expiry of the lock's key.
pub(in super::super) fn renew_script() -> &'static Script {
    script!(
        "../readers.lua",
        "../write_wake.lua",
        "../../../hold/requests.lua",
        "../../reentrant/renew.lua"
    )
}

/// Returns the script that puts another writer in the place of the holder.
pub(in super::super) fn handoff_script() -> &'static Script {
    script!(
        "../../../hold/fair_waiters.lua",
        "../readers.lua",
        "../write_wake.lua",
        "../../reentrant/handoff.lua"
    )
}

/// Renews one writer, as the script does.
pub(in super::super) fn renew(
    keyspace: &mut Keyspace,
    hold: &Hold,
    lease: Option<Lease>,
) -> Result<Renewed> {
    let renewed = reentrant::renew(keyspace, hold, lease)?;
    if was_deleted(keyspace, renewed.is_held(), &hold.object) {
        wake_all(keyspace, &hold.object);
    }
    Ok(renewed)
}
