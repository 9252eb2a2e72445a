//! Durations that the store can keep, and deadlines on the monotonic clock.

use std::time::Duration;

use tokio::time::Instant;

use crate::error::{Error, Result};

/// The longest lease that can be asked for: ten years. Redis counts milliseconds from 1970 in a
/// signed 64-bit number; this is far from its end, and longer than anybody means to wait.
pub const MAX_LEASE: Duration = Duration::from_secs(3650 * 24 * 60 * 60);

/// A lease: whole milliseconds, at least one, at most [`MAX_LEASE`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Lease(Duration);

impl Lease {
    /// What the watchdog keeps renewing unless told otherwise, as in Redisson.
    pub(crate) const WATCHDOG: Lease = Lease(Duration::from_secs(30));

    /// How long a writer that waits holds new readers back if it is not heard of again.
    pub(crate) const WAITING_WRITER: Lease = Lease(Duration::from_secs(10));

    /// Parts of a millisecond are cut off: a lease may be shorter here than in the store, never
    /// the other way round.
    pub(crate) fn new(lease: Duration) -> Result<Lease> {
        let whole = Duration::from_millis(u64::try_from(lease.as_millis()).unwrap_or(u64::MAX));
        if whole.is_zero() || whole > MAX_LEASE {
            return Err(Error::InvalidLease { lease });
        }
        Ok(Lease(whole))
    }

    /// What is left of a lease: parts of a millisecond count as a whole one, so that in the store it
    /// does not end before it does here.
    pub(crate) fn left(left: Duration) -> Lease {
        let whole = left.as_nanos().div_ceil(1_000_000).max(1);
        let whole = Duration::from_millis(u64::try_from(whole).unwrap_or(u64::MAX));
        Lease(whole.min(MAX_LEASE))
    }

    pub(crate) fn duration(self) -> Duration {
        self.0
    }

    pub(crate) fn millis(self) -> u64 {
        u64::try_from(self.0.as_millis()).unwrap_or(u64::MAX)
    }

    /// How long before the end of a lease it is renewed again: as in Redisson, a third has passed.
    pub(crate) fn third(self) -> Duration {
        self.0 / 3
    }
}

/// How long somebody is ready to wait.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Patience {
    /// Not at all: ask once.
    None,
    /// Until then.
    Until(Instant),
    /// For ever.
    Endless,
}

impl Patience {
    /// Waits at most `wait` from now. What the clock cannot hold is for ever.
    pub(crate) fn at_most(wait: Duration) -> Patience {
        if wait.is_zero() {
            return Patience::None;
        }
        match Instant::now().checked_add(wait) {
            Some(end) => Patience::Until(end),
            None => Patience::Endless,
        }
    }

    pub(crate) fn end(self) -> Option<Instant> {
        match self {
            Patience::Until(end) => Some(end),
            Patience::None | Patience::Endless => None,
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
    fn ten_years_are_the_longest_lease() {
        assert_eq!(MAX_LEASE.as_secs(), 315_360_000);
        let lease = Lease::new(MAX_LEASE).unwrap();
        assert_eq!(lease.millis(), 315_360_000_000);
    }

    #[test]
    fn what_is_left_of_a_lease_lasts_as_long_in_the_store() {
        let left = |micros| Lease::left(Duration::from_micros(micros)).millis();
        assert_eq!([0, 1, 1000, 1001].map(left), [1, 1, 1, 2]);
        assert_eq!(Lease::left(Duration::MAX).duration(), MAX_LEASE);
    }

    #[test]
    fn the_watchdogs_lease_is_renewed_after_ten_seconds() {
        assert_eq!(Lease::WATCHDOG.third(), Duration::from_secs(10));
    }

    #[tokio::test(start_paused = true)]
    async fn patience_ends_unless_there_is_none_or_the_clock_cannot_hold_it() {
        let second = Duration::from_secs(1);
        let end = Patience::at_most(second).end();
        assert_eq!(end, Some(Instant::now() + second));
        assert!(matches!(
            Patience::at_most(Duration::MAX),
            Patience::Endless
        ));
        assert!(matches!(Patience::at_most(Duration::ZERO), Patience::None));
        assert_eq!(Patience::Endless.end(), None);
    }
}
