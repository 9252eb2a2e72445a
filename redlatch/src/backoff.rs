//! Pauses between attempts.

use std::time::Duration;

use crate::environment::random_fraction;
use crate::lease::MAX_LEASE;

/// Pauses between repeated attempts: of a spin lock (Redisson: `LockOptions.BackOff`), and between the rounds of
/// a [`RedLock`](crate::RedLock).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Backoff {
    first: Duration,
    factor: f64,
    longest: Duration,
    jitter: bool,
}

impl Default for Backoff {
    /// As in Redisson: 1 ms at first, doubled after each attempt, at most 128 ms.
    fn default() -> Backoff {
        Backoff::exponential(Duration::from_millis(1), 2.0, Duration::from_millis(128))
    }
}

impl Backoff {
    /// Starts with `first` and multiplies by `factor` after each attempt, up to `longest`. Each pause is a
    /// random share of that, from half to all of it, so that waiters refused together do not retry
    /// together. A factor below 1 counts as 1. Pauses below 100 µs count as 100 µs, pauses above
    /// [`MAX_LEASE`] as [`MAX_LEASE`].
    pub fn exponential(first: Duration, factor: f64, longest: Duration) -> Backoff {
        Backoff {
            first,
            // Also replaces NaN.
            factor: factor.max(1.0),
            longest,
            jitter: true,
        }
    }

    /// Pauses equally long each time. Below 100 µs counts as 100 µs, above [`MAX_LEASE`] as [`MAX_LEASE`].
    pub fn constant(pause: Duration) -> Backoff {
        Backoff {
            first: pause,
            factor: 1.0,
            longest: pause,
            jitter: false,
        }
    }

    /// Returns the next pause, after `earlier` pauses.
    pub(crate) fn pause(&self, earlier: u32) -> Duration {
        let growth = self.factor.powi(i32::try_from(earlier).unwrap_or(i32::MAX));
        // Zero would stay zero, however often it is doubled.
        let first = self.first.max(MIN_PAUSE);
        let pause = (first.as_secs_f64() * growth).min(self.longest.as_secs_f64());
        let share = if self.jitter {
            0.5 + 0.5 * random_fraction()
        } else {
            1.0
        };
        Duration::try_from_secs_f64(pause * share)
            .unwrap_or(self.longest)
            .clamp(MIN_PAUSE, MAX_LEASE)
    }
}

/// A shorter pause would be busy polling.
const MIN_PAUSE: Duration = Duration::from_micros(100);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_limit_with_jitter() {
        let millis = Duration::from_millis;
        let backoff = Backoff::default();
        for (earlier, longest) in [(0, 1), (1, 2), (3, 8), (7, 128), (8, 128), (u32::MAX, 128)] {
            for _ in 0..50 {
                let pause = backoff.pause(earlier);
                assert!(pause <= millis(longest), "{earlier}: {pause:?}");
                assert!(pause >= millis(longest) / 2, "{earlier}: {pause:?}");
            }
        }
        let pauses: std::collections::HashSet<_> = (0..50).map(|_| backoff.pause(9)).collect();
        assert!(pauses.len() > 10);
    }

    #[test]
    fn zero_first_pause_still_grows() {
        let longest = Duration::from_millis(128);
        let backoff = Backoff::exponential(Duration::ZERO, 2.0, longest);
        assert_eq!(backoff.pause(0), MIN_PAUSE);
        for earlier in [11, 1023, 1024, 5000, u32::MAX] {
            let pause = backoff.pause(earlier);
            assert!(pause >= longest / 2, "{earlier}: {pause:?}");
        }
        let infinite_factor = Backoff::exponential(Duration::ZERO, f64::INFINITY, longest);
        assert!(infinite_factor.pause(1) >= longest / 2);
    }

    #[test]
    fn constant_backoff_is_constant_with_minimum() {
        let backoff = Backoff::constant(Duration::from_millis(7));
        assert_eq!(backoff.pause(0), Duration::from_millis(7));
        assert_eq!(backoff.pause(1000), Duration::from_millis(7));
        assert_eq!(Backoff::constant(Duration::ZERO).pause(3), MIN_PAUSE);
        let longest_pause = Backoff::constant(Duration::MAX);
        assert_eq!(longest_pause.pause(0), MAX_LEASE, "limited to `MAX_LEASE`");
        let nan_factor = Backoff::exponential(Duration::MAX, f64::NAN, Duration::MAX);
        assert!(nan_factor.pause(5) > Duration::from_secs(1));
    }
}
