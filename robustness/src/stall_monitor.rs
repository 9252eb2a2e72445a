//! Detects times in which this process was not scheduled.
//!
//! On a machine that is overloaded or paused, a late event says nothing about locks: such times are
//! reported and counted.

use std::thread;
use std::time::Duration;

use crate::clock::{Time, nanos, now};

const INTERVAL: Duration = Duration::from_millis(20);

/// Longer stalls are reported.
const MIN_STALL: Duration = Duration::from_millis(400);

/// Starts a thread that reports the times in which this process did not run.
pub(crate) fn start(on_stall: impl Fn(Time, Time) + Send + 'static) {
    thread::spawn(move || {
        loop {
            let since = now();
            thread::sleep(INTERVAL);
            let until = now();
            if until - since > nanos(MIN_STALL) {
                on_stall(since, until);
            }
        }
    });
}
