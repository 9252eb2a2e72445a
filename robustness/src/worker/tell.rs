//! Reports events with their times.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::section::LOOK;
use crate::clock::{Time, nanos, now};
use crate::history::{Event, What};

/// Reports the events of tasks.
#[derive(Debug, Clone)]
pub struct Teller {
    sections: Arc<AtomicU64>,
    ear: Arc<dyn Ear>,
}

/// Receiver of events, with a clock.
pub trait Ear: std::fmt::Debug + Send + Sync {
    fn now(&self) -> Time;
    fn hear(&self, event: Event);

    /// Returns the interval at which a guard is checked for validity.
    fn look_interval(&self) -> Duration {
        LOOK
    }

    /// Returns whether a task learns of a loss at the very moment when the guard becomes invalid, as on a
    /// simulated clock: then the guard was valid until that moment, or until the end of its lease.
    fn is_exact(&self) -> bool {
        false
    }
}

/// Writes each event as a whole line to standard output: reported events are not lost with the process.
#[derive(Debug)]
pub(crate) struct Lines;

impl Ear for Lines {
    fn now(&self) -> Time {
        now()
    }

    fn hear(&self, event: Event) {
        let line = serde_json::to_string(&event).unwrap_or_default();
        let mut out = std::io::stdout().lock();
        // Standard output is flushed after every line.
        if writeln!(out, "{line}").is_err() {
            std::process::exit(0);
        }
    }
}

impl Teller {
    pub fn new(ear: Arc<dyn Ear>) -> Teller {
        Teller {
            sections: Arc::new(AtomicU64::new(1)),
            ear,
        }
    }

    /// Returns the number of a new section.
    pub(crate) fn section(&self) -> u64 {
        self.sections.fetch_add(1, Ordering::Relaxed)
    }

    /// Reports an event of the process as a whole, now.
    pub fn tell(&self, what: What) {
        self.say(self.ear.now(), 0, what);
    }

    /// Reports an event of a section, now.
    pub(crate) fn tell_of(&self, section: u64, what: What) {
        self.say(self.ear.now(), section, what);
    }

    /// Reads how long a guard is valid, and reports it. Returns the end of its lease if it is valid.
    pub(crate) fn look(&self, section: u64, valid_for: impl FnOnce() -> Duration) -> Option<Time> {
        let at = self.ear.now();
        let left = nanos(valid_for());
        if left <= 0 {
            return None;
        }
        // The end as it is known now, or a moment later; not before the earliest possible end.
        let (until, at_least) = (self.ear.now() + left, at + left);
        self.say(at, section, What::Valid { until, at_least });
        Some(until)
    }

    /// Records the loss of a guard whose last check returned this end. Reports how long it was valid, if known.
    pub(crate) fn lost(&self, section: u64, until: Time) {
        let at = self.ear.now().min(until);
        if self.ear.is_exact() {
            let at_least = until;
            self.say(at, section, What::Valid { until, at_least });
        }
    }

    pub(crate) fn look_interval(&self) -> Duration {
        self.ear.look_interval()
    }

    pub(crate) fn say(&self, at: Time, section: u64, what: What) {
        self.ear.hear(Event(at, section, what));
    }
}
