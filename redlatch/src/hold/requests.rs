//! The requests to release a lock, as the rules of its steps see them.
//!
//! State: a map from the owner that was asked, or the id of a permit, to the timestamp until which its hold may be renewed, which expires later than that hold.
//! A release removes the owner, if it may acquire the lock again.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{Hold, Renewed};
use crate::error::{Error, Result};
use crate::keyspace::{FoundKey, Keyspace};
use crate::lease::{Expiry, MAX_LEASE, millis};
use crate::name::ObjectKeys;

/// The requests, by owner.
pub(crate) type Requests = BTreeMap<String, i64>;

/// How much longer than a hold its request remains.
const GRACE: Duration = Duration::from_secs(3600);

/// The message to the holder. Redisson's waiters for a lock know 0 and 1, and ignore others.
const ASKED: i64 = 2;

/// The timestamp of a request without a limit.
pub(crate) const NO_LIMIT: i64 = 1_000_000_000_000_000;

/// Returns whether the owner of a hold was asked to release it, for a hold that the store has. A key of another type counts as
/// no request.
pub(crate) fn find(keyspace: &mut Keyspace, hold: &Hold) -> Renewed {
    find_first(keyspace, hold, [&*hold.field])
}

/// The same for a hold that has several names in the requests: the earliest limit counts.
pub(crate) fn find_first<'a>(
    keyspace: &mut Keyspace,
    hold: &Hold,
    owners: impl IntoIterator<Item = &'a str>,
) -> Renewed {
    let now = keyspace.now_ms();
    let found = keyspace.find::<Requests>(&hold.object.requests_key());
    let requests = found.ok().flatten();
    let limit = |requests: FoundKey<'_, Requests>| {
        let limits = owners.into_iter();
        limits
            .filter_map(|owner| requests.value.get(owner))
            .min()
            .copied()
    };
    match requests.and_then(limit) {
        None => Renewed::Held,
        Some(NO_LIMIT..) => Renewed::Asked { limit: None },
        Some(limit) => {
            let left = u64::try_from(limit - now).unwrap_or(0);
            let limit = Some(Duration::from_millis(left));
            Renewed::Asked { limit }
        }
    }
}

/// Records a request, and publishes, as `record.lua` does. `left`: time until the hold ends unless it is renewed. Removes
/// the requests of which `is_current` does not accept the owner.
pub(crate) fn record(
    keyspace: &mut Keyspace,
    object: &ObjectKeys,
    owner: &str,
    left: Duration,
    limit: Option<Duration>,
    mut is_current: impl FnMut(&str) -> bool,
) -> Result<()> {
    let requests = object.requests_key();
    let now = keyspace.now_ms();
    let last = limit.map_or(NO_LIMIT, |limit| now + millis(limit));
    let lifetime = left + limit.unwrap_or_default() + GRACE;
    let requests_left = keyspace.remaining(&requests).and_then(Expiry::duration);
    let mut all = match keyspace.find::<Requests>(&requests)? {
        Some(all) => all.value.clone(),
        None => Requests::new(),
    };
    all.retain(|owner, _| is_current(owner));
    let lifetime = match all.is_empty() {
        true => lifetime,
        false => lifetime.max(requests_left.unwrap_or_default()),
    };
    let request = all.entry(owner.to_owned()).or_insert(last);
    *request = last.min(*request);
    keyspace.set(&requests, all, Some(lifetime));
    keyspace.publish(object.channel(), ASKED);
    Ok(())
}

/// Makes a request for the owner of a hold one for its successor, which has this lease.
pub(crate) fn move_to(keyspace: &mut Keyspace, hold: &Hold, successor: &str, lease: Duration) {
    let key = hold.object.requests_key();
    if let Ok(Some(mut requests)) = keyspace.find::<Requests>(&key)
        && let Some(limit) = requests.value.remove(&*hold.field)
    {
        requests.value.insert(successor.to_owned(), limit);
        requests.extend_to(lease + GRACE);
    }
}

/// Returns an error if a request cannot have this limit.
pub(crate) fn check_limit(limit: Duration) -> Result<()> {
    match limit > MAX_LEASE {
        true => Err(Error::InvalidSetting {
            setting: "limit",
            reason: format!("{limit:?} is out of range; use at most ten years"),
        }),
        false => Ok(()),
    }
}

/// Removes an owner from the requests in this key, if there is one.
pub(crate) fn remove(keyspace: &mut Keyspace, key: Option<&str>, owner: &str) {
    let found = key.map(|key| keyspace.find::<Requests>(key));
    if let Some(Ok(Some(requests))) = found {
        requests.value.remove(owner);
    }
}
