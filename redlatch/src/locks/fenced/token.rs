//! Fencing tokens: numbers of the store that only grow.

use std::collections::BTreeMap;

use crate::counters::read_number;
use crate::keyspace::Keyspace;

/// Returns the current token, 0 if there is none. `None`: the key is no number.
pub(crate) fn read(keyspace: &mut Keyspace, key: &str) -> Option<i64> {
    let current = read_number(keyspace, key).ok()?;
    Some(current.unwrap_or_default())
}

/// Returns the token after the current one. `None`: the key is no number, or the greatest.
pub(crate) fn next(keyspace: &mut Keyspace, key: &str) -> Option<i64> {
    read(keyspace, key)?.checked_add(1)
}

/// Parses a number as the store writes it. Any other text is no number for INCR either.
pub(crate) fn parse_number(text: &str) -> Option<i64> {
    let number = text.parse().ok();
    number.filter(|number: &i64| number.to_string() == text)
}

pub(crate) const INVALID_EPOCH: &str = "its epoch is no number that can be counted up";

/// The fields of the latest term of an election.
pub(crate) type Term = BTreeMap<String, String>;

/// Parses the epoch of an election's term.
pub(crate) fn parse_epoch(text: &str) -> Option<i64> {
    parse_number(text).filter(|epoch| *epoch > 0)
}

/// Parses a token as the store writes it.
pub(crate) fn parse(text: &str) -> Option<u64> {
    parse_number(text).map(unsigned)
}

/// Converts a token. A negative one, which only another program can have set, counts as 0.
pub(crate) fn unsigned(token: i64) -> u64 {
    u64::try_from(token).unwrap_or_default()
}
