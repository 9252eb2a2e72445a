//! Telling what happens, and when.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::section::LOOK;
use crate::clock::{Time, nanos, now};
use crate::history::{Event, What};

/// Where tasks tell what happens.
#[derive(Debug, Clone)]
pub struct Teller {
    sections: Arc<AtomicU64>,
    ear: Arc<dyn Ear>,
}

/// Who is told, and what time it is there.
pub trait Ear: std::fmt::Debug + Send + Sync {
    fn now(&self) -> Time;
    fn hear(&self, event: Event);

    /// How often a guard is asked whether it is valid.
    fn look_interval(&self) -> Duration {
        LOOK
    }

    /// Whether a task learns of a loss in the very moment in which the guard becomes invalid, as on a simulated
    /// clock: then the guard was valid until then, or until the end of its lease.
    fn is_exact(&self) -> bool {
        false
    }
}

/// One line each on standard output, whole: what was told is not lost with the process.
#[derive(Debug)]
pub(crate) struct Lines;

impl Ear for Lines {
    fn now(&self) -> Time {
        now()
    }

    fn hear(&self, event: Event) {
        let line = serde_json::to_string(&event).unwrap_or_default();
        let mut out = std::io::stdout().lock();
        // Standard output is flushed with every line.
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

    /// The number of a new section.
    pub(crate) fn section(&self) -> u64 {
        self.sections.fetch_add(1, Ordering::Relaxed)
    }

    /// Of the process as a whole, now.
    pub fn tell(&self, what: What) {
        self.say(self.ear.now(), 0, what);
    }

    /// Of a section, now.
    pub(crate) fn tell_of(&self, section: u64, what: What) {
        self.say(self.ear.now(), section, what);
    }

    /// Asks a guard how long it is valid, and tells it if it is. Returns the end of its lease if it is valid.
    pub(crate) fn look(&self, section: u64, valid_for: impl FnOnce() -> Duration) -> Option<Time> {
        let at = self.ear.now();
        let left = nanos(valid_for());
        if left <= 0 {
            return None;
        }
        // The end as it is known now, or a moment later; it is not before the other one.
        let (until, at_least) = (self.ear.now() + left, at + left);
        self.say(at, section, What::Valid { until, at_least });
        Some(until)
    }

    /// A guard has been lost since it was asked and named this end. Tells how long it was valid, if that is known.
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
