//! The step that asks the holder of a lock to release it.
//!
//! 1. It records the request under the owner that holds the lock when it runs, and publishes.
//! 2. Renewals find it there (`reentrant/renew.lua`), and do not extend the lease beyond the limit.
//!
//! Invariant: the step does not change the lock, so no other owner acquires it earlier than without
//! the request. The interleaving to fear is a request that meets a later holder. So it names the
//! owner, it is not repeated, and a release by an owner that may acquire the lock again removes it.

use std::borrow::Cow;
use std::time::Duration;

use crate::hold::requests::record;
use crate::keyspace::Holds;
use crate::lease::millis;
use crate::locks::rules::{FOREIGN_HASH, wrong_kind};
use crate::name::{ObjectKeys, is_writer_field, owner_of};
use crate::owner::OwnerId;
use crate::step::{Arg, ScriptReply, Step, args, script};

/// Asks the holder of a lock to release it. Replies the owner that was asked; `None`: no owner
/// holds the lock. `limit`: how long its hold may still be renewed, if that is limited. Whole
/// milliseconds, at most ten years.
pub(super) fn ask(object: &ObjectKeys, limit: Option<Duration>) -> Step<'_, Option<OwnerId>> {
    let requests = object.requests_key();
    let is_for_writer = object.layout().writes();
    let mut args = args![object.channel(), is_for_writer];
    args.extend(limit.map(|limit| Arg::from(millis(limit))));
    Step::new(
        script!("../../locks/expire.lua", "../../hold/record.lua", "ask.lua"),
        [Cow::from(object.key()), requests.into()],
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
            let is_of_holder = |owner: &str| owner == holder;
            record(keyspace, object, &holder, left, limit, is_of_holder)?;
            Ok(Some(owner_of(&holder).into()))
        },
    )
}
