//! One line of a worker.

use serde::{Deserialize, Serialize};

use super::section::Ask;
use crate::clock::Time;

/// When, in which section (numbered by the worker; 0 for none), and what.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Event(pub Time, pub u64, pub What);

/// What a worker tells.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum What {
    /// All its clients are connected.
    Ready,
    /// The process has not run since then.
    Stood { since: Time },
    /// A lock is asked for.
    Asked(Ask),
    /// It was acquired, with this fencing token and, if its owner may hold it several times, with this hold
    /// count. The count was read before the time of the event was taken.
    Got {
        token: Option<u64>,
        holds: Option<u32>,
    },
    /// It was not had within the time that was allowed for.
    GaveUp,
    /// A latch was counted down, to this.
    Counted { left: u64 },
    /// Asking ended with an error.
    Failed { error: String },
    /// The guard said that it was valid, and would be until then. The time of the event was taken
    /// before the guard was asked. `at_least`: the earliest end that its answer can mean.
    Valid { until: Time, at_least: Time },
    /// `Guard::lost` has completed.
    Told,
    /// The resource took a write with the section's token, or refused it.
    Wrote { accepted: bool },
    /// The lock is about to be given back.
    Leaving,
    /// It was given back, or that failed.
    Freed { error: Option<String> },
    /// What a client still keeps account of although everything was given back.
    Left { client: usize, status: String },
    /// Every section has ended and nothing goes on in the background.
    Done,
}

/// Who may be inside at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Mode {
    /// Nobody else.
    Alone,
    /// Others that share.
    Shared,
    /// As many as there are permits.
    Permit,
    /// As many as there are permits, which have no lease and belong to no owner.
    Semaphore,
    /// A latch is closed with this count, if it is open.
    SetCount(u32),
    /// A latch is counted down by one.
    CountDown,
    /// Waits until a latch is open.
    AwaitZero,
}
