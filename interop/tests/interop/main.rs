//! One lock, held in Java and in Rust: redlatch beside the real Redisson, on one Redis, on a master that sentinels watch, and in
//! a cluster. `make interop` builds and runs it.
//!
//! All tests run with the newest Redisson and most with a late 3.x, each as `a` and as `b`. With an old one, in both places too, run
//! those that show what it keeps in Redis and says, for each kind. What it cannot do stands behind `@late` or in
//! `compare_late`; and behind `@late`, to save time, what only takes longer: renewal of most kinds, and [`crashes`].
//! In [`topologies`] there is no old one: in a cluster it does not wake the others, nor they it. Nor in [`crowds`], to save time.

mod crashes;
mod crowds;
mod dumps;
mod fair;
mod fenced;
mod kinds;
mod latches;
mod locks;
mod permits;
mod play;
mod read_write;
mod settings;
mod several;
mod stand;
mod topologies;
