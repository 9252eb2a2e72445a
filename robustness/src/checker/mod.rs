//! Checks the invariants of a history. Pure functions: no clock, no network.
//!
//! 1. Each module checks one group of [`Rule`]s: valid guards (`exclusion`), lost holds (`losses`),
//!    tokens and writes (`fencing`), permits without leases (`semaphores`), latches, tickets, jobs,
//!    idle waiters (`waits`), and the queues of fair locks (`order`).
//! 2. The checks are cautious. Where the history leaves several explanations, such as a request without an answer,
//!    a check reports a [`Violation`] only if none of them is allowed.
//! 3. [`check`] returns all violations, ordered by time. [`check_slots`], [`check_promptness`] and [`check_order`] are
//!    separate checks: the limit of the first depends on the clock, the others are valid only on a simulated one.
//! 4. [`explain`] returns which violations are documented limitations, such as a store that lost its data.

mod allowances;
mod exclusion;
mod fencing;
#[cfg(test)]
mod fixtures;
mod jobs;
mod latches;
mod losses;
mod order;
mod semaphores;
mod tickets;
mod violation;
mod waits;

use allowances::CONNECT_PAUSE;
pub use allowances::{FAIR_GRACE_PERIOD, MARGIN};
pub use jobs::check_slots;
pub use losses::Losses;
pub use order::check_order;
pub use semaphores::may_lack_permits;
pub use violation::{Rule, Violation};
pub use waits::check_promptness;
pub(crate) use waits::worst_recovery;

use crate::clock::Time;
use crate::history::{DataLossWindow, History};
use crate::resource::Tally;

/// Returns whether a key may remain in the store after all releases: fencing tokens, the latest terms of elections,
/// requests to release, the records of jobs, and the numbers of free permits.
pub fn may_remain(key: &str) -> bool {
    [
        "redisson_lock_token:",
        "redlatch_election:",
        "redlatch_lock_asked:",
        "redlatch_job:",
        "permits:",
        "semaphore:",
    ]
    .iter()
    .any(|prefix| key.starts_with(prefix))
}

/// Returns all violations, ordered by time.
pub fn check(history: &History, losses: Losses, tallies: &[Tally]) -> Vec<Violation> {
    let mut found = exclusion::check(history);
    found.extend(losses::check(history, losses));
    found.extend(fencing::check(history, tallies));
    found.extend(semaphores::check(history));
    found.extend(latches::check(history));
    found.extend(waits::check(history));
    found.extend(tickets::check(history));
    found.extend(jobs::check(history));
    for text in history.processes.values().flat_map(|one| &one.leftovers) {
        found.push(Violation::at(history.end, Rule::NotCleanedUp, text));
    }
    found.sort_by_key(|violation| violation.from);
    found
}

/// Returns the documented limitation that explains a violation, if there is one.
pub fn explain(violation: &Violation, history: &History) -> Option<&'static str> {
    let a_lease = history.lease + history.margin;
    if violation.rule == Rule::SlotRepeated {
        // The record of the earlier run, or its end.
        let mut losses = history.data_losses.iter();
        let lost = losses.find(|lost| {
            lost.from <= violation.until && violation.from <= lost.until + history.margin
        });
        return lost.map(|lost| lost.loss.why);
    }
    let within = match violation.rule {
        // A killed process learns of no loss; its hold would have lasted until the end of the lease. For living holders, see `noticed`.
        Rule::Exclusion
        | Rule::AvoidableLoss
        | Rule::AcquiredBeforeExpiry
        | Rule::LostBeforeExpiry => a_lease,
        // A wrong token or value stays wrong for the rest of the run.
        Rule::Tokens | Rule::SameToken | Rule::LostWrite | Rule::Permits => Time::MAX / 4,
        Rule::Queue => {
            return Some(
                "a fair lock is reserved for each waiter in its queue for one wait time (here: a \
                 lease), even if the waiter died, is stopped, or could not leave the queue while \
                 the store was unreachable; and for 5 s for waiters that only a lagging replica \
                 still has in the queue",
            );
        }
        _ => return None,
    };
    let lasting = within > a_lease;
    let mut lost = history.data_losses.iter().filter(|lost| {
        let learns_by_itself = match violation.rule {
            // A permit that was taken out of its guard is only asked for at its release.
            _ if violation.text.starts_with("permits:") => false,
            Rule::Exclusion => true,
            Rule::LostBeforeExpiry => lost.loss.shows,
            _ => false,
        };
        let within = match lost.loss.holds {
            true if learns_by_itself => {
                noticed(history, lost, violation) + history.margin - lost.until
            }
            true => within,
            // A release or a renewal was lost.
            false if matches!(violation.rule, Rule::SameToken | Rule::AcquiredBeforeExpiry) => {
                a_lease
            }
            false => return false,
        };
        let in_time = lost.from <= violation.from && violation.until <= lost.until + within;
        in_time && (lost.loss.tokens || !lasting)
    });
    lost.next_back().map(|lost| lost.loss.why)
}

/// Returns when all holders know of this data loss at the latest: they learn of it when they connect again, at their next
/// renewal, or when their fixed lease ends. Another fault before that may delay them until it ends, but not beyond the lease.
fn noticed(history: &History, lost: &DataLossWindow, violation: &Violation) -> Time {
    let lease_end = lost.until + history.lease;
    let was_held = |since| since <= lost.until + history.margin;
    let noticed_if = |settled| match lost.loss.shows {
        true => connected_by(history, settled),
        false if violation.fixed_since.is_some_and(was_held) => lease_end,
        false => settled + history.lease / 3,
    };
    let mut windows: Vec<_> = history.windows.iter().collect();
    windows.sort_by_key(|window| window.from);
    let settled = windows.iter().fold(lost.until, |settled, window| {
        let is_later = lost.from < window.from;
        match is_later && window.from < noticed_if(settled) + history.margin {
            true => settled.max(window.until),
            false => settled,
        }
    });
    noticed_if(settled).min(lease_end)
}

/// Returns when the clients have connected again after a fault that ended at this time: at most their longest pause later, as
/// far as a checker has to excuse. The first packets of a connection take some time, too.
fn connected_by(history: &History, fault_end: Time) -> Time {
    let pause_end = fault_end + CONNECT_PAUSE;
    if history.connected.is_empty() {
        return pause_end;
    }
    let connected = history.connected.iter().copied();
    let soon = connected.filter(|at| (fault_end..=pause_end + history.margin).contains(at));
    soon.max().unwrap_or(fault_end).min(pause_end)
}

#[cfg(test)]
mod tests {
    use super::fixtures::{MS, history};
    use super::*;
    use crate::history::{DataLoss, FaultWindow};

    /// The hold of the fixture's lease is lost at 1 s. Its holder may rely on it until it finds another server process, or
    /// until its next renewal, and if another fault prevents both, until that has ended, but never beyond its lease.
    #[test]
    fn data_loss_explains_two_holders_until_they_notice() {
        let (gone, deleted) = (DataLoss::NO_DATA, DataLoss::KEYS_DELETED);
        // When they notice, without a fault from 1.2 to 1.3 s, and with it.
        for (loss, connected, alone, followed) in [
            (deleted, &[][..], 2000, 2300),
            (gone, &[], 1250, 1550),
            (gone, &[999, 3051], 1000, 1300),
            (gone, &[10, 1120, 1130, 3051], 1130, 1300),
            (gone, &[2750, 3050], 1250, 1550),
        ] {
            for (fault_end, noticed) in [(None, alone), (Some(1300), followed), (Some(9000), 4000)]
            {
                let mut one = history(Vec::new());
                one.connected = connected.iter().map(|at| at * MS).collect();
                let (from, until) = (1000 * MS, 1000 * MS);
                one.record_data_loss(from, until, loss);
                one.windows.extend(fault_end.map(|end| FaultWindow {
                    from: 1200 * MS,
                    until: end * MS,
                    is_outage: false,
                }));
                let explains = |until| {
                    let overlap = Violation::at(1500 * MS, Rule::Exclusion, "lock:0");
                    explain(&Violation { until, ..overlap }, &one).is_some()
                };
                let latest = noticed * MS + one.margin;
                let is_right = explains(latest) && !explains(latest + 1);
                assert!(is_right, "{connected:?}, {fault_end:?}: {noticed} ms");
            }
        }
    }

    /// No renewal finds that a hold with a fixed lease is lost: its holder may rely on it until the lease ends.
    #[test]
    fn holder_with_a_fixed_lease_notices_at_its_end() {
        let mut one = history(Vec::new());
        one.record_data_loss(1000 * MS, 1000 * MS, DataLoss::KEYS_DELETED);
        let explains = |fixed_since: Option<Time>, until| {
            let overlap = Violation::at(1500 * MS, Rule::Exclusion, "lock:0").until(until);
            let violation = Violation {
                fixed_since: fixed_since.map(|at| at * MS),
                ..overlap
            };
            explain(&violation, &one).is_some()
        };
        let too_late = 1001 + one.margin / MS;
        for (fixed_since, noticed) in [(None, 2000), (Some(900), 4000), (Some(too_late), 2000)] {
            let latest = noticed * MS + one.margin;
            assert!(explains(fixed_since, latest));
            assert!(!explains(fixed_since, latest + 1));
        }
    }

    /// The last renewal of a killed process did not reach the promoted replica. A running holder renews again.
    #[test]
    fn lost_renewal_explains_only_a_hold_taken_from_a_dead_process() {
        let mut one = history(Vec::new());
        one.record_data_loss(1000 * MS, 1500 * MS, DataLoss::UNCONFIRMED_WRITES);
        let explains = |rule| {
            let violation = Violation::at(2000 * MS, rule, String::new());
            explain(&violation, &one).is_some()
        };
        assert!(explains(Rule::AcquiredBeforeExpiry));
        assert!(!explains(Rule::Exclusion) && !explains(Rule::LostBeforeExpiry));
    }
}
