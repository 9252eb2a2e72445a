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

use crate::error::Result;
use crate::hold::requests::record;
use crate::keyspace::{Holds, Keyspace};
use crate::lease::{Expiry, millis};
use crate::locks::fair_shared::holders;
use crate::locks::rules::{FOREIGN_HASH, wrong_kind};
use crate::name::{KeyLayout, ObjectKeys, is_writer_field, owner_of};
use crate::owner::OwnerId;
use crate::step::{Arg, ScriptReply, Step, args, script};

/// Asks the holder of a lock to release it. Replies the owner that was asked; `None`: no owner
/// holds the lock. `limit`: how long its hold may still be renewed, if that is limited. Whole
/// milliseconds, at most ten years.
pub(super) fn ask(object: &ObjectKeys, limit: Option<Duration>) -> Step<'_, Option<OwnerId>> {
    let requests = object.requests_key();
    let writer_of = match object.layout() {
        KeyLayout::Write => 1u32,
        KeyLayout::FairWrite => 2,
        _ => 0,
    };
    let mut args = args![object.channel(), writer_of];
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
            let Some(holder) = holder(keyspace, object)? else {
                return Ok(None);
            };
            let left = keyspace.remaining(object.key());
            let left = left.and_then(Expiry::duration).unwrap_or_default();
            let is_of_holder = |owner: &str| owner == holder;
            record(keyspace, object, &holder, left, limit, is_of_holder)?;
            Ok(Some(owner_of(&holder).into()))
        },
    )
}

/// Returns the field of the holder that is asked.
fn holder(keyspace: &mut Keyspace, object: &ObjectKeys) -> Result<Option<String>> {
    let writes = object.layout().writes();
    if object.layout() == KeyLayout::FairWrite {
        let mut held = holders::current(keyspace, object, holders::UNLIMITED)?.into_iter();
        let writer = held.find(|it| is_writer_field(&it.field));
        return Ok(writer.map(|it| it.field));
    }
    let Some(holds) = keyspace.find::<Holds>(object.key())? else {
        return Ok(None);
    };
    if holds.value.mode.is_some() != writes {
        return Err(wrong_kind(object, FOREIGN_HASH));
    }
    let mut fields = holds.value.counts.keys();
    Ok(fields
        .find(|field| is_writer_field(field) == writes)
        .cloned())
}
