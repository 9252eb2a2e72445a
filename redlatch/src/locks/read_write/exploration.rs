//! Explores all sequences of steps on a read-write lock: readers share it, a writer excludes all other owners.

use super::{Read, Write, sides};
use crate::keyspace::DumpedValue;
use crate::step::exploration::{Locks, Observed, Party, Verdict, ensure, explore, ticks};

const WRITERS: &str = "redlatch_rwlock_writers:{name}";
const TIMEOUT: &str = ":rwlock_timeout:";

fn explore_sides(name: &str, owners: u8, prefers_writers: bool) {
    let (read, write) = sides("", "name");
    let read = Read {
        prefers_writers,
        ..read
    };
    let write = Write {
        blocks_readers_for: prefers_writers.then(|| ticks(2)),
        ..write
    };
    let sides = |owner| {
        let reader = Party::new(owner, read.clone(), false);
        [reader, Party::new(owner, write.clone(), true)]
    };
    let parties = (0..owners).flat_map(sides).collect();
    let locks = Locks::new(parties, prefers_writers, |key| {
        (key == "name" || key == WRITERS || key.contains(TIMEOUT)).then_some(true)
    });
    explore(name, locks.with_check(check));
}

#[test]
fn exploration_of_read_write_lock() {
    explore_sides("read-write lock", 3, false);
}

#[test]
fn exploration_of_read_write_lock_that_prefers_writers() {
    explore_sides("read-write lock that prefers writers", 2, true);
}

/// Checks that each timeout belongs to a hold, and each mark to a waiting writer.
fn check(observed: &Observed<'_>) -> Verdict {
    let Observed { state, waiting, .. } = observed;
    let empty = Default::default();
    let counts = match state.get("name") {
        Some((DumpedValue::Hash(fields), _)) => fields,
        _ => &empty,
    };
    for key in state.keys() {
        let Some((owner, n)) = key.split_once(TIMEOUT) else {
            continue;
        };
        let owner = owner.trim_start_matches("{name}:");
        let count = counts.get(owner).and_then(|count| count.parse().ok());
        let n = n.parse::<u32>().ok();
        ensure(n <= count, || format!("{key} belongs to no hold"))?;
    }
    if let Some((DumpedValue::Timestamps(writers), _)) = state.get(WRITERS) {
        let stray = writers.keys().find(|owner| !waiting.contains(&&***owner));
        ensure(stray.is_none(), || {
            format!("{stray:?} blocks readers and does not wait")
        })?;
    }
    Ok(())
}
