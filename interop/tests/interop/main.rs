//! Locks shared between Java and Rust: tests of redlatch and the real Redisson on one Redis, on a master with
//! sentinels, and in a cluster. `make interop` builds and runs them.
//!
//! - A test sends commands to two peer processes, `a` and `b`, and compares answers, data and messages.
//! - All tests run with the newest Redisson and most with a late 3.x version, each as `a` and as `b`.
//! - Tests of the data and messages of each kind also run with an old version, in both places.
//! - Tests of features that the old version, 3.16, lacks come after `@not_3_16` or use `compare_except_3_16`. To
//!   save time, long tests come after `@not_3_16`, too: renewal of most kinds, and [`crashes`].
//! - The old version does not run in [`topologies`], because in a cluster it and the others do not wake each other,
//!   nor in [`contention`], to save time.

mod contention;
mod crashes;
mod dumps;
mod events;
mod fair;
mod fenced;
mod group_values;
mod kinds;
mod latches;
mod lock_groups;
mod locks;
mod peers;
mod permits;
mod read_write;
mod scenario;
mod settings;
mod topologies;
