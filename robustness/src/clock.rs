//! The machine's monotonic clock, which all its processes share.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds of that clock.
pub type Time = i64;

pub fn now() -> Time {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec * 1_000_000_000 + now.tv_nsec
}

/// A duration as this clock counts it.
pub fn nanos(time: Duration) -> Time {
    Time::try_from(time.as_nanos()).unwrap_or(Time::MAX / 4)
}

pub fn millis(time: Time) -> Time {
    time / 1_000_000
}
