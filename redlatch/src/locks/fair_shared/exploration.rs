//! Explores all sequences of steps on a fair read-write lock (readers share it, a writer excludes all
//! other owners) and on a fair semaphore (permits are conserved). No waiter is overtaken.

use super::FairShared;
use super::read_write::sides;
use super::semaphore::permits;
use crate::keyspace::DumpedValue;
use crate::locks::fair::FairTimes;
use crate::locks::fair::exploration::SHARED;
use crate::name::{GROUP_END, permits_field, permits_of, writer_field};
use crate::step::exploration::{Granted, Locks, Observed, Party, TICK, Verdict, ensure, explore};

const TIMES: FairTimes = FairTimes {
    wait_time: TICK.saturating_mul(2),
    grace_period: TICK,
};

fn explore_parties(name: &str, parties: Vec<Party>, check: fn(&Observed<'_>) -> Verdict) {
    let locks = Locks::new(parties, true, |key| SHARED.expires(key));
    let locks = locks.with_grants().with_granted(granted);
    let locks = locks.with_check(check);
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
        |observed| SHARED.check(observed),
    );
    explore_parties(
        "fair read-write lock with readers",
        vec![writer(0), reader(1), reader(2), reader(3)],
        |observed| SHARED.check(observed),
    );
}

/// Of two permits, one request wants both. So no two parties exclude each other but those with that one.
#[test]
fn exploration_of_fair_semaphore() {
    let party = |owner, n| {
        let times = TIMES;
        let kind = FairShared {
            times,
            ..permits("", "name", n, 2)
        };
        Party::with_field(
            owner,
            kind,
            n == 2,
            permits_field(&format!("client:{owner}"), n),
        )
    };
    explore_parties(
        "fair semaphore",
        vec![party(0, 1), party(1, 2), party(2, 1), party(3, 1)],
        |observed| {
            SHARED
                .check(observed)
                .and_then(|()| permits_are_conserved(observed))
        },
    );
}

/// Checks that no more permits are held than there are.
fn permits_are_conserved(observed: &Observed<'_>) -> Verdict {
    let Some((DumpedValue::Hash(fields), _)) = observed.state.get("name") else {
        return Ok(());
    };
    // Each hold that lasts has such a field. Those that have ended are removed by the next step that counts.
    let lasting = fields.iter().filter_map(|(field, end)| {
        let lasts = end.parse::<i64>().ok()? > observed.now;
        field.strip_suffix(GROUP_END).filter(|_| lasts)
    });
    let held: u32 = lasting.map(permits_of).sum();
    ensure(held <= 2, || {
        format!("{held} of 2 permits are held: {fields:?}")
    })
}
