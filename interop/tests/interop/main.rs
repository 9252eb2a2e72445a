//! One lock, held in Java and in Rust: redlatch beside the real Redisson, on one Redis, on a master that sentinels watch, and in
//! a cluster. `make interop` builds and runs it.
//!
//! Most tests run six times: with the newest Redisson, a late 3.x and an old one, each as `a` and as `b`. What the old one
//! cannot do stands behind `@late` or in `compare_late`. In [`topologies`] there is no old one: in a cluster it does not wake
//! the others, nor they it. Nor in [`crowds`], to save time.

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
