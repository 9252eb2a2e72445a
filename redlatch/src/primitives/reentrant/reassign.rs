//! The step that puts another owner in the place of the holder, without the lock being free in
//! between. It serves [tickets](crate::primitives::ticket), and releases before the lock may be
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

use smallvec::smallvec;

use super::rules::was_deleted;
use crate::error::{Error, Result};
use crate::hold::{ReassignParams, Renewed, requests};
use crate::keyspace::{Holds, Keyspace};
use crate::step::{Args, Keys, Script, ScriptReply, Step, script};

/// Puts another owner in the place of the holder.
pub(crate) struct Reassign<'a, W> {
    pub(crate) params: ReassignParams<'a>,
    pub(crate) script: &'static Script,
    /// The channel of the waiters; empty if they do not subscribe.
    pub(crate) channel: &'a str,
    /// Wakes a waiter.
    pub(crate) wake: W,
    /// Whether this is the write side of a read-write lock.
    pub(crate) of_writer: bool,
}

/// Number of fields of the hash of a read-write lock whose writer does not read: `mode` and the writer.
const FIELDS_OF_WRITER: usize = 2;

/// Returns the script of locks whose waiters subscribe to the lock's channel, or do not subscribe.
pub(crate) fn script() -> &'static Script {
    script!("wake.lua", "reassign.lua")
}

impl<W> Reassign<'_, W> {
    /// The feared interleaving: a request of the writer for the read side is granted just before. It would read while
    /// the other owner writes.
    fn also_reads(&self) -> Error {
        Error::NotMovable {
            name: self.params.hold.object.name().to_owned(),
            reason: "its owner also reads; release the read side first",
        }
    }

    fn asked(&self, left: Option<Duration>) -> Error {
        let name = self.params.hold.object.name().to_owned();
        Error::Asked { name, left }
    }
}

impl<W: Fn(&mut Keyspace) -> Result<()> + Send + Sync> Step for Reassign<'_, W> {
    /// Whether the other owner holds the lock now.
    type Reply = bool;

    fn script(&self) -> &'static Script {
        self.script
    }

    fn keys(&self) -> Keys<'_> {
        smallvec![self.params.hold.object.key()]
    }

    fn args(&self, args: &mut dyn Args) {
        args.text(&self.params.hold.field);
        args.text(self.channel);
        args.text(&self.params.to);
        args.number(self.params.lease.millis());
        args.text(self.params.requests_key().as_deref().unwrap_or_default());
        args.number(self.params.unless_asked.into());
        if self.of_writer {
            args.number(FIELDS_OF_WRITER as i64);
        }
    }

    fn decode(&self, reply: ScriptReply) -> Result<bool> {
        match reply {
            ScriptReply::Integer(-1) => Err(self.also_reads()),
            ScriptReply::Integer(-2) => Err(self.asked(None)),
            ScriptReply::Integer(left @ 2..) => {
                let left = u64::try_from(left - 2).unwrap_or_default();
                Err(self.asked(Some(Duration::from_millis(left))))
            }
            other => other.flag(),
        }
    }

    fn apply(&self, keyspace: &mut Keyspace) -> Result<bool> {
        let ReassignParams {
            hold,
            to,
            lease,
            unless_asked,
        } = &self.params;
        let requests = self.params.requests_key();
        let asked = requests::find(keyspace, hold);
        let mut held = false;
        if let Some(mut holds) = keyspace.find::<Holds>(hold.object.key())? {
            let Holds { counts, mode } = &mut *holds.value;
            if counts.contains_key(to) {
                holds.extend_to(lease.duration());
                return Ok(true);
            }
            let fields = counts.len() + usize::from(mode.is_some());
            held = counts.contains_key(&*hold.field);
            if held && self.of_writer && fields != FIELDS_OF_WRITER {
                return Err(self.also_reads());
            }
            if held
                && *unless_asked
                && let Renewed::Asked { limit } = asked
            {
                return Err(self.asked(limit));
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
        if !self.channel.is_empty() && (held || was_deleted(keyspace, held, &hold.object)) {
            (self.wake)(keyspace)?;
        }
        Ok(held)
    }
}
