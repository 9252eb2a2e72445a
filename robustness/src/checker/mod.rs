//! Checks the invariants of a history. Pure functions: no clock, no network.
//!
//! 1. Each module checks one group of [`Rule`]s: valid guards (`exclusion`), lost holds (`losses`), tokens and writes
//!    (`fencing`), permits without leases (`semaphores`), latches, idle waiters (`waits`), and the queues of fair
//!    locks (`order`).
//! 2. The checks are cautious. Where the history leaves several explanations, such as a request without an answer,
//!    a check reports a [`Violation`] only if none of them is allowed.
//! 3. [`check`] returns all violations, ordered by time. [`check_promptness`] and [`check_order`] are separate checks,
//!    because they are valid only on a simulated clock.
//! 4. [`explain`] returns which violations are documented limitations, such as a store that lost its data.

mod exclusion;
mod fencing;
#[cfg(test)]
mod fixtures;
mod latches;
mod losses;
mod order;
mod semaphores;
mod waits;

use std::time::Duration;

pub use order::check_order;
pub use semaphores::may_lack_permits;
pub use waits::check_promptness;
pub(crate) use waits::worst_recovery;

use crate::clock::{Time, millis, nanos};
use crate::history::{DataLossWindow, History};
use crate::resource::Tally;

/// How long a fair lock is kept for departed waiters: the default of `FairLock::grace_period`.
pub const FAIR_GRACE_PERIOD: Duration = Duration::from_secs(5);

/// How much longer a request may take just after a fault, in nanoseconds. A client whose connections broke several
/// times in a row pauses for up to 250 ms before it connects, and for as long again before it repeats the request.
const RECONNECT_ALLOWANCE: Time = 500_000_000;

/// How late a report or an action may be on a busy machine. Checks of validity allow no margin.
pub const MARGIN: Duration = Duration::from_millis(1500);

/// An invariant that a history must satisfy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rule {
    /// A lock has at most one valid guard at any instant. A semaphore has one per permit; readers share.
    Exclusion,
    /// No semaphore grants more permits than it has.
    Permits,
    /// No waiter passes a latch before its count is zero.
    Latch,
    /// No other owner acquires the locks of a killed process before their lease has ended, not even in a process with
    /// the same client id.
    TakenFromTheDead,
    /// No lock disappears from the store while its lease runs and its guard is valid.
    TakenFromHolder,
    /// No guard is valid for longer than a lease after the last time at which it could be renewed.
    ValidTooLong,
    /// A running holder learns of the loss when its lease has ended.
    ToldTooLate,
    /// No hold is lost if it could be renewed.
    LostWithoutNeed,
    /// Every acquisition has its own token, greater than all earlier ones.
    Tokens,
    /// A new hold of an owner has a different token than its previous hold.
    SameToken,
    /// No write that the resource accepted is lost.
    LostWrite,
    /// No waiter waits longer than a lease for a free lock.
    Hang,
    /// The same for a fair lock, if the entries of departed waiters in its queue can explain the delay.
    Queue,
    /// A waiter acquires a lock within a few round trips after it has become free.
    Promptness,
    /// Waiters acquire a fair lock in the order in which they joined its queue.
    Order,
    /// Some sequential order of the operations on a lock explains all answers.
    Linearizability,
    /// Nothing remains in the store or in a client after all releases.
    LeftOver,
    /// No client process exits unexpectedly.
    Crash,
}

/// One violation of a rule.
#[derive(Debug, Clone)]
pub struct Violation {
    pub rule: Rule,
    pub from: Time,
    pub until: Time,
    pub text: String,
}

impl Violation {
    /// Creates a violation at a single instant.
    pub fn at(at: Time, rule: Rule, text: impl Into<String>) -> Violation {
        Violation {
            rule,
            from: at,
            until: at,
            text: text.into(),
        }
    }
}

/// Returns whether a key may remain in the store after all releases: fencing tokens and the numbers of free permits.
pub fn may_remain(key: &str) -> bool {
    ["redisson_lock_token:", "permits:", "semaphore:"]
        .iter()
        .any(|prefix| key.starts_with(prefix))
}

/// Which holds may be lost in a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Losses {
    /// None: the fault ends before a lease does.
    None,
    /// Only holds on one server, which is unreachable for longer than a lease.
    Unreachable,
    /// Any: the fault lasts longer than a lease, or removes locks.
    Any,
}

/// Returns all violations, ordered by time.
pub fn check(history: &History, losses: Losses, tallies: &[Tally]) -> Vec<Violation> {
    let mut found = exclusion::check(history);
    found.extend(losses::check(history, losses));
    found.extend(fencing::check(history, tallies));
    found.extend(semaphores::check(history));
    found.extend(latches::check(history));
    found.extend(waits::check(history));
    for text in history.processes.values().flat_map(|one| &one.leftovers) {
        found.push(Violation::at(history.end, Rule::LeftOver, text));
    }
    found.sort_by_key(|violation| violation.from);
    found
}

/// Returns the documented limitation that explains a violation, if there is one.
pub fn explain(violation: &Violation, history: &History) -> Option<&'static str> {
    let a_lease = history.lease + nanos(MARGIN);
    let within = match violation.rule {
        Rule::Exclusion => history.lease / 3 + nanos(MARGIN),
        // A killed process learns of no loss; its hold would have lasted until the end of the lease.
        Rule::LostWithoutNeed | Rule::TakenFromTheDead | Rule::TakenFromHolder => a_lease,
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
        let within = match lost.loss.holds {
            // Another fault right after it may prevent the renewal that would notice the loss.
            true if violation.rule == Rule::Exclusion && is_followed(history, lost) => a_lease,
            true => within,
            false if violation.rule == Rule::SameToken => a_lease,
            false => return false,
        };
        let in_time = lost.from <= violation.from && violation.until <= lost.until + within;
        in_time && (lost.loss.tokens || !lasting)
    });
    lost.next_back().map(|lost| lost.loss.why)
}

/// Returns whether another fault began after this data loss, before all holds were renewed.
fn is_followed(history: &History, lost: &DataLossWindow) -> bool {
    let renewed = lost.until + history.lease / 3;
    let mut windows = history.windows.iter();
    windows
        .any(|window| lost.from < window.from && window.from < renewed && lost.until < window.until)
}

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let took = millis(self.until - self.from);
        write!(f, "{:?} ({took} ms): {}", self.rule, self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::fixtures::{MS, history};
    use super::*;
    use crate::history::{DataLoss, FaultWindow};

    /// The hold of the fixture's lease is lost at 1 s; its holder may rely on it until another renewal fails.
    #[test]
    fn data_loss_explains_two_holders_for_a_lease_only_if_another_fault_follows() {
        let mut one = history(Vec::new());
        one.data_losses.push(DataLossWindow {
            from: 1000 * MS,
            until: 1000 * MS,
            loss: DataLoss::NO_DATA,
        });
        let overlap = |until| Violation {
            until: until * MS,
            ..Violation::at(1500 * MS, Rule::Exclusion, String::new())
        };
        let lease = one.lease / MS;
        let explains = |one: &History, until| explain(&overlap(until), one).is_some();
        let (soon, late) = (1000 + lease / 3, 1000 + lease);
        assert!(explains(&one, soon) && !explains(&one, late));
        let (from, until, is_outage) = (1200 * MS, 9000 * MS, false);
        one.windows.push(FaultWindow {
            from,
            until,
            is_outage,
        });
        assert!(explains(&one, late));
    }
}
