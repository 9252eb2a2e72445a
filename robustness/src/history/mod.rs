//! What happened: events as the workers tell them, and the sections that they come to.

mod event;
mod section;

pub use event::{Event, Mode, What};
pub use section::{Ask, Section};

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::clock::{Time, nanos};

/// Permits of each semaphore that the workers use.
pub const PERMITS: u32 = 2;

/// Everything about one run.
#[derive(Debug, Default)]
pub struct History {
    pub sections: Vec<Section>,
    /// Where a section that may still go on is kept: by process and number.
    open: BTreeMap<(usize, u64), usize>,
    pub processes: BTreeMap<usize, Process>,
    /// When something was broken, and when it was whole again.
    pub windows: Vec<Window>,
    /// When what the store had known was gone, or became gone.
    pub data_lost: Vec<DataLost>,
    /// The names of locks that a server kept which could not be reached.
    pub out_of_reach: BTreeSet<String>,
    pub lease: Time,
    /// When the run was over.
    pub end: Time,
}

/// One worker process.
#[derive(Debug, Default)]
pub struct Process {
    pub ready: bool,
    /// Nothing more will come of it.
    pub done: bool,
    pub killed: Option<Time>,
    /// When it was stopped, and when it went on.
    pub stopped: Vec<(Time, Option<Time>)>,
    /// The longest time that it stood still without having been stopped.
    pub stalled: Time,
    /// What its clients kept account of at the end, if it was not nothing.
    pub left: Vec<String>,
}

/// A time in which something was broken.
#[derive(Debug, Clone, Copy)]
pub struct Window {
    pub from: Time,
    pub until: Time,
    /// No answer came from the store in this time, to anybody.
    pub cut: bool,
}

/// A time in which the store forgot what is held: at some moment of it.
#[derive(Debug, Clone, Copy)]
pub struct DataLost {
    pub from: Time,
    pub until: Time,
    pub forgetting: Forgetting,
}

/// What the store forgot, and what the docs say about that.
#[derive(Debug, Clone, Copy)]
pub struct Forgetting {
    /// Holds, too; else only releases, and counts of semaphores and latches.
    pub holds: bool,
    /// The fencing tokens, too.
    pub tokens: bool,
    pub why: &'static str,
}

impl Forgetting {
    /// All data is gone.
    pub const NO_DATA: Forgetting = Forgetting {
        holds: true,
        tokens: true,
        why: "a store that loses its data gives away what is held, and its tokens begin anew; holders learn \
              of it at their next renewal, a third of the lease later at most",
    };

    /// The keys of some locks are gone.
    pub const KEYS_GONE: Forgetting = Forgetting {
        holds: true,
        tokens: false,
        why: "who deletes a lock's key gives away what is held; its holder learns of it at the next \
              renewal, a third of the lease later at most",
    };

    /// The latest writes are gone.
    pub const UNREPLICATED: Forgetting = Forgetting {
        holds: true,
        tokens: true,
        why: "a replica that takes its master's place does not know what had not reached it, neither locks \
              nor tokens; holders learn of it at their next renewal, a third of the lease later at most",
    };

    /// A master that has been replaced still grants acquisitions.
    pub const CUT_OFF: Forgetting = Forgetting {
        holds: true,
        tokens: true,
        why: "a master that was cut off from its replicas goes on giving out locks, and tokens, until clients \
              have heard of the new one (ReplicaSync::AtLeast prevents it); holders learn of it at their next \
              renewal, a third of the lease later at most",
    };

    /// A master that has been replaced grants nothing any more, and still releases.
    pub const RELEASES: Forgetting = Forgetting {
        holds: false,
        tokens: true,
        why: "a release does not wait for replicas: a replica that takes its master's place may still have a hold \
              that was released, and if its owner acquires the lock again within the lease, it continues that hold \
              and has its token",
    };
}

impl Process {
    /// It did not run from then to then, for whatever reason.
    pub fn stood(&mut self, from: Time, until: Time) {
        let stopped =
            |&(stop, on): &(Time, Option<Time>)| stop < until && on.is_none_or(|on| on > from);
        if !self.stopped.iter().any(stopped) {
            self.stalled = self.stalled.max(until - from);
            self.stopped.push((from, Some(until)));
        }
    }
}

impl History {
    pub fn new(lease: Duration) -> History {
        History {
            lease: nanos(lease),
            end: Time::MAX,
            ..History::default()
        }
    }

    /// Takes down what a worker said.
    pub fn take(&mut self, process: usize, event: Event) {
        let Event(t, number, what) = event;
        let of = self.processes.entry(process).or_default();
        let what = match what {
            What::Ready => {
                of.ready = true;
                return;
            }
            What::Stood { since } => {
                of.stood(since, t);
                return;
            }
            What::Done => {
                of.done = true;
                return;
            }
            What::Left { client, status } => {
                of.left
                    .push(format!("client {client} of process {process}: {status}"));
                return;
            }
            What::Asked(ask) => {
                self.open.insert((process, number), self.sections.len());
                self.sections.push(Section::new(process, t, ask));
                return;
            }
            what => what,
        };
        let key = (process, number);
        if let Some(&at) = self.open.get(&key)
            && let Some(section) = self.sections.get_mut(at)
            && section.take(t, what)
        {
            self.open.remove(&key);
        }
    }

    /// How many critical sections were entered.
    pub fn entered(&self) -> usize {
        self.sections.iter().filter(|one| one.got.is_some()).count()
    }

    /// How many of them were entered while something was broken.
    pub fn entered_meanwhile(&self) -> usize {
        let meanwhile = |at| self.windows.iter().any(|w| w.from <= at && at <= w.until);
        let entered = self.sections.iter().filter_map(|one| one.got);
        entered.filter(|&at| meanwhile(at)).count()
    }

    /// The sections, name by name.
    pub fn by_name(&self) -> BTreeMap<&str, Vec<&Section>> {
        let mut names: BTreeMap<&str, Vec<&Section>> = BTreeMap::new();
        for section in &self.sections {
            names.entry(&section.ask.name).or_default().push(section);
        }
        names
    }

    /// Times in which the store may have lost objects without a lease, too.
    pub fn forgotten(&self) -> impl Iterator<Item = &DataLost> {
        self.data_lost.iter().filter(|lost| lost.forgetting.tokens)
    }

    /// The longest time that a process was not let run by the machine.
    pub fn stalled(&self) -> Time {
        let stalled = self.processes.values().map(|process| process.stalled);
        stalled.max().unwrap_or_default()
    }

    /// How often asking and giving back failed, by kind of error.
    pub fn errors(&self) -> BTreeMap<&str, usize> {
        let mut errors = BTreeMap::new();
        for section in &self.sections {
            for error in section.failed.iter().chain(&section.unlock_error) {
                *errors.entry(error.as_str()).or_default() += 1;
            }
        }
        errors
    }
}
