//! Durations that the store can keep, and deadlines on the monotonic clock.

use std::time::Duration;

use tokio::time::Instant;

use crate::error::{Error, Result};

/// The longest lease: ten years. Redis counts milliseconds since 1970 in a signed 64-bit number, whose limit
/// is far beyond that.
pub const MAX_LEASE: Duration = Duration::from_secs(3650 * 24 * 60 * 60);

/// A lease, or another time that the store keeps, such as a grace period: whole milliseconds, at least one, at most
/// [`MAX_LEASE`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Lease {
    /// Half the size of a `Duration`: every request and guard has two.
    millis: u64,
}

impl Lease {
    /// Default lease of locks that the watchdog renews, as in Redisson.
    pub(crate) const WATCHDOG: Lease = Lease { millis: 30_000 };

    /// Time for which a waiting writer blocks new readers after its last attempt.
    pub(crate) const WRITER_PREFERENCE: Lease = Lease { millis: 10_000 };

    /// How long a fencing token is kept after the clock that it follows has passed it: a day.
    pub(crate) const TOKEN_GRACE: Lease = Lease { millis: 86_400_000 };

    /// Truncates to whole milliseconds: the lease may end earlier here than in the store, never later.
    pub(crate) fn new(lease: Duration) -> Result<Lease> {
        let millis = u64::try_from(lease.as_millis()).unwrap_or(u64::MAX);
        if millis == 0 || Duration::from_millis(millis) > MAX_LEASE {
            return Err(Error::InvalidLease { lease });
        }
        Ok(Lease { millis })
    }

    /// Creates a lease from remaining time, rounded up so that it does not end earlier in the store than
    /// here.
    pub(crate) fn from_remaining(left: Duration) -> Lease {
        let left = left.min(MAX_LEASE);
        let millis = u64::try_from(left.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX);
        Lease {
            millis: millis.max(1),
        }
    }

    pub(crate) fn duration(self) -> Duration {
        Duration::from_millis(self.millis)
    }

    pub(crate) fn millis(self) -> i64 {
        i64::try_from(self.millis).unwrap_or(i64::MAX)
    }

    /// Returns the interval between renewals: a third of the lease, as in Redisson.
    pub(crate) fn renewal_interval(self) -> Duration {
        self.duration() / 3
    }
}

/// Returns a time in milliseconds, for scripts.
pub(crate) fn millis(time: Duration) -> i64 {
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX)
}

/// When something in the store expires.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Expiry {
    /// After this time, unless it is renewed.
    In(Duration),
    /// Never: it has no time to live. No lock of this library is like this; other programs may remove the
    /// time to live of a key.
    Never,
}

impl Expiry {
    /// Returns the time until it expires; `None` if it never does.
    pub fn duration(self) -> Option<Duration> {
        match self {
            Expiry::In(left) => Some(left),
            Expiry::Never => None,
        }
    }

    /// Converts a limit of the caller; `None` means no limit.
    pub(crate) fn from_limit(limit: impl Into<Option<Duration>>) -> Expiry {
        limit.into().map_or(Expiry::Never, Expiry::In)
    }

    /// Converts the remaining milliseconds in the reply of a script, which are negative if it never expires.
    pub(crate) fn from_millis(left: i64) -> Expiry {
        u64::try_from(left).map_or(Expiry::Never, |left| {
            Expiry::In(Duration::from_millis(left))
        })
    }

    /// The inverse of [`Expiry::from_millis`].
    pub(crate) fn millis(self) -> i64 {
        self.duration().map_or(-1, millis)
    }

    /// Returns when something expires that ends then, or never.
    pub(crate) fn of(ends: Option<Instant>, now: Instant) -> Expiry {
        ends.map_or(Expiry::Never, |ends| {
            Expiry::In(ends.saturating_duration_since(now))
        })
    }
}

impl std::fmt::Display for Expiry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Expiry::In(left) => write!(f, "in {left:?}"),
            Expiry::Never => f.write_str("never"),
        }
    }
}

/// How long a caller is willing to wait.
#[derive(Debug, Clone, Copy)]
pub(crate) enum WaitLimit {
    /// Does not wait: makes one attempt.
    None,
    /// Waits until then.
    Until(Instant),
    /// Waits without a limit.
    Endless,
}

impl WaitLimit {
    /// Returns the limit that ends `wait` from now. A deadline beyond the clock's range means no limit.
    pub(crate) fn at_most(wait: Duration) -> WaitLimit {
        if wait.is_zero() {
            return WaitLimit::None;
        }
        match Instant::now().checked_add(wait) {
            Some(end) => WaitLimit::Until(end),
            None => WaitLimit::Endless,
        }
    }

    pub(crate) fn deadline(self) -> Option<Instant> {
        match self {
            WaitLimit::Until(end) => Some(end),
            WaitLimit::None | WaitLimit::Endless => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leases_outside_the_limits_are_refused() {
        for bad in [
            Duration::ZERO,
            Duration::from_micros(999),
            MAX_LEASE + Duration::from_millis(1),
            Duration::MAX,
        ] {
            assert!(matches!(Lease::new(bad), Err(Error::InvalidLease { .. })));
        }
        assert_eq!(Lease::new(MAX_LEASE).unwrap().duration(), MAX_LEASE);
        assert_eq!(Lease::new(Duration::from_micros(1999)).unwrap().millis(), 1);
    }

    #[test]
    fn longest_lease_is_ten_years() {
        assert_eq!(MAX_LEASE.as_secs(), 315_360_000);
        let lease = Lease::new(MAX_LEASE).unwrap();
        assert_eq!(lease.millis(), 315_360_000_000);
    }

    #[test]
    fn remaining_lease_rounds_up() {
        let left = |micros| Lease::from_remaining(Duration::from_micros(micros)).millis();
        assert_eq!([0, 1, 1000, 1001].map(left), [1, 1, 1, 2]);
        assert_eq!(Lease::from_remaining(Duration::MAX).duration(), MAX_LEASE);
    }

    #[test]
    fn never_is_later_than_any_time() {
        let second = Expiry::In(Duration::from_secs(1));
        assert!(second < Expiry::Never && Expiry::In(MAX_LEASE) < Expiry::Never);
        assert_eq!([1000, -1].map(Expiry::from_millis), [second, Expiry::Never]);
        assert_eq!(format!("{second}, {}", Expiry::Never), "in 1s, never");
    }

    #[test]
    fn watchdog_lease_is_renewed_after_ten_seconds() {
        assert_eq!(Lease::WATCHDOG.renewal_interval(), Duration::from_secs(10));
    }

    #[tokio::test(start_paused = true)]
    async fn wait_limit_has_deadline_unless_none_or_beyond_clock() {
        let second = Duration::from_secs(1);
        let end = WaitLimit::at_most(second).deadline();
        assert_eq!(end, Some(Instant::now() + second));
        assert!(matches!(
            WaitLimit::at_most(Duration::MAX),
            WaitLimit::Endless
        ));
        assert!(matches!(
            WaitLimit::at_most(Duration::ZERO),
            WaitLimit::None
        ));
        assert_eq!(WaitLimit::Endless.deadline(), None);
    }
}
