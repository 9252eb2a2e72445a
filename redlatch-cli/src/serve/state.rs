//! What `redlatch serve` has found, as JSON: for its page and for other programs.

use std::collections::BTreeMap;
use std::time::SystemTime;

use serde::Serialize;

use super::leader::Fields;
use super::looks::{Found, Latest};
use crate::jobs::{Job, to_json};
use crate::look::history::Age;
use crate::look::{self, Counts, Lock};
use crate::show::whole_millis;
use crate::why::Deadlock;

/// How many locks are shown, if the request does not say it.
pub(super) const DEFAULT_LIMIT: usize = 100;

/// How many holders and waiters of each lock are shown. Of all there is their number.
const MAX_PARTIES: usize = 5;

/// How many jobs are shown, by name.
const MAX_JOBS: usize = 100;

#[derive(Serialize)]
pub(super) struct State<'a> {
    store: &'a str,
    pattern: &'a str,
    version: &'static str,
    /// Why the latest look failed. The other fields are those of the last one that succeeded.
    failure: Option<&'a str>,
    #[serde(flatten)]
    found: Option<Shown<'a>>,
}

#[derive(Serialize)]
struct Shown<'a> {
    /// When the look began, since the beginning of 1970.
    time_ms: u64,
    /// How long ago that was.
    age_ms: u64,
    took_ms: u64,
    kinds: &'a BTreeMap<String, Counts>,
    /// Number of locks that are held.
    held: usize,
    longest_wait_ms: Option<u64>,
    /// Whether the server refused to show which owners wait.
    waits_refused: bool,
    /// Number of locks that match the filter.
    matching: usize,
    /// The first of them.
    locks: Vec<Row<'a>>,
    deadlocks: &'a [Deadlock],
    elections: Vec<Election<'a>>,
    jobs: Vec<Job<'a>>,
}

#[derive(Serialize)]
struct Row<'a> {
    name: &'a str,
    kind: &'a str,
    token: Option<u64>,
    /// Of an expirable semaphore.
    total_permits: Option<i64>,
    age_ms: Option<u64>,
    /// Whether it may have been held longer.
    age_at_least: bool,
    wait_ms: Option<u64>,
    holder_count: usize,
    holders: Vec<Party<'a>>,
    waiter_count: usize,
    waiters: Vec<Party<'a>>,
}

/// A holder or a waiter.
#[derive(Serialize)]
struct Party<'a> {
    owner: &'a str,
    client: Option<&'a str>,
    age_ms: Option<u64>,
    note: Option<&'a str>,
    /// Of a holder: time until its hold ends unless it is renewed. `None`: it never ends.
    #[serde(skip_serializing_if = "Option::is_none")]
    remaining_ms: Option<Option<u64>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    side: Option<&'static str>,
    /// Of a waiter: its position in the queue of a fair lock.
    #[serde(skip_serializing_if = "Option::is_none")]
    position: Option<usize>,
}

#[derive(Serialize)]
struct Election<'a> {
    name: &'a str,
    #[serde(flatten)]
    leader: Fields<'a>,
    client: Option<&'a str>,
    age_ms: Option<u64>,
    candidates: usize,
}

/// Returns the state, with at most so many locks whose names or holders contain the filter.
pub(super) fn state<'a>(latest: &'a Latest, filter: &str, limit: usize) -> State<'a> {
    State {
        store: &latest.store,
        pattern: &latest.pattern,
        version: env!("CARGO_PKG_VERSION"),
        failure: latest.failure.as_deref(),
        found: latest
            .found
            .as_ref()
            .map(|found| shown(found, filter, limit)),
    }
}

fn shown<'a>(found: &'a Found, filter: &str, limit: usize) -> Shown<'a> {
    let look = &found.look;
    let wanted = filter.to_lowercase();
    let locks = found.order.iter().map(|(i, age)| (&look.locks[*i], *age));
    let mut matching = 0;
    let mut rows = Vec::new();
    for (lock, age) in locks.filter(|(lock, _)| lock.matches(&wanted)) {
        matching += 1;
        if rows.len() < limit {
            rows.push(Row::new(lock, age));
        }
    }
    let since = look.time.duration_since(SystemTime::UNIX_EPOCH);
    let (jobs, now) = (found.jobs.iter().take(MAX_JOBS), SystemTime::now());
    // They are in this order.
    let first = found.order.first();
    let longest_wait = first.and_then(|(i, _)| look.locks[*i].longest_wait());
    Shown {
        time_ms: whole_millis(since.unwrap_or_default()),
        age_ms: whole_millis(look.at.elapsed()),
        took_ms: whole_millis(look.took),
        kinds: &look.kinds,
        held: look.held(),
        longest_wait_ms: longest_wait.map(whole_millis),
        waits_refused: look.waits_refused,
        matching: matching + if filter.is_empty() { look.omitted } else { 0 },
        locks: rows,
        deadlocks: &found.deadlocks,
        elections: elections(found),
        jobs: jobs.map(|job| to_json(job, now)).collect(),
    }
}

fn elections(found: &Found) -> Vec<Election<'_>> {
    let elections = found.look.elections().filter_map(|lock| {
        let leader = found.leaders.get(&lock.name)?;
        let holder = lock.holders.first().map(|holder| &holder.party);
        Some(Election {
            name: &lock.name,
            leader: Fields::new(Some(leader)),
            client: holder.and_then(|party| party.client.as_deref()),
            age_ms: holder.and_then(|party| party.age).map(whole_millis),
            candidates: lock.waiter_count,
        })
    });
    elections.collect()
}

impl<'a> Row<'a> {
    fn new(lock: &'a Lock, age: Option<Age>) -> Row<'a> {
        let holder = |holder: &'a look::Holder| Party {
            remaining_ms: Some(holder.lease.duration().map(whole_millis)),
            side: holder.side,
            ..Party::new(&holder.party)
        };
        let waiter = |waiter: &'a look::Waiter| Party {
            position: waiter.position,
            ..Party::new(&waiter.party)
        };
        Row {
            name: &lock.name,
            kind: &lock.kind,
            token: lock.token,
            total_permits: lock.permits.map(|(_, total)| total),
            age_ms: age.map(|age| whole_millis(age.time)),
            age_at_least: age.is_some_and(|age| !age.is_exact),
            wait_ms: lock.longest_wait().map(whole_millis),
            holder_count: lock.holder_count,
            holders: lock.holders.iter().take(MAX_PARTIES).map(holder).collect(),
            waiter_count: lock.waiter_count,
            waiters: lock.waiters.iter().take(MAX_PARTIES).map(waiter).collect(),
        }
    }
}

impl<'a> Party<'a> {
    fn new(party: &'a look::Party) -> Party<'a> {
        Party {
            owner: &party.owner,
            client: party.client.as_deref(),
            age_ms: party.age.map(whole_millis),
            note: party.note.as_deref(),
            remaining_ms: None,
            side: None,
            position: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use redlatch::Expiry;

    use super::*;
    use crate::look::Look;
    use crate::look::history::History as Changes;

    #[test]
    fn state_is_bounded_and_has_the_numbers_of_the_rest() {
        let party = |owner: String| look::Party {
            owner,
            ..look::Party::default()
        };
        let lock = |i: usize| Lock {
            name: format!("lock {i}"),
            kind: "lock".into(),
            holders: vec![look::Holder {
                party: party(format!("c:{i}")),
                lease: Expiry::Never,
                side: None,
                holds: 1,
            }],
            holder_count: 1,
            waiters: (0..20)
                .map(|waiter| look::Waiter {
                    party: party(format!("w:{waiter}")),
                    position: Some(waiter + 1),
                })
                .collect(),
            waiter_count: 2000,
            ..Lock::default()
        };
        let mut look = Look::new(Instant::now());
        look.locks = (0..1000).map(lock).collect();
        look.omitted = 7;
        let mut latest = Latest::new("store".into(), "*".into());
        let state = |latest: &Latest, filter, limit| {
            serde_json::to_value(super::state(latest, filter, limit)).unwrap()
        };
        let none = state(&latest, "", 10);
        assert!(none["failure"].is_string() && none["time_ms"].is_null());
        latest.found = Some(Found::new(look, &mut Changes::default()).into());
        let all = state(&latest, "", 10);
        assert_eq!(
            (&all["held"], &all["matching"]),
            (&1007.into(), &1007.into())
        );
        assert_eq!(all["locks"].as_array().unwrap().len(), 10);
        let lock = &all["locks"][0];
        assert_eq!(lock["waiters"].as_array().unwrap().len(), MAX_PARTIES);
        assert_eq!(lock["waiters"][1]["position"], 2);
        assert_eq!(lock["waiter_count"], 2000);
        assert!(
            lock["holders"][0]
                .as_object()
                .unwrap()
                .contains_key("remaining_ms")
        );
        let some = state(&latest, "LOCK 99", 10);
        assert_eq!(some["matching"], 11);
        assert_eq!(state(&latest, "c:999", 10)["locks"][0]["name"], "lock 999");
    }
}
