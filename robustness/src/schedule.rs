//! Random schedule of faults: about once a second one begins, whether or not earlier ones are over.

use std::collections::BTreeMap;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::faults::Fault;
use crate::scene::Scene;

/// Time from the start of one fault to the next.
const PACE: Duration = Duration::from_secs(1);

/// Number of late faults that are made up for.
const ARREARS: u32 = 5;

pub(crate) struct Schedule {
    due: Instant,
    /// Faults that may happen during another one.
    beside: Vec<Fault>,
    lease: Duration,
    /// How often each was drawn.
    pub(crate) drawn: BTreeMap<&'static str, usize>,
}

impl Schedule {
    pub(crate) fn new(faults: &[Fault], lease: Duration) -> Schedule {
        let beside = faults.iter().filter(|fault| fault.beside);
        Schedule {
            due: Instant::now(),
            beside: beside.copied().collect(),
            lease,
            drawn: BTreeMap::new(),
        }
    }

    /// Waits until the next fault is due.
    pub(crate) fn wait(&mut self) {
        let now = Instant::now();
        sleep(self.due.saturating_duration_since(now));
        self.due = (self.due + PACE).max(now - PACE * ARREARS);
    }

    /// Runs one fault after the other of those that may happen during another one.
    pub(crate) fn keep_until(&mut self, end: Instant, scene: &mut Scene) {
        while !self.beside.is_empty() && self.due < end {
            self.wait();
            let fault = self.beside[scene.random.below(self.beside.len())];
            let left = end.saturating_duration_since(Instant::now());
            let lasts = scene.random.between(self.lease / 60, self.lease / 4);
            // A fault that affected no client does not count. These faults do not change masters.
            if (fault.act)(scene, lasts.min(left)).is_ok() {
                *self.drawn.entry(fault.name).or_default() += 1;
            }
        }
    }
}
