//! The rules of a history, and violations of them.

use crate::clock::{Time, millis};

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
    AcquiredBeforeExpiry,
    /// No lock disappears from the store while its lease runs and its guard is valid.
    LostBeforeExpiry,
    /// No guard is valid for longer than a lease after the last time at which it could be renewed.
    ValidTooLong,
    /// A running holder learns of the loss when its lease has ended.
    LossReportedLate,
    /// No hold is lost if it could be renewed.
    AvoidableLoss,
    /// Every acquisition has its own token, greater than all earlier ones.
    Tokens,
    /// The same for tokens that follow the clock, whatever the store has lost, unless the clock was set back further than
    /// the time between the acquisitions.
    ClockTokens,
    /// A new hold of an owner has a different token than its previous hold.
    SameToken,
    /// No write that the resource accepted is lost.
    LostWrite,
    /// Each slot of a job is run once, and more often only if the run before is dead and its job allows it.
    SlotRepeated,
    /// A slot of a job is run, and repeated if the job says so, if a process can do that.
    SlotSkipped,
    /// No request uses a ticket that was used up, or that was asked for.
    Ticket,
    /// No waiter waits longer than a lease for a free lock.
    Hang,
    /// The same for a fair lock, if the entries of departed waiters in its queue can explain the delay.
    Queue,
    /// A waiter acquires a lock within a few round trips after it has become free.
    Promptness,
    /// Waiters acquire a fair lock in the order in which they joined its queue.
    Order,
    /// The last report of an observer is the final state of its election.
    Observer,
    /// After all faults, clients use all optional mechanisms again: see `mechanisms`.
    Mechanism,
    /// Some sequential order of the operations on a lock explains all answers.
    Linearizability,
    /// Nothing remains in the store or in a client after all releases.
    NotCleanedUp,
    /// Clients repeat nothing without a pause: connections and refused commands per second are limited.
    Load,
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
    /// When the guard was acquired that has a fixed lease, if one explains it: no renewal finds that its hold was lost.
    pub fixed_since: Option<Time>,
}

impl Violation {
    /// Creates a violation at a single instant.
    pub fn at(at: Time, rule: Rule, text: impl Into<String>) -> Violation {
        Violation {
            rule,
            from: at,
            until: at,
            text: text.into(),
            fixed_since: None,
        }
    }

    /// The same until a later instant.
    pub(super) fn until(self, until: Time) -> Violation {
        Violation { until, ..self }
    }
}

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let took = millis(self.until - self.from);
        write!(f, "{:?} ({took} ms): {}", self.rule, self.text)
    }
}
