//! Telling what happens, one line each, whole: what was told is not lost with the process.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::clock::{Time, now};
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

    pub(crate) fn say(&self, at: Time, section: u64, what: What) {
        let line = serde_json::to_string(&Event(at, section, what)).unwrap_or_default();
        let mut out = std::io::stdout().lock();
        // Standard output is flushed with every line.
        if writeln!(out, "{line}").is_err() {
            std::process::exit(0);
        }
    }
}
