//! Explores all sequences of steps on a fair lock.

use std::collections::BTreeMap;

use super::Fair;
use crate::keyspace::DumpedValue;
use crate::step::exploration::{
    Granted, Locks, Observed, Party, State, TICK, Verdict, ensure, explore,
};

/// The keys of a queue.
pub(crate) struct QueueKeys {
    queue: &'static str,
    timeouts: &'static str,
    absent: &'static str,
    announced: &'static str,
}

const FAIR: QueueKeys = QueueKeys {
    queue: "redisson_lock_queue:{name}",
    timeouts: "redisson_lock_timeout:{name}",
    absent: "redlatch_lock_absent:{name}",
    announced: "redlatch_lock_announced:{name}",
};

/// Those of an object that several owners may hold.
pub(crate) const SHARED: QueueKeys = QueueKeys {
    queue: "redlatch_fair_queue:{name}",
    timeouts: "redlatch_fair_timeout:{name}",
    absent: "redlatch_fair_absent:{name}",
    announced: "redlatch_fair_announced:{name}",
};

#[test]
fn exploration_of_fair_lock() {
    let kind = Fair::new("", "name").with_times(TICK * 2, TICK);
    let parties = (0..3).map(|owner| Party::new(owner, kind.clone(), true));
    let locks = Locks::new(parties.collect(), true, |key| FAIR.expires(key));
    let locks = locks
        .with_check(|observed| FAIR.check(observed))
        .with_granted(|granted| FAIR.granted(granted))
        .with_grants();
    explore(
        "fair lock",
        locks.with_clean_up(|before, after| FAIR.is_cleaned_up(before, after)),
    );
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

impl QueueKeys {
    /// Returns whether a key of the object must expire; `None`: it must not exist.
    pub(crate) fn expires(&self, key: &str) -> Option<bool> {
        match key {
            "name" => Some(true),
            _ if key == self.absent || key == self.announced => Some(true),
            _ if key == self.queue || key == self.timeouts => Some(false),
            _ => None,
        }
    }

    fn owners<'a>(&self, state: &'a State) -> &'a [String] {
        match state.get(self.queue) {
            Some((DumpedValue::List(owners), _)) => owners,
            _ => &[],
        }
    }

    /// Returns the waiters whose time has not passed, in order.
    fn alive<'a>(&self, state: &'a State) -> Vec<&'a str> {
        self.alive_if_connected(state, &[])
    }

    /// The same for a state in which these waiters are connected: that they were absent before does not matter.
    fn alive_if_connected<'a>(&self, state: &'a State, connected: &[&str]) -> Vec<&'a str> {
        let (timeouts, absent) = (
            timestamps(state, self.timeouts),
            timestamps(state, self.absent),
        );
        let has_time = |owner: &&str| {
            let left = timeouts.get(owner).copied().unwrap_or(0);
            let absent = absent.get(owner).filter(|_| !connected.contains(owner));
            left.min(absent.copied().unwrap_or(i64::MAX)) > 0
        };
        let owners = self.owners(state).iter().map(String::as_str);
        owners.filter(has_time).collect()
    }

    /// Waiters whose time has passed may be dropped by any step. When the key of absent waiters expires
    /// depends on the queue, which the first step may have extended.
    pub(crate) fn is_cleaned_up(&self, before: &State, after: &State) -> bool {
        let seen = |state: &State| {
            let alive: Vec<String> = self.alive(state).into_iter().map(str::to_owned).collect();
            let (timeouts, absent) = (
                timestamps(state, self.timeouts),
                timestamps(state, self.absent),
            );
            let of_waiter = |owner: &String| {
                let timestamp =
                    |timestamps: &BTreeMap<_, _>| timestamps.get(owner.as_str()).copied();
                (timestamp(&timeouts), timestamp(&absent))
            };
            let timestamps: Vec<_> = alive.iter().map(of_waiter).collect();
            (state.get("name").cloned(), alive, timestamps)
        };
        seen(before) == seen(after)
    }

    /// Checks that each queue entry belongs to a waiting owner, once, with its timeout.
    pub(crate) fn check(&self, observed: &Observed<'_>) -> Verdict {
        let Observed { state, waiting, .. } = observed;
        let mut owners: Vec<_> = self.owners(state).iter().map(String::as_str).collect();
        let stray = owners.iter().find(|owner| !waiting.contains(owner));
        ensure(stray.is_none(), || {
            format!("{stray:?} is in the queue and does not wait")
        })?;
        owners.sort_unstable();
        let timeouts = timestamps(state, self.timeouts);
        ensure(owners.iter().eq(timeouts.keys()), || {
            format!("the queue has {owners:?}, the timeouts have {timeouts:?}")
        })?;
        let mut absent = timestamps(state, self.absent).into_keys();
        ensure(absent.all(|owner| owners.contains(&owner)), || {
            "an owner is absent and not in the queue".to_owned()
        })?;
        let announced = match state.get(self.announced) {
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
    pub(crate) fn granted(&self, granted: &Granted<'_>) -> Verdict {
        let field = &*granted.party.hold.field;
        let alive = self.alive_if_connected(granted.before, granted.granted);
        let before = self.owners(granted.before).iter().map(String::as_str);
        let mut ahead = before.take_while(|owner| *owner != field);
        let overtaken = ahead.find(|owner| alive.contains(owner));
        ensure(!granted.acquired || overtaken.is_none(), || {
            format!("acquired although {overtaken:?} waits")
        })?;
        // In order. The party of the step may have left the queue.
        let others: Vec<&str> = alive
            .iter()
            .copied()
            .filter(|owner| *owner != field)
            .collect();
        let is_next = alive.starts_with(granted.granted) || others.starts_with(granted.granted);
        ensure(is_next, || {
            format!("granted to {:?} of the waiters {alive:?}", granted.granted)
        })?;
        let is_other = |owner: &&str| *owner != field && !granted.granted.contains(owner);
        let mut others = alive.into_iter().filter(is_other);
        let mut after = self.owners(granted.after).iter();
        let keeps_position = |waiter: &str| after.any(|owner| owner == waiter);
        ensure(others.all(keeps_position), || {
            "a waiter has lost its position in the queue".to_owned()
        })
    }
}
