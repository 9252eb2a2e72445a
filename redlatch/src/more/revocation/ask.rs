//! The step that asks the holder of a lock to release it.
//!
//! 1. It records the request under the owner that holds the lock when it runs, and publishes.
//! 2. Renewals find it there (`reentrant/renew.lua`), and do not extend the lease beyond the limit.
//!
//! Invariant: the step does not change the lock, so no other owner acquires it earlier than without
//! the request. The interleaving to fear is a request that meets a later holder. So it names the
//! owner, it is not repeated, and a release by an owner that may acquire the lock again removes it.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::Duration;

use crate::hold::requests::{NO_LIMIT, Requests};
use crate::keyspace::Holds;
use crate::lease::Expiry;
use crate::locks::rules::{FOREIGN_HASH, wrong_kind};
use crate::name::{KeyLayout, ObjectKeys, is_writer_field, owner_of};
use crate::owner::OwnerId;
use crate::step::{Arg, ScriptReply, Step, args, script};

/// How much longer than a hold its request remains.
const GRACE: Duration = Duration::from_secs(3600);

/// The message to the holder. Redisson's waiters know 0 and 1, and ignore others.
const ASKED: i64 = 2;

/// Asks the holder of a lock to release it. Replies the owner that was asked; `None`: no owner
/// holds the lock. `limit`: how long its hold may still be renewed, if that is limited. Whole
/// milliseconds, at most ten years.
pub(super) fn ask(object: &ObjectKeys, limit: Option<Duration>) -> Step<'_, Option<OwnerId>> {
    let requests = object.requests_key();
    let is_for_writer = object.layout() == KeyLayout::Write;
    let millis = |limit: Duration| i64::try_from(limit.as_millis()).unwrap_or(i64::MAX);
    let limit_ms = limit.map(millis);
    let mut args = args![object.channel(), is_for_writer];
    args.extend(limit_ms.map(Arg::from));
    Step::new(
        script!("../../locks/expire.lua", "ask.lua"),
        [Cow::from(object.key()), requests.clone().into()],
        args,
        move |reply| match reply {
            ScriptReply::Nil => Ok(None),
            ScriptReply::Integer(_) => Err(wrong_kind(object, FOREIGN_HASH)),
            holder => Ok(Some(owner_of(&holder.text()?).into())),
        },
        move |keyspace| {
            let Some(holds) = keyspace.find::<Holds>(object.key())? else {
                return Ok(None);
            };
            if holds.value.mode.is_some() != is_for_writer {
                return Err(wrong_kind(object, FOREIGN_HASH));
            }
            let left = holds.remaining().duration().unwrap_or_default();
            let mut fields = holds.value.counts.keys();
            let holder = fields.find(|field| is_writer_field(field) == is_for_writer);
            let Some(holder) = holder.cloned() else {
                return Ok(None);
            };
            let now = keyspace.now_ms();
            let last = limit_ms.map_or(NO_LIMIT, |limit| now + limit);
            let lifetime = left + limit.unwrap_or_default() + GRACE;
            let requests_left = keyspace.remaining(&requests).and_then(Expiry::duration);
            match keyspace.find::<Requests>(&requests)? {
                Some(mut all) if all.value.contains_key(&holder) => {
                    let request = all.value.entry(holder.clone());
                    request.and_modify(|earlier| *earlier = last.min(*earlier));
                    all.expire_after(lifetime.max(requests_left.unwrap_or_default()));
                }
                _ => {
                    let all: Requests = BTreeMap::from([(holder.clone(), last)]);
                    keyspace.set(&requests, all, Some(lifetime));
                }
            }
            keyspace.publish(object.channel(), ASKED);
            Ok(Some(owner_of(&holder).into()))
        },
    )
}
