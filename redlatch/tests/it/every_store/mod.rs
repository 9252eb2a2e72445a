//! Every primitive: the same tests on the embedded store, servers, Sentinel and Cluster.

mod bad_input;
mod conformance;
mod count_down_latch;
mod expirable_semaphore;
mod fair_lock;
mod fair_read_write_lock;
mod fair_semaphore;
mod fenced_lock;
mod group_lock;
mod lock_kinds;
mod multi_lock;
mod owners;
mod read_write_lock;
mod red_lock;
mod reentry;
mod semaphore;
mod spin_lock;
