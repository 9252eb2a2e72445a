//! What must hold of a history. Pure functions: no clock, no network.

mod exclusion;
mod fencing;
mod latches;
mod losses;
#[cfg(test)]
mod made;
mod order;
mod semaphores;
mod waits;

use std::time::Duration;

pub use order::overtaken;
pub use semaphores::may_lack_permits;
pub use waits::left_waiting;
pub(crate) use waits::worst_recovery;

use crate::clock::{Time, millis, nanos};
use crate::history::History;
use crate::resource::Tally;

/// How long a fair lock is kept for waiters that are gone: `FairLock::grace_period`, as it is by default.
pub const GRACE: Duration = Duration::from_secs(5);

/// How much longer a request may take just after a fault: a client whose connections broke several times in a row pauses
/// for up to 250 ms before it connects, and as long again before it repeats the request. In nanoseconds.
const RECONNECTS: Time = 500_000_000;

/// How much later than it should something may be told or done, on a machine that is short of time.
/// What is said about validity has no such margin.
pub const MARGIN: Duration = Duration::from_millis(1500);

/// What was broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rule {
    /// At most one valid guard per lock at any instant (as many as there are permits; readers may
    /// be many).
    Exclusion,
    /// Never more permits of a semaphore are taken than there are.
    Permits,
    /// No waiter passes a latch before its count is zero.
    Latch,
    /// What a process held when it was killed is acquired by no other owner before its lease has ended,
    /// not even by a process that has the client id of the dead one.
    TakenFromTheDead,
    /// A lock is not deleted while its lease runs and a guard of it is valid.
    TakenFromHolder,
    /// No guard is valid for longer than a lease after the last time at which it could be renewed.
    ValidTooLong,
    /// Who holds a lock and runs is told of the loss when the lease has ended.
    ToldTooLate,
    /// What could be renewed is not lost.
    LostWithoutNeed,
    /// Every acquisition has a token of its own, greater than those before it.
    Tokens,
    /// A new hold of an owner has another token than the hold that it had before.
    SameToken,
    /// No write that the resource took is lost.
    LostWrite,
    /// Nobody waits for a lock that is free for longer than a lease.
    Hang,
    /// The same for a fair lock, which is kept for those in its queue for whom nobody waits any more.
    Queue,
    /// A waiter acquires a lock within a few round trips after it has become free.
    Promptness,
    /// Waiters acquire a fair lock in the order in which they joined its queue.
    Order,
    /// Every answer is one that a lock could give whose operations happen one after the other.
    Linearizability,
    /// Nothing is left when everything was given back.
    LeftOver,
    /// No client ends by itself.
    Crash,
}

/// One case of it.
#[derive(Debug, Clone)]
pub struct Violation {
    pub rule: Rule,
    pub from: Time,
    pub until: Time,
    pub text: String,
}

impl Violation {
    /// A violation that was found at one time.
    pub fn at(at: Time, rule: Rule, text: impl Into<String>) -> Violation {
        Violation {
            rule,
            from: at,
            until: at,
            text: text.into(),
        }
    }
}

/// Whether a key may remain in the store after all releases: fencing tokens and the numbers of free permits.
pub fn may_remain(key: &str) -> bool {
    ["redisson_lock_token:", "permits:", "semaphore:"]
        .iter()
        .any(|prefix| key.starts_with(prefix))
}

/// What a fault may do to those who hold a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Losses {
    /// It is over before a lease is: nobody loses anything.
    None,
    /// One server cannot be reached for longer: what the others keep is not lost.
    OutOfReach,
    /// It lasts longer, or takes locks away.
    Some,
}

/// All violations, the first one first.
pub fn check(history: &History, losses: Losses, tallies: &[Tally]) -> Vec<Violation> {
    let mut found = exclusion::check(history);
    found.extend(losses::check(history, losses));
    found.extend(fencing::check(history, tallies));
    found.extend(semaphores::check(history));
    found.extend(latches::check(history));
    found.extend(waits::check(history));
    for text in history.processes.values().flat_map(|one| &one.left) {
        found.push(Violation::at(history.end, Rule::LeftOver, text));
    }
    found.sort_by_key(|violation| violation.from);
    found
}

/// Why a violation could not be avoided, if that is so: in the words of the promise that is not made.
pub fn explain(violation: &Violation, history: &History) -> Option<&'static str> {
    let a_lease = history.lease + nanos(MARGIN);
    let within = match violation.rule {
        Rule::Exclusion => history.lease / 3 + nanos(MARGIN),
        // The dead learn of nothing: theirs would have ended with the lease.
        Rule::LostWithoutNeed | Rule::TakenFromTheDead | Rule::TakenFromHolder => a_lease,
        // What was written once is never put right again.
        Rule::Tokens | Rule::SameToken | Rule::LostWrite | Rule::Permits => Time::MAX / 4,
        Rule::Queue => {
            return Some(
                "a fair lock is kept for whoever stands in its queue, one wait time (here: a lease) \
                 each, also for those who have died, stand still, or could not leave it while the \
                 store was away; and 5 s for those who are remembered by a replica that was behind",
            );
        }
        _ => return None,
    };
    let lasting = within > a_lease;
    let mut lost = history.data_lost.iter().filter(|lost| {
        let within = match lost.forgetting.holds {
            true => within,
            false if violation.rule == Rule::SameToken => a_lease,
            false => return false,
        };
        let in_time = lost.from <= violation.from && violation.until <= lost.until + within;
        in_time && (lost.forgetting.tokens || !lasting)
    });
    lost.next_back().map(|lost| lost.forgetting.why)
}

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let took = millis(self.until - self.from);
        write!(f, "{:?} ({took} ms): {}", self.rule, self.text)
    }
}
