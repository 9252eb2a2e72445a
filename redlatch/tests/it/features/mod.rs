//! What the library offers beyond its primitives, and what it costs.

mod blocking;
mod blocking_multi_lock;
mod client_registry;
mod client_tracking;
mod election;
mod fairness;
mod forked;
mod future_size;
mod job;
mod local_queues;
mod locked;
pub(crate) mod log;
mod metrics;
mod once;
mod permit_hand_over;
mod renewal;
mod revocation;
mod runtimes;
mod tickets;
mod tower;
mod waiting;
mod watch;
