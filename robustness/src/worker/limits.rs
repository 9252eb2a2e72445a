//! Limits of holds: a fixed lease, `at_most`, `fed_every` and `at_least`.
//!
//! 1. A task draws the limits of a request together with the time of its section. About half of the
//!    limits end before the section.
//! 2. Some holders drop their guard, and then wait until their client has settled that.
//! 3. A holder feeds its hold twice in each interval. Half of the holders stop that at a random
//!    moment, as a task that hangs.

use std::time::Duration;

use redlatch::{Acquire, Client, HasLease, HasMinimum, TryAcquire};

use super::section::ReleaseMode;
use crate::clock::{Time, nanos};
use crate::history::Limits;
use crate::random::Random;

/// What a task needs to set limits. Its random numbers are its own, so that those of the sections
/// do not depend on it.
#[derive(Debug)]
pub(crate) struct LimitUse {
    pub(super) client: Client,
    pub(super) random: Random,
    pub(super) lease: Duration,
}

/// How a holder feeds its hold.
#[derive(Debug, Clone, Copy)]
pub(super) struct Feeding {
    pub(super) interval: Duration,
    /// Later the holder feeds nothing.
    pub(super) lasts: Duration,
}

impl LimitUse {
    /// Draws the limits of a request whose section lasts this long. No limit is longer than a
    /// lease.
    pub(super) fn draw(&mut self, time: Duration) -> Limits {
        let (random, lease) = (&mut self.random, self.lease);
        let millisecond = Duration::from_millis(1);
        let longest = (time * 2).clamp(millisecond, lease);
        let mut draw = |least: Duration| {
            let limit = random.between(least, longest.max(least));
            // In whole milliseconds, as in the store.
            Some(nanos(limit) / 1_000_000 * 1_000_000)
        };
        let (short, long) = (draw(millisecond), draw(lease / 8));
        let mut limits = Limits::default();
        match random.below(10) {
            0 => limits.lease = long,
            1 => limits.at_most = short,
            2 => limits.fed_every = short,
            3 => (limits.at_most, limits.fed_every) = (long, short),
            4 => limits.at_least = short,
            _ => {}
        }
        limits
    }

    /// Returns how a holder feeds its hold.
    pub(super) fn feeding(&mut self, interval: Time) -> Feeding {
        Feeding {
            interval: duration(interval),
            lasts: match self.random.below(2) {
                0 => Duration::MAX,
                _ => self.random.between(Duration::ZERO, self.lease),
            },
        }
    }

    /// Draws how a guard is released.
    pub(super) fn release_mode(&mut self) -> ReleaseMode {
        match self.random.below(8) {
            0 => ReleaseMode::Flush(self.random.between(Duration::ZERO, self.lease / 2)),
            _ => ReleaseMode::Unlock,
        }
    }
}

/// A request that can have limits.
pub(super) trait Limited: Sized {
    /// Sets all limits except for `at_least`.
    fn limited(self, limits: Limits) -> Self;
}

/// A request that can have a minimum time.
pub(super) trait Kept: Sized {
    /// Sets `at_least`.
    fn kept(self, limits: Limits) -> Self;
}

macro_rules! limited {
    ($($request:ident)*) => { $(
        impl<R: HasLease> Limited for $request<R> {
            fn limited(mut self, limits: Limits) -> Self {
                if let Some(lease) = limits.lease {
                    self = self.lease(duration(lease));
                }
                if let Some(limit) = limits.at_most {
                    self = self.at_most(duration(limit));
                }
                if let Some(interval) = limits.fed_every {
                    self = self.fed_every(duration(interval));
                }
                self
            }
        }

        impl<R: HasMinimum> Kept for $request<R> {
            fn kept(self, limits: Limits) -> Self {
                match limits.at_least {
                    Some(at_least) => self.at_least(duration(at_least)),
                    None => self,
                }
            }
        }
    )* };
}

limited!(Acquire TryAcquire);

fn duration(time: Time) -> Duration {
    Duration::from_nanos(time.unsigned_abs())
}
