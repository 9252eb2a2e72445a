//! One folder per primitive: its rules, its Lua scripts, its handle and its guard. `lock`
//! contains requests and guards, and what all locks share; `lock_set` what several locks as one share.

// First, so that the page of `Lock` begins with the methods that all locks have.
pub(crate) mod lock;

pub(crate) mod count_down_latch;
pub(crate) mod counter;
pub(crate) mod election;
pub(crate) mod expirable_semaphore;
pub(crate) mod fair_lock;
pub(crate) mod fenced_lock;
pub(crate) mod group_lock;
pub(crate) mod inspect;
pub(crate) mod lock_set;
pub(crate) mod multi_lock;
pub(crate) mod once;
pub(crate) mod read_write_lock;
pub(crate) mod red_lock;
pub(crate) mod reentrant;
pub(crate) mod revocation;
pub(crate) mod semaphore;
pub(crate) mod spin_lock;
pub(crate) mod ticket;

#[cfg(test)]
pub(crate) mod differential;
#[cfg(test)]
mod exploration;
#[cfg(test)]
mod refusals;
