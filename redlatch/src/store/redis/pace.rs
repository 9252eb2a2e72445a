//! Pauses between tries in an outage: to connect, to send a step, to ask for the topology.
//!
//! 1. Pauses grow from [`FIRST_PAUSE`] while nothing changes, and are random, so that clients and waiters do
//!    not try together.
//! 2. Failures within one pause are one failure: of a thousand waiters, each fails in each round.
//! 3. The first answer, or a server's report that something has changed, ends the pauses: recovery waits for
//!    no pause that an outage has let grow.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout};

use crate::backoff::Backoff;
use crate::sync::Mutex;

/// The first pause: a restarted server is found quickly.
const FIRST_PAUSE: Duration = Duration::from_millis(5);

/// The longest pause before connecting is retried: short enough to find a restarted server quickly, long enough that a
/// thousand clients do not keep it from starting. It is also the longest one between the tries of one request, in
/// addition.
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

/// Counts the failures since the latest success.
#[derive(Debug)]
pub(super) struct Pace {
    longest: Duration,
    failures: u32,
    not_before: Option<Instant>,
}

impl Default for Pace {
    fn default() -> Pace {
        Pace::up_to(LONGEST_PAUSE)
    }
}

impl Pace {
    /// `longest`: the limit of the pauses.
    pub(super) const fn up_to(longest: Duration) -> Pace {
        Pace {
            longest,
            failures: 0,
            not_before: None,
        }
    }

    /// Records a try that has not succeeded, at least not yet. Later failures within the pause that follows are
    /// the same failure. One long after that pause is a first one.
    pub(super) fn failed(&mut self, now: Instant) {
        match self.not_before {
            Some(not_before) if now < not_before => return,
            Some(not_before) if now < not_before + self.longest => self.failures += 1,
            _ => self.failures = 1,
        }
        self.not_before = Some(now + self.pause());
    }

    /// Records a success, or a sign that a try may succeed now.
    pub(super) fn reset(&mut self) {
        *self = Pace::up_to(self.longest);
    }

    /// Returns when the next try may start, if it has to wait.
    pub(super) fn not_before(&self) -> Option<Instant> {
        self.not_before
    }

    /// Returns a pause of the current length; another one for each caller.
    pub(super) fn pause(&self) -> Duration {
        match self.failures.checked_sub(1) {
            Some(earlier) => Backoff::exponential(FIRST_PAUSE, 2.0, self.longest).pause(earlier),
            None => Duration::ZERO,
        }
    }
}

/// The outage of a node, as far as its steps fail. It may last longer than a request is repeated.
#[derive(Debug)]
pub(super) struct Outage {
    /// Whether a step has failed since the latest answer. Saves answers from locking `pace`.
    is_failing: AtomicBool,
    pace: Mutex<Pace>,
    ended: Notify,
}

/// Limit of the pauses of one request in a long outage of its node. Another request's answer ends them.
const LONGEST_PAUSE_IN_OUTAGE: Duration = Duration::from_millis(500);

impl Default for Outage {
    fn default() -> Outage {
        Outage {
            is_failing: AtomicBool::new(false),
            pace: Mutex::new(Pace::up_to(LONGEST_PAUSE_IN_OUTAGE)),
            ended: Notify::new(),
        }
    }
}

impl Outage {
    /// Records that the node has answered a step.
    pub(super) fn record_answer(&self) {
        if self.is_failing.load(Ordering::Relaxed) {
            self.is_failing.store(false, Ordering::Relaxed);
            self.pace.lock().reset();
            self.ended.notify_waiters();
        }
    }

    /// Records a failure, and sleeps. The node may answer other steps than the one that fails, for example if only one
    /// slot is unserved: so an answer does not end the first `shortest` of the pause.
    pub(super) async fn pause(&self, shortest: Duration) {
        let ended = self.ended.notified();
        let pause = {
            let mut pace = self.pace.lock();
            pace.failed(Instant::now());
            self.is_failing.store(true, Ordering::Relaxed);
            pace.pause()
        };
        sleep(shortest).await;
        let _ = timeout(pause.saturating_sub(shortest), ended).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_by_round_until_something_succeeds() {
        let (mut pace, mut now) = (Pace::default(), Instant::now());
        assert!(pace.not_before().is_none() && pace.pause().is_zero());
        for longest in [5, 10, 20, 40, 80, 160, 250, 250] {
            pace.failed(now);
            let not_before = pace.not_before().unwrap();
            let longest = Duration::from_millis(longest);
            assert!((longest / 2..=longest).contains(&(not_before - now)));
            // Another waiter in the same round.
            pace.failed(not_before - Duration::from_nanos(1));
            assert_eq!(pace.not_before(), Some(not_before));
            assert!((longest / 2..=longest).contains(&pace.pause()));
            now = not_before;
        }
        // Long after the pause, or after a success, it is a first failure.
        now += 2 * LONGEST_PAUSE;
        pace.failed(now);
        assert!(pace.not_before().unwrap() - now <= FIRST_PAUSE);
        pace.failed(now + FIRST_PAUSE);
        pace.reset();
        assert!(pace.not_before().is_none());
        pace.failed(now);
        assert!(pace.not_before().unwrap() - now <= FIRST_PAUSE);
    }

    /// Requests of the same node: pauses that have grown in an outage end with its first answer.
    #[tokio::test(start_paused = true)]
    async fn first_answer_ends_the_pauses_of_all_requests() {
        let outage = Outage::default();
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(5) {
            outage.pause(FIRST_PAUSE).await;
        }
        let paused = Instant::now();
        let (_, (), ()) = tokio::join!(
            outage.pause(FIRST_PAUSE),
            outage.pause(Duration::from_millis(20)),
            async {
                sleep(Duration::from_millis(10)).await;
                outage.record_answer();
            },
        );
        assert!(paused.elapsed() <= Duration::from_millis(21));
        outage.pause(Duration::ZERO).await;
        assert!(paused.elapsed() <= Duration::from_millis(30));
    }
}
