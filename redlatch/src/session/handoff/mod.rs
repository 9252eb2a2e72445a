//! The handoff: an object passes to its next holder without being free in between.
//!
//! 1. *In the client* (`local`): the next request of this client takes over the hold as it is, under the owner that the store
//!    knows. No command, or one that asks the store after a long section.
//! 2. *In the store* (`in_store`): one step puts a successor in the place of the owner. A full release does so for a waiter of
//!    this client that needs an owner, a lease or a token of its own; for the ticket that its hold has not adopted; and for the
//!    keeper of a minimum time.
//! 3. *To a ticket* (`ticket`): the same step, for a caller that moves its hold out of this client.
//!
//! A release tries them in this order. If none is possible, it frees the object. The queue of a fair lock is apart: there the
//! store chooses the next holder, in the steps of that lock.

mod in_store;
mod local;
mod ticket;

pub(crate) use in_store::StoreHandoff;
pub(crate) use local::LocalHandoff;
#[cfg(test)]
pub(crate) use local::{WaiterCounts, check_handoff};

#[cfg(test)]
mod in_store_tests;
#[cfg(test)]
mod local_tests;
