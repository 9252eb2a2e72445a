//! The step that asks the holder of a lock to release it.
//!
//! 1. It records the request under the owner that holds the lock when it runs, and publishes.
//! 2. Renewals find it there (`reentrant/renew.lua`), and do not extend the lease beyond the limit.
//!
//! Invariant: the step does not change the lock, so no other owner acquires it earlier than without the request. The
//! interleaving to fear is a request that meets a later holder. So it names the owner, it is not repeated, and a release by an
//! owner that may acquire the lock again removes it.

use std::collections::BTreeMap;
use std::time::Duration;

use smallvec::smallvec;

use crate::error::Result;
use crate::hold::requests::{NO_LIMIT, Requests};
use crate::keyspace::{Holds, Keyspace};
use crate::lease::Expiry;
use crate::name::{KeyLayout, ObjectKeys, is_writer_field, owner_of};
use crate::owner::OwnerId;
use crate::primitives::lock::rules::{FOREIGN_HASH, wrong_kind};
use crate::step::{Args, Keys, Script, ScriptReply, Step, script};

/// How much longer than a hold its request remains.
const GRACE: Duration = Duration::from_secs(3600);

/// The message to the holder. Redisson's waiters know 0 and 1, and ignore others.
const ASKED: i64 = 2;

/// Asks the holder of a lock to release it.
pub(super) struct Ask<'a> {
    pub(super) object: &'a ObjectKeys,
    pub(super) requests: &'a str,
    /// How long its hold may still be renewed, if that is limited. Whole milliseconds.
    pub(super) limit: Option<Duration>,
}

impl Ask<'_> {
    /// Returns whether this asks the writer of a read-write lock.
    fn is_for_writer(&self) -> bool {
        self.object.layout() == KeyLayout::Write
    }

    /// Returns the limit in milliseconds. It is at most ten years.
    fn limit_ms(&self) -> Option<i64> {
        let millis = |limit: Duration| i64::try_from(limit.as_millis()).unwrap_or(i64::MAX);
        self.limit.map(millis)
    }
}

impl Step for Ask<'_> {
    /// The owner that was asked; `None`: no owner holds the lock.
    type Reply = Option<OwnerId>;

    fn script(&self) -> &'static Script {
        script!("../expire.lua", "ask.lua")
    }

    fn keys(&self) -> Keys<'_> {
        smallvec![self.object.key(), self.requests]
    }

    fn args(&self, args: &mut dyn Args) {
        args.text(self.object.channel());
        args.number(self.is_for_writer().into());
        if let Some(limit) = self.limit_ms() {
            args.number(limit);
        }
    }

    fn decode(&self, reply: ScriptReply) -> Result<Option<OwnerId>> {
        match reply {
            ScriptReply::Nil => Ok(None),
            ScriptReply::Integer(_) => Err(wrong_kind(self.object, FOREIGN_HASH)),
            holder => Ok(Some(owner_of(&holder.text()?).into())),
        }
    }

    fn apply(&self, keyspace: &mut Keyspace) -> Result<Option<OwnerId>> {
        let Some(holds) = keyspace.find::<Holds>(self.object.key())? else {
            return Ok(None);
        };
        if holds.value.mode.is_some() != self.is_for_writer() {
            return Err(wrong_kind(self.object, FOREIGN_HASH));
        }
        let left = holds.remaining().duration().unwrap_or_default();
        let mut fields = holds.value.counts.keys();
        let holder = fields.find(|field| is_writer_field(field) == self.is_for_writer());
        let Some(holder) = holder.cloned() else {
            return Ok(None);
        };
        let now = keyspace.now_ms();
        let last = self.limit_ms().map_or(NO_LIMIT, |limit| now + limit);
        let lifetime = left + self.limit.unwrap_or_default() + GRACE;
        let requests_left = keyspace.remaining(self.requests).and_then(Expiry::duration);
        match keyspace.find::<Requests>(self.requests)? {
            Some(mut requests) if requests.value.contains_key(&holder) => {
                requests
                    .value
                    .entry(holder.clone())
                    .and_modify(|earlier| *earlier = last.min(*earlier));
                requests.expire_after(lifetime.max(requests_left.unwrap_or_default()));
            }
            _ => {
                let requests: Requests = BTreeMap::from([(holder.clone(), last)]);
                keyspace.set(self.requests, requests, Some(lifetime));
            }
        }
        keyspace.publish(self.object.channel(), ASKED);
        Ok(Some(owner_of(&holder).into()))
    }
}
