//! Tests of the public API: on the embedded store, on real servers, and in virtual time.

// Lower than the default of 128: see `promises::futures`.
#![recursion_limit = "100"]

#[macro_use]
mod common;

mod acl;
mod bad_input;
mod blocking;
mod blocking_multi_lock;
mod cancel;
mod cluster;
mod cluster_moving;
mod conformance;
mod count_down_latch;
mod examples;
mod examples_cleanup;
mod expirable_semaphore;
mod fair_lock;
mod faults;
mod fenced_lock;
mod lock_kinds;
mod log;
mod multi_lock;
mod owners;
mod promises;
mod quickstart;
mod read_write_lock;
mod red_lock;
mod regressions;
mod replicas;
mod semaphore;
mod sentinel;
mod spin_lock;
mod tls;
mod tls_topologies;
mod topology;
mod virtual_time;
mod waiting;
