//! What breaks when, at random: about once a second something begins, whether or not what began before
//! is over.

use std::collections::BTreeMap;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::faults::Fault;
use crate::scene::Scene;

/// From one beginning to the next.
const PACE: Duration = Duration::from_secs(1);

/// How much of what is late is made up for.
const ARREARS: u32 = 5;

pub(crate) struct Schedule {
    due: Instant,
    /// What may break beside something else.
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

    /// Returns when something is to begin.
    pub(crate) fn wait(&mut self) {
        let now = Instant::now();
        sleep(self.due.saturating_duration_since(now));
        self.due = (self.due + PACE).max(now - PACE * ARREARS);
    }

    /// Breaks one thing after the other that may break beside something else.
    pub(crate) fn keep_until(&mut self, end: Instant, scene: &mut Scene) {
        while !self.beside.is_empty() && self.due < end {
            self.wait();
            let fault = self.beside[scene.random.below(self.beside.len())];
            let left = end.saturating_duration_since(Instant::now());
            let lasts = scene.random.between(self.lease / 60, self.lease / 4);
            // One that hit nobody does not count. Masters are none of its business.
            if (fault.act)(scene, lasts.min(left)).is_ok() {
                *self.drawn.entry(fault.name).or_default() += 1;
            }
        }
    }
}
