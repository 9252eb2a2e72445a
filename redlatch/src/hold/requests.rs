//! The requests to release a lock, as the rules of its steps see them.
//!
//! State: a map from the owner that was asked to the timestamp until which its hold may be renewed, which expires later than that hold.
//! A release removes the owner, if it may acquire the lock again.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{Hold, Renewed};
use crate::keyspace::Keyspace;

/// The requests, by owner.
pub(crate) type Requests = BTreeMap<String, i64>;

/// The timestamp of a request without a limit.
pub(crate) const NO_LIMIT: i64 = 1_000_000_000_000_000;

/// Returns whether the owner of a hold was asked to release it, for a hold that the store has. A key of another type counts as
/// no request.
pub(crate) fn find(keyspace: &mut Keyspace, hold: &Hold) -> Renewed {
    let now = keyspace.now_ms();
    let found = keyspace.find::<Requests>(&hold.object.requests_key());
    let requests = found.ok().flatten();
    match requests.and_then(|requests| requests.value.get(&*hold.field).copied()) {
        None => Renewed::Held,
        Some(NO_LIMIT..) => Renewed::Asked { limit: None },
        Some(limit) => {
            let left = u64::try_from(limit - now).unwrap_or(0);
            let limit = Some(Duration::from_millis(left));
            Renewed::Asked { limit }
        }
    }
}

/// Removes an owner from the requests in this key, if there is one.
pub(crate) fn remove(keyspace: &mut Keyspace, key: Option<&str>, owner: &str) {
    let found = key.map(|key| keyspace.find::<Requests>(key));
    if let Some(Ok(Some(requests))) = found {
        requests.value.remove(owner);
    }
}
