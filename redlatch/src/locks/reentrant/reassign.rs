//! The step that puts another owner in the place of the holder, without the lock being free in
//! between. It serves [tickets](crate::more::ticket), and releases before the lock may be
//! free ([`Acquire::at_least`](crate::Acquire::at_least)): then the other owner is a *keeper* of
//! the same client, and its lease is the rest of the time.
//!
//! 1. The owner's field of the hash is replaced by that of the other owner, which no earlier step
//!    has. Its lease replaces the old one, and may end earlier.
//! 2. If the other owner has a field already, the step was repeated. Then the expiry only moves
//!    later, because the client counts the lease from when the step was sent last.
//! 3. Waiters are woken, because the lease that they know of may be longer. They learn the new end,
//!    and sleep until then.
//! 4. A ticket is not made of a hold whose owner was asked to release it, and a ticket that was
//!    asked for is not adopted: with the new owner the request would be gone, and so would the
//!    limit of a revocation. A release is not refused. Mutant `asked-ticket-adopted`.
//!
//! Invariant: from the acquisition until the end of the new lease, no other step acquires the lock.
//! What must not happen, and what prevents it:
//!
//! - *A late step of the replaced owner frees the lock*, acquires it or moves its end: a repeated
//!   release, a canceled attempt, a renewal. None of them finds that owner in the store, and no
//!   step has a keeper. Mutant `minimum-time-ignored`.
//! - *The same owner re-enters, with the fencing token of before.* It is not the holder, so it
//!   waits as others do.
//! - *The hold passes on within the client before the end of its minimum time.* Hand-over and
//!   transfer are refused until then.
//! - *Waiters sleep until the end of the watchdog's lease.* Point 3.

use std::time::Duration;

use super::rules::was_deleted;
use crate::error::{Error, Result};
use crate::hold::{Hold, ReassignParams, Renewed, requests};
use crate::keyspace::{Holds, Keyspace};
use crate::step::{Script, ScriptReply, Step, args, script};

/// Number of fields of the hash of a read-write lock whose writer does not read: `mode` and the
/// writer.
const FIELDS_OF_WRITER: usize = 2;

/// Returns the script of locks whose waiters subscribe to the lock's channel, or do not subscribe.
pub(crate) fn script() -> &'static Script {
    script!("wake.lua", "reassign.lua")
}

/// Puts another owner in the place of the holder. Replies whether the other owner holds the lock
/// now. `channel`: the channel of the waiters; empty if they do not subscribe. `wake`: wakes a
/// waiter. `of_writer`: whether this is the write side of a read-write lock.
pub(crate) fn reassign<'a>(
    params: ReassignParams<'a>,
    script: &'static Script,
    channel: &'a str,
    wake: impl Fn(&mut Keyspace) -> Result<()> + Send + Sync + 'a,
    of_writer: bool,
) -> Step<'a, bool> {
    let hold = params.hold;
    let requests = params.requests_key();
    let mut args = args![
        &*hold.field,
        channel,
        params.to.clone(),
        params.lease,
        requests.clone().unwrap_or_default(),
        params.unless_asked,
    ];
    if of_writer {
        args.push((FIELDS_OF_WRITER as i64).into());
    }
    let decode = |reply| match reply {
        ScriptReply::Integer(-1) => Err(also_reads(hold)),
        ScriptReply::Integer(-2) => Err(asked(hold, None)),
        ScriptReply::Integer(left @ 2..) => {
            let left = u64::try_from(left - 2).unwrap_or_default();
            Err(asked(hold, Some(Duration::from_millis(left))))
        }
        other => other.flag(),
    };
    let apply = move |keyspace: &mut Keyspace| {
        let ReassignParams {
            to,
            lease,
            unless_asked,
            ..
        } = &params;
        let request = requests::find(keyspace, hold);
        let mut held = false;
        if let Some(mut holds) = keyspace.find::<Holds>(hold.object.key())? {
            let Holds { counts, mode } = &mut *holds.value;
            if counts.contains_key(to) {
                holds.extend_to(lease.duration());
                return Ok(true);
            }
            let fields = counts.len() + usize::from(mode.is_some());
            held = counts.contains_key(&*hold.field);
            if held && of_writer && fields != FIELDS_OF_WRITER {
                return Err(also_reads(hold));
            }
            if held
                && *unless_asked
                && let Renewed::Asked { limit } = request
            {
                return Err(asked(hold, limit));
            }
            if held {
                counts.remove(&*hold.field);
                counts.insert(to.clone(), 1);
                holds.expire_after(lease.duration());
            }
        }
        if !unless_asked {
            requests::remove(keyspace, requests.as_deref(), &hold.field);
        }
        if !channel.is_empty() && (held || was_deleted(keyspace, held, &hold.object)) {
            wake(keyspace)?;
        }
        Ok(held)
    };
    Step::new(script, [hold.object.key()], args, decode, apply)
}

/// The feared interleaving: a request of the writer for the read side is granted just before. It
/// would read while the other owner writes.
fn also_reads(hold: &Hold) -> Error {
    Error::NotMovable {
        name: hold.object.name().to_owned(),
        reason: "its owner also reads; release the read side first",
    }
}

fn asked(hold: &Hold, left: Option<Duration>) -> Error {
    let name = hold.object.name().to_owned();
    Error::Asked { name, left }
}
