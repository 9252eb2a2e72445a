//! The machine's monotonic clock, which all processes share.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Time on the monotonic clock, in nanoseconds.
pub type Time = i64;

pub fn now() -> Time {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec * 1_000_000_000 + now.tv_nsec
}

/// Converts a duration to nanoseconds.
pub fn nanos(time: Duration) -> Time {
    Time::try_from(time.as_nanos()).unwrap_or(Time::MAX / 4)
}

pub fn millis(time: Time) -> Time {
    time / 1_000_000
}
