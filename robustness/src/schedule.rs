//! Random schedule of faults: about once a second one begins, whether or not earlier ones are over.

use std::collections::BTreeMap;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::context::Context;
use crate::faults::Fault;

/// Time from the start of one fault to the next.
const INTERVAL: Duration = Duration::from_secs(1);

/// Number of late faults that are made up for.
const MAX_OVERDUE: u32 = 5;

pub(crate) struct Schedule {
    due: Instant,
    /// Faults that may happen during another one.
    overlapping: Vec<Fault>,
    lease: Duration,
    /// How often each was drawn.
    pub(crate) drawn: BTreeMap<&'static str, usize>,
}

impl Schedule {
    pub(crate) fn new(faults: &[Fault], lease: Duration) -> Schedule {
        let overlapping = faults.iter().filter(|fault| fault.can_overlap);
        Schedule {
            due: Instant::now(),
            overlapping: overlapping.copied().collect(),
            lease,
            drawn: BTreeMap::new(),
        }
    }

    /// Waits until the next fault is due.
    pub(crate) fn wait(&mut self) {
        let now = Instant::now();
        sleep(self.due.saturating_duration_since(now));
        self.due = (self.due + INTERVAL).max(now - INTERVAL * MAX_OVERDUE);
    }

    /// Runs one fault after the other of those that may happen during another one.
    pub(crate) fn run_until(&mut self, end: Instant, context: &mut Context) {
        while !self.overlapping.is_empty() && self.due < end {
            self.wait();
            let fault = self.overlapping[context.random.below(self.overlapping.len())];
            let left = end.saturating_duration_since(Instant::now());
            let duration = context.random.between(self.lease / 60, self.lease / 4);
            // A fault that affected no client does not count. These faults do not change masters.
            if (fault.inject)(context, duration.min(left)).is_ok() {
                *self.drawn.entry(fault.name).or_default() += 1;
            }
        }
    }
}
