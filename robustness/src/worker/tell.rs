//! Telling what happens, one line each, whole: what was told is not lost with the process.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::clock::{Time, nanos, now};
use crate::history::{Event, What};

#[derive(Debug, Clone)]
pub(crate) struct Teller {
    sections: Arc<AtomicU64>,
}

impl Teller {
    pub(crate) fn start() -> Teller {
        Teller {
            sections: Arc::new(AtomicU64::new(1)),
        }
    }

    /// The number of a new section.
    pub(crate) fn section(&self) -> u64 {
        self.sections.fetch_add(1, Ordering::Relaxed)
    }

    /// Of the process as a whole, now.
    pub(crate) fn tell(&self, what: What) {
        self.say(now(), 0, what);
    }

    /// Of a section, now.
    pub(crate) fn tell_of(&self, section: u64, what: What) {
        self.say(now(), section, what);
    }

    /// Asks a guard how long it is valid, and tells it if it is. Returns whether it is.
    pub(crate) fn look(&self, section: u64, valid_for: impl FnOnce() -> Duration) -> bool {
        let at = now();
        let left = nanos(valid_for());
        if left > 0 {
            // The end as it is known now, or a moment later; it is not before the other one.
            let (until, at_least) = (now() + left, at + left);
            self.say(at, section, What::Valid { until, at_least });
        }
        left > 0
    }

    pub(crate) fn say(&self, at: Time, section: u64, what: What) {
        let line = serde_json::to_string(&Event(at, section, what)).unwrap_or_default();
        let mut out = std::io::stdout().lock();
        // Standard output is flushed with every line.
        if writeln!(out, "{line}").is_err() {
            std::process::exit(0);
        }
    }
}
