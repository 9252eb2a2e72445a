//! The limits of a hold that the watchdog renews: how long it may last, and how often its holder
//! must feed it.
//!
//! 1. A request may set limits. They start when the request adds its guard, or for several locks,
//!    when all of them or the majority are held. They belong to the hold period.
//! 2. If several guards of a hold have limits, the earliest end and the shortest interval apply to
//!    all of them, until the last guard is released.
//! 3. The end of a limit is a second end of the hold, beside that of the lease, and is noticed in
//!    the same way. The hold is lost then, although the store still has it, and is released only
//!    afterwards.
//!
//! Invariant: no other owner acquires the object while the hold counts as valid. What else must not
//! happen, and what prevents it:
//!
//! - *A request limits a hold that its owner had before.* The limits of a request for several locks
//!   start last, so a failed request leaves none.
//! - *A hold is valid or renewed after the limit.* A lost hold is not renewed, and its release
//!   takes its turn behind a renewal in flight. Mutant `at-most-ignored`.
//! - *A hold is lost although its holder feeds it.* `feed` restarts the interval. Mutant
//!   `fed-hold-is-lost`.
//! - *The hold stays in the store.* The loss is a change that the store has not acknowledged. The
//!   watchdog has the session settle it in the background like a dropped guard, until the lease has
//!   ended.
//! - *The release removes a later hold of the same owner.* It goes through a counted reference, and
//!   is sent only if the owner's latest hold takes turns with the lost one. If that is a later
//!   generation, its own count is sent, and only if it was not released yet.
//! - *The lock passes on with the limit of the former request.* The hold period of the next request
//!   starts without limits, before the hold is offered. Mutant `limit-passes-on`.

use std::time::Duration;

use tokio::time::Instant;

use crate::error::{Error, Loss, Result};

/// The limits that a request sets for its hold.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct HoldLimits {
    /// How long the hold may last.
    pub(crate) at_most: Option<Duration>,
    /// How often the holder must feed the hold.
    pub(crate) fed_every: Option<Duration>,
}

impl HoldLimits {
    /// Fails if a limit is zero: the hold would be lost as soon as it is acquired.
    pub(crate) fn check(&self) -> Result<()> {
        for (setting, limit) in [("at_most", self.at_most), ("fed_every", self.fed_every)] {
            if limit == Some(Duration::ZERO) {
                return Err(Error::InvalidSetting {
                    setting,
                    reason: "the limit is zero; use a longer one".into(),
                });
            }
        }
        Ok(())
    }
}

/// A limit, and when it ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Limit {
    length: Duration,
    end: Instant,
}

impl Limit {
    /// Starts a limit. `None`: there is none, or the clock cannot represent its end.
    fn start(length: Option<Duration>, now: Instant) -> Option<Limit> {
        let length = length?;
        let end = now.checked_add(length)?;
        Some(Limit { length, end })
    }
}

/// The limits of a hold period.
#[derive(Debug, Clone, Default)]
pub(crate) struct RunningLimits {
    at_most: Option<Limit>,
    fed_every: Option<Limit>,
}

impl RunningLimits {
    pub(crate) fn start(limits: &HoldLimits, now: Instant) -> RunningLimits {
        RunningLimits {
            at_most: Limit::start(limits.at_most, now),
            fed_every: Limit::start(limits.fed_every, now),
        }
    }

    /// Starts the limits of another guard.
    pub(super) fn add(&mut self, limits: &HoldLimits, now: Instant) {
        self.merge(&RunningLimits::start(limits, now));
    }

    /// Adds limits that run already.
    pub(super) fn merge(&mut self, other: &RunningLimits) {
        let both = self.at_most.into_iter().chain(other.at_most);
        self.at_most = both.min_by_key(|limit| limit.end);
        let both = self.fed_every.into_iter().chain(other.fed_every);
        self.fed_every = both.reduce(|one, other| Limit {
            length: one.length.min(other.length),
            end: one.end.min(other.end),
        });
    }

    /// Restarts the interval in which the holder must feed the hold.
    pub(crate) fn feed(&mut self, now: Instant) {
        if let Some(interval) = &self.fed_every {
            self.fed_every = Limit::start(Some(interval.length), now);
        }
    }

    /// Returns the first end, and how the hold is lost then.
    pub(super) fn first_end(&self) -> Option<(Instant, Loss)> {
        let at_most = |Limit { length, end }| (end, Loss::HeldTooLong { limit: length });
        let fed_every = |Limit { length, end }| (end, Loss::NotFed { limit: length });
        let ends = [self.at_most.map(at_most), self.fed_every.map(fed_every)];
        ends.into_iter().flatten().min_by_key(|(end, _)| *end)
    }

    /// Returns the limits without their ends.
    pub(super) fn lengths(&self) -> HoldLimits {
        HoldLimits {
            at_most: self.at_most.map(|limit| limit.length),
            fed_every: self.fed_every.map(|limit| limit.length),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_prelude::SECOND;

    fn limits(at_most: u32, fed_every: u32) -> HoldLimits {
        let seconds = |seconds| (seconds > 0).then_some(seconds * SECOND);
        HoldLimits {
            at_most: seconds(at_most),
            fed_every: seconds(fed_every),
        }
    }

    fn too_long(seconds: u32) -> Loss {
        let limit = seconds * SECOND;
        Loss::HeldTooLong { limit }
    }

    fn not_fed(seconds: u32) -> Loss {
        let limit = seconds * SECOND;
        Loss::NotFed { limit }
    }

    #[test]
    fn first_end_of_both_limits_counts() {
        let now = Instant::now();
        let mut running = RunningLimits::default();
        assert_eq!(running.first_end(), None);
        running.add(&limits(10, 4), now);
        assert_eq!(running.first_end(), Some((now + 4 * SECOND, not_fed(4))));
        running.feed(now + 3 * SECOND);
        assert_eq!(running.first_end(), Some((now + 7 * SECOND, not_fed(4))));
        running.feed(now + 7 * SECOND);
        assert_eq!(running.first_end(), Some((now + 10 * SECOND, too_long(10))));
    }

    #[test]
    fn feeding_needs_interval() {
        let now = Instant::now();
        let mut running = RunningLimits::default();
        running.add(&limits(10, 0), now);
        running.feed(now + SECOND);
        assert_eq!(running.first_end(), Some((now + 10 * SECOND, too_long(10))));
    }

    #[test]
    fn later_guard_only_shortens_limits() {
        let now = Instant::now();
        let mut running = RunningLimits::default();
        running.add(&limits(10, 10), now);
        running.add(&limits(9, 20), now + 2 * SECOND);
        assert_eq!(
            running.at_most.map(|limit| limit.end),
            Some(now + 10 * SECOND)
        );
        assert_eq!(
            running.fed_every.map(|limit| limit.end),
            Some(now + 10 * SECOND)
        );
        running.add(&limits(5, 5), now + 3 * SECOND);
        let end = now + 8 * SECOND;
        assert_eq!(running.at_most.map(|limit| limit.end), Some(end));
        assert_eq!(running.fed_every.map(|limit| limit.end), Some(end));
        // Its end was later, but from the next time on, its interval counts.
        running.add(&limits(0, 2), now + 7 * SECOND);
        assert_eq!(running.fed_every.map(|limit| limit.end), Some(end));
        running.feed(now + 7 * SECOND);
        assert_eq!(running.first_end(), Some((end, too_long(5))));
        assert_eq!(
            running.fed_every.map(|limit| limit.length),
            Some(2 * SECOND)
        );
    }

    #[test]
    fn merged_limits_end_with_the_first_of_both() {
        let now = Instant::now();
        let running = |at_most, fed_every| RunningLimits::start(&limits(at_most, fed_every), now);
        let (long, short, none) = (running(10, 8), running(5, 2), running(0, 0));
        for (one, other) in [
            (&long, &short),
            (&short, &long),
            (&short, &none),
            (&none, &short),
        ] {
            let mut merged = one.clone();
            merged.merge(other);
            assert_eq!(merged.at_most, short.at_most);
            assert_eq!(merged.fed_every, short.fed_every);
        }
    }

    #[test]
    fn zero_is_refused() {
        let zero = HoldLimits {
            at_most: Some(Duration::ZERO),
            fed_every: None,
        };
        assert!(zero.check().is_err());
        assert!(limits(1, 1).check().is_ok() && HoldLimits::default().check().is_ok());
    }
}
