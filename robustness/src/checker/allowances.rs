//! How late events may be before that is a violation.

use std::time::Duration;

use crate::clock::Time;

/// How long a fair lock is kept for departed waiters: the default of `FairLock::grace_period`.
pub const FAIR_GRACE_PERIOD: Duration = Duration::from_secs(5);

/// How long a client whose connections broke several times in a row pauses before it connects, at most, in nanoseconds.
pub(super) const CONNECT_PAUSE: Time = 250_000_000;

/// How much longer a request may take just after a fault: the client pauses, and for as long again before it repeats the
/// request.
pub(super) const RECONNECT_ALLOWANCE: Time = 2 * CONNECT_PAUSE;

/// How much longer a waiter that has given up may keep its place in the queue, in nanoseconds: the pause after a try to remove
/// it that failed.
pub(super) const REMOVAL_ALLOWANCE: Time = 500_000_000;

/// How late a report or an action may be on a busy machine. Checks of validity allow no margin.
pub const MARGIN: Duration = Duration::from_millis(1500);
