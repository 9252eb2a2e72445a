//! The step of a release that comes before the lock may be free ([`Acquire::at_least`](crate::Acquire::at_least)).
//!
//! 1. The owner's hold passes to a new owner of the same client, its *keeper*, and expires after the rest of the time.
//! 2. No request has the keeper, so no step renews or releases that hold: only its expiry frees the lock, or a forced release.
//! 3. Waiters are woken, because the lease that they know of may be longer. They learn the new end, and sleep until then.
//!
//! Invariant: from the acquisition until the end of the time, no step of a request acquires the lock. The interleaving to
//! fear is a late step of the owner that just released: a repeated release, an attempt that was canceled, or a
//! renewal. None of them finds the owner in the store, so none of them frees the lock, acquires it or moves its end.

use std::collections::BTreeMap;

use smallvec::smallvec;

use super::rules::was_deleted;
use crate::error::Result;
use crate::hold::RetainParams;
use crate::hold::requests;
use crate::keyspace::{Holds, Keyspace};
use crate::step::{Args, Keys, Script, ScriptReply, Step, script};

/// Ends an owner's hold, and keeps the lock from all owners for a time.
pub(crate) struct Retain<'a, W> {
    pub(crate) params: RetainParams<'a>,
    pub(crate) script: &'static Script,
    /// The key of the requests from which this removes the owner, if it has to.
    pub(crate) requests: Option<String>,
    /// The channel of the waiters; empty if they do not subscribe.
    pub(crate) channel: &'a str,
    /// Wakes a waiter.
    pub(crate) wake: W,
}

/// Returns the script of locks whose waiters subscribe to the lock's channel, or do not subscribe.
pub(crate) fn script() -> &'static Script {
    script!("wake.lua", "retain.lua")
}

impl<W: Fn(&mut Keyspace) -> Result<()> + Send + Sync> Step for Retain<'_, W> {
    /// Whether the owner held the lock.
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
        args.text(&self.params.keeper);
        args.number(self.params.lease.millis());
        if let Some(requests) = &self.requests {
            args.text(requests);
        }
    }

    fn decode(&self, reply: ScriptReply) -> Result<bool> {
        reply.flag()
    }

    fn apply(&self, keyspace: &mut Keyspace) -> Result<bool> {
        let RetainParams {
            hold,
            keeper,
            lease,
        } = &self.params;
        requests::remove(keyspace, self.requests.as_deref(), &hold.field);
        let mut held = false;
        if let Some(mut holds) = keyspace.find::<Holds>(hold.object.key())?
            && holds.value.counts.contains_key(&*hold.field)
        {
            held = true;
            holds.value.counts = BTreeMap::from([(keeper.clone(), 1)]);
            holds.expire_after(lease.duration());
        }
        if !self.channel.is_empty() && (held || was_deleted(keyspace, held, &hold.object)) {
            (self.wake)(keyspace)?;
        }
        Ok(held)
    }
}
