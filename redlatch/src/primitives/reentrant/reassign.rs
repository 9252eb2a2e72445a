//! The step that puts another owner in the place of the holder, without the lock being free in between. It serves releases
//! before the lock may be free ([`Acquire::at_least`](crate::Acquire::at_least)), and
//! [tickets](crate::primitives::ticket).
//!
//! 1. The owner's field of the hash is replaced by that of the other owner, which no earlier step has. Its lease replaces the
//!    old one, and may end earlier.
//! 2. If the other owner has a field already, the step was repeated. Then the expiry only moves later, because the client
//!    counts the lease from when the step was sent last.
//! 3. Waiters are woken, because the lease that they know of may be longer. They learn the new end, and sleep until then.
//!
//! Invariant: from the acquisition until the end of the new lease, no other step acquires the lock. The interleaving to
//! fear is a late step of the owner that was replaced: a repeated release, an attempt that was canceled, or a
//! renewal. None of them finds that owner in the store, so none of them frees the lock, acquires it or moves its end.

use smallvec::smallvec;

use super::rules::was_deleted;
use crate::error::{Error, Result};
use crate::hold::{ReassignParams, requests};
use crate::keyspace::{Holds, Keyspace};
use crate::step::{Args, Keys, Script, ScriptReply, Step, script};

/// Puts another owner in the place of the holder.
pub(crate) struct Reassign<'a, W> {
    pub(crate) params: ReassignParams<'a>,
    pub(crate) script: &'static Script,
    /// The key of the requests from which this removes the owner, if it has to.
    pub(crate) requests: Option<String>,
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
        args.text(self.requests.as_deref().unwrap_or_default());
        if self.of_writer {
            args.number(FIELDS_OF_WRITER as i64);
        }
    }

    fn decode(&self, reply: ScriptReply) -> Result<bool> {
        match reply {
            ScriptReply::Integer(-1) => Err(self.also_reads()),
            other => other.flag(),
        }
    }

    fn apply(&self, keyspace: &mut Keyspace) -> Result<bool> {
        let ReassignParams { hold, to, lease } = &self.params;
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
            if held {
                counts.remove(&*hold.field);
                counts.insert(to.clone(), 1);
                holds.expire_after(lease.duration());
            }
        }
        requests::remove(keyspace, self.requests.as_deref(), &hold.field);
        if !self.channel.is_empty() && (held || was_deleted(keyspace, held, &hold.object)) {
            (self.wake)(keyspace)?;
        }
        Ok(held)
    }
}
