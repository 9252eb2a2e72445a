//! An event: one line of a worker's output.

use serde::{Deserialize, Serialize};

use crate::clock::Time;

/// Time, section (numbered by the worker; 0 for none), and content.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Event(pub Time, pub u64, pub EventKind);

/// Content of an event.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum EventKind {
    /// All clients of the worker are connected.
    Ready,
    /// The process has not run since then, until the time of the event.
    Stalled { since: Time },
    /// A lock is requested.
    Requested(Request),
    /// The lock was acquired, with this fencing token and, if its owner may hold it several times, with this
    /// hold count. The count was read before the time of the event was taken.
    Acquired {
        token: Option<u64>,
        holds: Option<u32>,
    },
    /// The lock was not acquired within the wait limit.
    NotAcquired,
    /// A latch was counted down to this count.
    CountedDown { left: u64 },
    /// The request failed.
    Failed { error: String },
    /// The guard reported that it is valid until `until`. The time of the event was taken before the query.
    /// `at_least`: the earliest end that its answer can mean.
    Valid { until: Time, at_least: Time },
    /// `Guard::lost` has completed.
    LossReported,
    /// The resource accepted a write with the section's token, or refused it.
    Wrote { accepted: bool },
    /// The holder is about to feed the hold.
    Fed,
    /// The lock is about to be released.
    Releasing,
    /// The hold is about to become a ticket with this lease in nanoseconds.
    MakingTicket { lease: Time },
    /// The hold became the ticket with this text.
    BecameTicket { text: String },
    /// The lock was released, or the release failed.
    Released { error: Option<String> },
    /// The guard was dropped: the lock is released in the background.
    Dropped,
    /// State that a client still tracks although everything was released.
    Leftover { client: usize, status: String },
    /// The process begins runs of a job from now on. Its clock shows this time since 1970, in nanoseconds.
    Scheduled { job: String, date: Time },
    /// It begins no further runs of the job.
    Unscheduled { job: String },
    /// Every section has ended and no background work is left.
    Done,
}

/// The request of a section.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Request {
    pub task: usize,
    pub client: usize,
    /// The number of the owner, which several tasks share or which is a thread. `None`: this acquisition has an
    /// owner of its own.
    pub owner: Option<u64>,
    pub name: String,
    pub mode: Mode,
    /// Whether it is one of several locks that are requested together, all or none. The whole has a section of
    /// its own. While this one is awaited, another member may block the request.
    #[serde(default)]
    pub is_member: bool,
    /// The text of the ticket that it adopts. `None`: it acquires the lock.
    #[serde(default)]
    pub ticket: Option<String>,
    #[serde(default)]
    pub limits: Limits,
    /// The section is this run of the job with the name.
    #[serde(default)]
    pub run: Option<JobRun>,
}

/// One run of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct JobRun {
    /// The time for which it is scheduled, in nanoseconds since 1970.
    pub slot: Time,
    pub attempt: u32,
}

impl Request {
    /// Returns the request for a lock by an owner of its own, through the first client.
    pub(crate) fn exclusive(task: usize, name: String) -> Request {
        Request {
            task,
            client: 0,
            owner: None,
            name,
            mode: Mode::Exclusive,
            is_member: false,
            ticket: None,
            limits: Limits::default(),
            run: None,
        }
    }
}

/// The limits of a hold in nanoseconds, counted from its acquisition.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Limits {
    /// The hold has this lease, and is not renewed.
    pub lease: Option<Time>,
    /// The hold is lost after this time.
    pub at_most: Option<Time>,
    /// The hold is lost this long after its holder fed it for the last time.
    pub fed_every: Option<Time>,
    /// No other owner acquires the lock before, also after a release.
    pub at_least: Option<Time>,
}

/// Which sections may be active at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Mode {
    /// No other section.
    Exclusive,
    /// Other shared sections.
    Shared,
    /// As many sections as there are permits.
    Permit,
    /// As many sections as there are permits, which have no lease and no owner.
    Semaphore,
    /// Closes a latch with this count, if it is open.
    SetCount(u32),
    /// Counts a latch down by one.
    CountDown,
    /// Waits until a latch is open.
    AwaitZero,
    /// Asks the holder of a lock to release it, and revokes its hold after this time in nanoseconds, if there is one.
    Ask(Option<Time>),
    /// Renews a ticket for this time in nanoseconds.
    RenewTicket(Time),
    /// Releases the hold of a ticket.
    ReleaseTicket,
}
