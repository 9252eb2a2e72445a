//! What happened: events as the workers tell them, and the sections that they come to.

mod event;
mod section;

pub(crate) use event::{Event, Mode, What};
pub(crate) use section::{Ask, Section};

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::clock::{Time, nanos};

/// Permits of each semaphore that the workers use.
pub(crate) const PERMITS: u32 = 2;

/// Everything about one run.
#[derive(Debug, Default)]
pub(crate) struct History {
    pub(crate) sections: Vec<Section>,
    /// Where a section that may still go on is kept: by process and number.
    open: BTreeMap<(usize, u64), usize>,
    pub(crate) processes: BTreeMap<usize, Process>,
    /// When something was broken, and when it was whole again.
    pub(crate) windows: Vec<Window>,
    /// When what the store had known was gone, or became gone.
    pub(crate) data_lost: Vec<DataLost>,
    /// The names of locks that a server kept which could not be reached.
    pub(crate) out_of_reach: BTreeSet<String>,
    pub(crate) lease: Time,
    /// When the run was over.
    pub(crate) end: Time,
}

/// One worker process.
#[derive(Debug, Default)]
pub(crate) struct Process {
    pub(crate) ready: bool,
    /// Nothing more will come of it.
    pub(crate) done: bool,
    pub(crate) killed: Option<Time>,
    /// When it was stopped, and when it went on.
    pub(crate) stopped: Vec<(Time, Option<Time>)>,
    /// The longest time that it stood still without having been stopped.
    pub(crate) stalled: Time,
    /// What its clients kept account of at the end, if it was not nothing.
    pub(crate) left: Vec<String>,
}

/// A time in which something was broken.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Window {
    pub(crate) from: Time,
    pub(crate) until: Time,
    /// No answer came from the store in this time, to anybody.
    pub(crate) cut: bool,
}

/// A time in which the store forgot what is held: at some moment of it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DataLost {
    pub(crate) from: Time,
    pub(crate) until: Time,
    pub(crate) forgetting: Forgetting,
}

/// What the store forgot, and what the docs say about that.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Forgetting {
    /// The fencing tokens, too.
    pub(crate) tokens: bool,
    pub(crate) why: &'static str,
}

impl Process {
    /// It did not run from then to then, for whatever reason.
    pub(crate) fn stood(&mut self, from: Time, until: Time) {
        let stopped =
            |&(stop, on): &(Time, Option<Time>)| stop < until && on.is_none_or(|on| on > from);
        if !self.stopped.iter().any(stopped) {
            self.stalled = self.stalled.max(until - from);
            self.stopped.push((from, Some(until)));
        }
    }
}

impl History {
    pub(crate) fn new(lease: Duration) -> History {
        History {
            lease: nanos(lease),
            end: Time::MAX,
            ..History::default()
        }
    }

    /// Takes down what a worker said.
    pub(crate) fn take(&mut self, process: usize, event: Event) {
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
    pub(crate) fn entered(&self) -> usize {
        self.sections.iter().filter(|one| one.got.is_some()).count()
    }

    /// How many of them were entered while something was broken.
    pub(crate) fn entered_meanwhile(&self) -> usize {
        let meanwhile = |at| self.windows.iter().any(|w| w.from <= at && at <= w.until);
        let entered = self.sections.iter().filter_map(|one| one.got);
        entered.filter(|&at| meanwhile(at)).count()
    }

    /// The sections, name by name.
    pub(crate) fn by_name(&self) -> BTreeMap<&str, Vec<&Section>> {
        let mut names: BTreeMap<&str, Vec<&Section>> = BTreeMap::new();
        for section in &self.sections {
            names.entry(&section.ask.name).or_default().push(section);
        }
        names
    }

    /// The longest time that a process was not let run by the machine.
    pub(crate) fn stalled(&self) -> Time {
        let stalled = self.processes.values().map(|process| process.stalled);
        stalled.max().unwrap_or_default()
    }

    /// How often asking and giving back failed, by kind of error.
    pub(crate) fn errors(&self) -> BTreeMap<&str, usize> {
        let mut errors = BTreeMap::new();
        for section in &self.sections {
            for error in section.failed.iter().chain(&section.unlock_error) {
                *errors.entry(error.as_str()).or_default() += 1;
            }
        }
        errors
    }
}
