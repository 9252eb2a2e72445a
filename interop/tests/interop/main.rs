//! One lock, held in Java and in Rust: redlatch beside the real Redisson, on one Redis, on a master that sentinels watch, and in
//! a cluster. `make interop` builds and runs it.
//!
//! Every test runs four times: with the newest Redisson and with a late 3.x, each as `a` and as `b`.

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
