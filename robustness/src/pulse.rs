//! Whether this process was let run. On a machine that is short of time, or that stands still as a
//! whole, what comes too late says nothing about locks: such times are told and counted.

use std::thread;
use std::time::Duration;

use crate::clock::{Time, nanos, now};

const BEAT: Duration = Duration::from_millis(20);

/// What is longer than this is told.
const STALL: Duration = Duration::from_millis(400);

/// Tells from when to when this process stood still, on a thread of its own, as long as it runs.
pub(crate) fn watch(stood: impl Fn(Time, Time) + Send + 'static) {
    thread::spawn(move || {
        loop {
            let since = now();
            thread::sleep(BEAT);
            let until = now();
            if until - since > nanos(STALL) {
                stood(since, until);
            }
        }
    });
}
