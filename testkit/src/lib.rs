//! What the tests and benchmarks of redlatch stand on: real servers of their own, started and
//! stopped here, and a proxy that breaks connections to order.
#![forbid(unsafe_code)]

mod cluster;
mod config;
mod dir;
mod keeper;
mod monitor;
mod ports;
mod proxy;
mod sentinels;
mod server;
mod until;

pub use cluster::{Cluster, ClusterPlan, Takeover, slot_of};
pub use monitor::{Command, Monitor};
pub use proxy::Proxy;
pub use sentinels::{SentinelPlan, Sentinels};
pub use server::{Server, shared};

use std::sync::atomic::{AtomicU64, Ordering};

/// A name that no other test has.
pub fn unique(what: &str) -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("{what}-{}-{number}", std::process::id())
}
