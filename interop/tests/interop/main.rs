//! Locks shared between Java and Rust: tests of redlatch and the real Redisson on one Redis, on a master with
//! sentinels, and in a cluster. `make interop` builds and runs them.
//!
//! - A test tells two peer processes, `a` and `b`, what to do with their library, and compares answers, data and
//!   messages.
//! - All tests run with the newest Redisson and most with a late 3.x version, each as `a` and as `b`.
//! - Tests of the data and messages of each kind also run with an old version, in both places.
//! - Tests of features that the old version lacks come after `@late` or use `compare_late`. To save time, long tests
//!   come after `@late`, too: renewal of most kinds, and [`crashes`].
//! - The old version does not run in [`topologies`], because in a cluster it and the others do not wake each other,
//!   nor in [`crowds`], to save time.

mod crashes;
mod crowds;
mod dumps;
mod fair;
mod fenced;
mod kinds;
mod latches;
mod locks;
mod peers;
mod permits;
mod play;
mod read_write;
mod settings;
mod several;
mod topologies;
