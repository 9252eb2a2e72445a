//! Elections, jobs that run once, tickets, and requests to release, all built on the locks.
//!
//! Jobs that run once are neither held nor waited for: two steps on a record. Tickets and requests to
//! release add methods to several kinds of lock.

pub(crate) mod election;
pub(crate) mod once;
pub(crate) mod revocation;
pub(crate) mod ticket;
