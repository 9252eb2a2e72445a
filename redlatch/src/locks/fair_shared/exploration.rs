//! Explores all sequences of steps on a fair read-write lock: readers share it, a writer excludes all
//! other owners, and no waiter is overtaken.

use super::FairShared;
use super::read_write::sides;
use crate::keyspace::DumpedValue;
use crate::locks::fair::FairTimes;
use crate::locks::fair::exploration::SHARED;
use crate::name::writer_field;
use crate::step::exploration::{Granted, Locks, Party, TICK, Verdict, explore};

const TIMES: FairTimes = FairTimes {
    wait_time: TICK.saturating_mul(2),
    grace_period: TICK,
};

fn explore_parties(name: &str, parties: Vec<Party>) {
    let locks = Locks::new(parties, true, |key| SHARED.expires(key));
    let locks = locks.with_grants().with_granted(granted);
    let locks = locks.with_check(|observed| SHARED.check(observed));
    explore(
        name,
        locks.with_clean_up(|before, after| SHARED.is_cleaned_up(before, after)),
    );
}

/// A writer reads regardless of the queue.
fn granted(granted: &Granted<'_>) -> Verdict {
    let writes = writer_field(&granted.party.hold.field);
    match granted.before.get("name") {
        Some((DumpedValue::Hash(fields), _)) if fields.contains_key(&writes) => Ok(()),
        _ => SHARED.granted(granted),
    }
}

/// The first party accepts no grants. One owner both reads and writes.
#[test]
fn exploration_of_fair_read_write_lock() {
    let (read, write) = sides("", "name");
    let times = TIMES;
    let (read, write) = (FairShared { times, ..read }, FairShared { times, ..write });
    let reader = |owner| Party::new(owner, read.clone(), false);
    let writer = |owner| Party::new(owner, write.clone(), true);
    explore_parties(
        "fair read-write lock",
        vec![reader(0), writer(0), reader(1), writer(2)],
    );
    explore_parties(
        "fair read-write lock with readers",
        vec![writer(0), reader(1), reader(2), reader(3)],
    );
}
