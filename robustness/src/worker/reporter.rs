//! Reports events with their times.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use crate::clock::{Time, nanos, now};
use crate::history::{Event, EventKind};

/// Interval at which the guard is checked for validity.
pub(super) const CHECK_INTERVAL: Duration = Duration::from_millis(5);

/// Reports the events of tasks.
#[derive(Debug, Clone)]
pub struct Reporter {
    sections: Arc<AtomicU64>,
    sink: Arc<dyn EventSink>,
}

/// Receiver of events, with a clock.
pub trait EventSink: std::fmt::Debug + Send + Sync {
    fn now(&self) -> Time;
    fn record(&self, event: Event);

    /// Returns what the clock of the process shows, by which jobs fire.
    fn date(&self) -> SystemTime {
        SystemTime::now()
    }

    /// Returns the interval at which a guard is checked for validity.
    fn check_interval(&self) -> Duration {
        CHECK_INTERVAL
    }

    /// Returns whether a task learns of a loss at the very moment when the guard becomes invalid, as on a
    /// simulated clock: then the guard was valid until that moment, or until the end of its lease.
    fn is_exact(&self) -> bool {
        false
    }
}

/// Writes each event as a whole line to standard output: reported events are not lost with the process.
#[derive(Debug)]
pub(crate) struct StdoutSink;

impl EventSink for StdoutSink {
    fn now(&self) -> Time {
        now()
    }

    fn record(&self, event: Event) {
        let line = serde_json::to_string(&event).unwrap_or_default();
        let mut out = std::io::stdout().lock();
        // Standard output is flushed after every line.
        if writeln!(out, "{line}").is_err() {
            std::process::exit(0);
        }
    }
}

impl Reporter {
    pub fn new(sink: Arc<dyn EventSink>) -> Reporter {
        Reporter {
            sections: Arc::new(AtomicU64::new(1)),
            sink,
        }
    }

    /// Returns the number of a new section.
    pub(crate) fn section(&self) -> u64 {
        self.sections.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns the current time of the history.
    pub(super) fn now(&self) -> Time {
        self.sink.now()
    }

    /// Returns what the clock of the process shows.
    pub(super) fn date(&self) -> SystemTime {
        self.sink.date()
    }

    /// Reports an event of the process as a whole, now.
    pub fn report(&self, what: EventKind) {
        self.report_at(self.sink.now(), 0, what);
    }

    /// Reports an event of a section, now.
    pub(crate) fn report_in(&self, section: u64, what: EventKind) {
        self.report_at(self.sink.now(), section, what);
    }

    /// Reads how long a guard is valid, and reports it. Returns the end of its lease if it is valid.
    pub(crate) fn report_validity(
        &self,
        section: u64,
        valid_for: impl FnOnce() -> Duration,
    ) -> Option<Time> {
        let at = self.sink.now();
        let left = nanos(valid_for());
        if left <= 0 {
            return None;
        }
        // The end as it is known now, or a moment later; not before the earliest possible end.
        let (until, at_least) = (self.sink.now() + left, at + left);
        self.report_at(at, section, EventKind::Valid { until, at_least });
        Some(until)
    }

    /// Records the loss of a guard whose last check returned this end. Reports how long it was valid, if known.
    pub(crate) fn report_loss(&self, section: u64, until: Time) {
        let at = self.sink.now().min(until);
        if self.sink.is_exact() {
            let at_least = until;
            self.report_at(at, section, EventKind::Valid { until, at_least });
        }
    }

    pub(crate) fn check_interval(&self) -> Duration {
        self.sink.check_interval()
    }

    pub(crate) fn report_at(&self, at: Time, section: u64, what: EventKind) {
        self.sink.record(Event(at, section, what));
    }
}
