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
        Rule::Exclusion => history.lease / 3 + history.margin,
        // A killed process learns of no loss; its hold would have lasted until the end of the lease.
        Rule::AvoidableLoss | Rule::AcquiredBeforeExpiry | Rule::LostBeforeExpiry => a_lease,
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
    let is_of_hold = matches!(violation.rule, Rule::Exclusion | Rule::LostBeforeExpiry);
    let lasting = within > a_lease;
    let mut lost = history.data_losses.iter().filter(|lost| {
        let within = match lost.loss.holds {
            // Another fault right after it may prevent the renewal that would notice the loss.
            true if is_of_hold && is_followed(history, lost) => a_lease,
            true if is_of_hold && lost.loss.shows => noticed_after(history, lost) + history.margin,
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

/// Returns how long after this data loss the clients had connected again: at most their longest pause, if only a pause
/// delayed them.
fn noticed_after(history: &History, lost: &DataLossWindow) -> Time {
    if history.connected.is_empty() {
        return CONNECT_PAUSE;
    }
    let after = history.connected.iter().map(|at| at - lost.until);
    let in_pause = after.filter(|after| (0..=CONNECT_PAUSE).contains(after));
    in_pause.max().unwrap_or_default()
}

/// Returns whether another fault began after this data loss, before all holds were renewed.
fn is_followed(history: &History, lost: &DataLossWindow) -> bool {
    let renewed = lost.until + history.lease / 3;
    let mut windows = history.windows.iter();
    windows
        .any(|window| lost.from < window.from && window.from < renewed && lost.until < window.until)
}

#[cfg(test)]
mod tests {
    use super::fixtures::{MS, history};
    use super::*;
    use crate::history::{DataLoss, FaultWindow};

    /// The hold of the fixture's lease is lost at 1 s. Its holder may rely on it until it finds another server process, or
    /// until its next renewal, or until another renewal fails.
    #[test]
    fn data_loss_explains_two_holders_for_a_lease_only_if_another_fault_follows() {
        two_holders(DataLoss::KEYS_DELETED, &[], 1000);
        for (connected, noticed_after) in
            [(&[][..], 250), (&[999], 0), (&[10, 1120, 1130, 1251], 130)]
        {
            two_holders(DataLoss::NO_DATA, connected, noticed_after);
        }
    }

    fn two_holders(loss: DataLoss, connected: &[Time], noticed_after: Time) {
        let mut one = history(Vec::new());
        one.connected = connected.iter().map(|at| at * MS).collect();
        one.data_losses.push(DataLossWindow {
            from: 1000 * MS,
            until: 1000 * MS,
            loss,
        });
        let overlap = |until| Violation {
            until: until * MS,
            ..Violation::at(1500 * MS, Rule::Exclusion, String::new())
        };
        let lease = one.lease / MS;
        let explains = |one: &History, until| explain(&overlap(until), one).is_some();
        let margin = one.margin / MS;
        let (soon, late) = (1000 + noticed_after + margin, 1000 + lease + margin);
        assert!(explains(&one, soon) && !explains(&one, soon + 1));
        let (from, until, is_outage) = (1200 * MS, 9000 * MS, false);
        one.windows.push(FaultWindow {
            from,
            until,
            is_outage,
        });
        assert!(explains(&one, late) && !explains(&one, late + 1));
    }

    /// The last renewal of a killed process did not reach the promoted replica. A running holder renews again.
    #[test]
    fn lost_renewal_explains_only_a_hold_taken_from_a_dead_process() {
        let mut one = history(Vec::new());
        one.data_losses.push(DataLossWindow {
            from: 1000 * MS,
            until: 1500 * MS,
            loss: DataLoss::UNCONFIRMED_WRITES,
        });
        let explains = |rule| {
            let violation = Violation::at(2000 * MS, rule, String::new());
            explain(&violation, &one).is_some()
        };
        assert!(explains(Rule::AcquiredBeforeExpiry));
        assert!(!explains(Rule::Exclusion) && !explains(Rule::LostBeforeExpiry));
    }
}
