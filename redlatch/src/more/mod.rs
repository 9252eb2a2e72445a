//! Elections, jobs that run once or by a schedule, tickets, and requests to release, all built on the
//! locks.
//!
//! Jobs that run once are neither held nor waited for: two steps on a record. Jobs with a schedule
//! hold a lock besides. Tickets and requests to
//! release add methods to several kinds of lock.

pub(crate) mod election;
#[cfg(feature = "cron")]
pub(crate) mod job;
pub(crate) mod once;
pub(crate) mod revocation;
pub(crate) mod ticket;
