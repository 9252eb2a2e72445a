//! Explores all sequences of steps on a fair lock.

use std::collections::BTreeMap;

use super::Fair;
use crate::keyspace::DumpedValue;
use crate::step::exploration::{
    Granted, Locks, Observed, Party, State, TICK, Verdict, ensure, explore,
};

const QUEUE: &str = "redisson_lock_queue:{name}";
const TIMEOUTS: &str = "redisson_lock_timeout:{name}";
const ABSENT: &str = "redlatch_lock_absent:{name}";
const ANNOUNCED: &str = "redlatch_lock_announced:{name}";

#[test]
fn exploration_of_fair_lock() {
    let kind = Fair {
        wait_time: TICK * 2,
        grace_period: TICK,
        ..Fair::new("", "name")
    };
    let parties = (0..3).map(|owner| Party::new(owner, kind.clone(), true));
    let locks = Locks::new(parties.collect(), true, |key| match key {
        "name" | ABSENT | ANNOUNCED => Some(true),
        QUEUE | TIMEOUTS => Some(false),
        _ => None,
    });
    let locks = locks.with_check(check).with_granted(granted).with_grants();
    explore("fair lock", locks.with_clean_up(is_cleaned_up));
}

fn queue(state: &State) -> &[String] {
    match state.get(QUEUE) {
        Some((DumpedValue::List(owners), _)) => owners,
        _ => &[],
    }
}

/// Returns the timestamps under a key, in milliseconds from now.
fn timestamps<'a>(state: &'a State, key: &str) -> BTreeMap<&'a str, i64> {
    match state.get(key) {
        Some((DumpedValue::Timestamps(timestamps), _)) => timestamps
            .iter()
            .map(|(owner, left)| (&**owner, *left))
            .collect(),
        _ => BTreeMap::new(),
    }
}

/// Returns the waiters whose time has not passed, in order.
fn alive(state: &State) -> Vec<&str> {
    alive_if_connected(state, None)
}

/// The same for a state in which this waiter is connected: that it was absent before does not matter.
fn alive_if_connected<'a>(state: &'a State, connected: Option<&str>) -> Vec<&'a str> {
    let (timeouts, absent) = (timestamps(state, TIMEOUTS), timestamps(state, ABSENT));
    let has_time = |owner: &&str| {
        let left = timeouts.get(owner).copied().unwrap_or(0);
        let absent = absent.get(owner).filter(|_| connected != Some(*owner));
        left.min(absent.copied().unwrap_or(i64::MAX)) > 0
    };
    let owners = queue(state).iter().map(String::as_str);
    owners.filter(has_time).collect()
}

/// Waiters whose time has passed may be dropped by any step. When the key of absent waiters expires
/// depends on the queue, which the first step may have extended.
fn is_cleaned_up(before: &State, after: &State) -> bool {
    let seen = |state: &State| {
        let alive: Vec<String> = alive(state).into_iter().map(str::to_owned).collect();
        let (timeouts, absent) = (timestamps(state, TIMEOUTS), timestamps(state, ABSENT));
        let of_waiter = |owner: &String| {
            let timestamp = |timestamps: &BTreeMap<_, _>| timestamps.get(owner.as_str()).copied();
            (timestamp(&timeouts), timestamp(&absent))
        };
        let timestamps: Vec<_> = alive.iter().map(of_waiter).collect();
        (state.get("name").cloned(), alive, timestamps)
    };
    seen(before) == seen(after)
}

/// Checks that each queue entry belongs to a waiting owner, once, with its timeout.
fn check(observed: &Observed<'_>) -> Verdict {
    let Observed { state, waiting } = observed;
    let mut owners: Vec<_> = queue(state).iter().map(String::as_str).collect();
    let stray = owners.iter().find(|owner| !waiting.contains(owner));
    ensure(stray.is_none(), || {
        format!("{stray:?} is in the queue and does not wait")
    })?;
    owners.sort_unstable();
    let timeouts = timestamps(state, TIMEOUTS);
    ensure(owners.iter().eq(timeouts.keys()), || {
        format!("the queue has {owners:?}, the timeouts have {timeouts:?}")
    })?;
    let mut absent = timestamps(state, ABSENT).into_keys();
    ensure(absent.all(|owner| owners.contains(&owner)), || {
        "an owner is absent and not in the queue".to_owned()
    })?;
    let announced = match state.get(ANNOUNCED) {
        Some((DumpedValue::Hash(announced), _)) => announced.keys().cloned().collect(),
        _ => Vec::new(),
    };
    let mut announced = announced.iter().map(String::as_str);
    ensure(announced.all(|owner| owners.contains(&owner)), || {
        "an owner has announced its lease and is not in the queue".to_owned()
    })
}

/// Checks that waiters whose time has not passed keep their order and are not overtaken. The
/// requesting owner keeps its position in any case.
fn granted(granted: &Granted<'_>) -> Verdict {
    let field = &*granted.party.hold.field;
    let alive = alive_if_connected(granted.before, granted.granted);
    let before = queue(granted.before).iter().map(String::as_str);
    let mut ahead = before.take_while(|owner| *owner != field);
    let overtaken = ahead.find(|owner| alive.contains(owner));
    ensure(!granted.acquired || overtaken.is_none(), || {
        format!("acquired although {overtaken:?} waits")
    })?;
    // The party of the step may have left the queue.
    let next = alive.iter().find(|owner| **owner != field);
    let is_next = |to: &str| alive.first() == Some(&to) || next == Some(&to);
    ensure(granted.granted.is_none_or(is_next), || {
        format!("granted to {:?} of the waiters {alive:?}", granted.granted)
    })?;
    let is_other = |owner: &&str| *owner != field && granted.granted != Some(*owner);
    let mut others = alive.into_iter().filter(is_other);
    let mut after = queue(granted.after).iter();
    let keeps_position = |waiter: &str| after.any(|owner| owner == waiter);
    ensure(others.all(keeps_position), || {
        "a waiter has lost its position in the queue".to_owned()
    })
}
