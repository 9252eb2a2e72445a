//! Tests of the public API: on the embedded store, on real servers, and in virtual time.

// Lower than the default of 128: see `future_size`.
#![recursion_limit = "100"]

#[macro_use]
mod common;

mod acl;
mod addresses;
mod at_least;
mod availability;
mod bad_input;
mod blocking;
mod blocking_multi_lock;
mod cancel_safety;
mod changing_credentials;
mod client_registry;
mod client_tracking;
mod cluster;
mod cluster_moving;
mod cluster_update;
mod conformance;
mod count_down_latch;
mod election;
mod examples;
mod expirable_semaphore;
mod fair_lock;
mod fairness;
mod feature_pairs;
mod fenced_lock;
mod fencing_tokens;
mod frozen_node;
mod full_buffers;
mod future_size;
mod group_lock;
mod guide;
mod hold_generations;
mod hold_limits;
mod literal_keys;
mod local_queues;
mod lock_kinds;
mod locked;
mod log;
mod losses;
mod many_callers;
mod metrics;
mod moved_endpoint;
mod multi_lock;
mod once;
mod outage_load;
mod owners;
mod permit_hand_over;
mod read_write_lock;
mod red_lock;
mod reentry;
mod renewal;
mod replicas;
mod resp2;
mod revocation;
mod runtimes;
mod semaphore;
mod sentinel;
mod server_failures;
mod sharded_endpoint;
mod spin_lock;
mod tickets;
mod tls;
mod tls_topologies;
mod topology;
mod tower;
mod virtual_time;
mod wait_limits;
mod waiting;
mod watch;
