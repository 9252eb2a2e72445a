//! What the steps of all locks in a hash owner -> hold count have in common: replies, and errors for keys of other kinds.

use super::Holder;
use crate::error::{Error, Result};
use crate::keyspace::{Holds, Keyspace};
use crate::lease::Expiry;
use crate::name::ObjectKeys;
use crate::step::ScriptReply;

/// Interprets the reply of a forced release: whether it was held.
pub(crate) fn parse_forced(object: &ObjectKeys, reply: ScriptReply) -> Result<bool> {
    match reply {
        ScriptReply::Integer(-1) => Err(wrong_kind(object, FOREIGN_HASH)),
        other => other.flag(),
    }
}

/// Returns whether any owner holds a lock. An error if it is a hash of another kind.
pub(crate) fn is_held(keyspace: &mut Keyspace, object: &ObjectKeys) -> Result<bool> {
    match keyspace.find::<Holds>(object.key())? {
        Some(holds) if holds.value.mode.is_some() => Err(wrong_kind(object, FOREIGN_HASH)),
        holds => Ok(holds.is_some()),
    }
}

/// Parses a holder from a script's reply: owner, hold count, remaining milliseconds.
pub(crate) fn parse_holder(reply: ScriptReply) -> Result<Holder> {
    let [owner, holds, left] = reply.array()?;
    let holds = holds.text()?.parse().unwrap_or(u32::MAX);
    let remaining = Expiry::from_millis(left.integer()?);
    Ok(Holder::new(owner.text()?.into(), holds, remaining))
}

pub(crate) const NO_EXPIRY: &str = "it has no time to live";
pub(crate) const FOREIGN_HASH: &str = "a hash of another kind";
pub(crate) const READ_WRITE: &str = "a read-write lock";

/// Returns the error for a hash that another program has under the name of a record.
pub(crate) fn no_record(key: &str) -> Error {
    Error::WrongKind {
        name: key.to_owned(),
        reason: FOREIGN_HASH,
    }
}

pub(crate) fn wrong_kind(object: &ObjectKeys, reason: &'static str) -> Error {
    Error::WrongKind {
        name: object.name().to_owned(),
        reason,
    }
}
