//! Infrastructure for the tests and benchmarks of redlatch: real servers that are started and
//! stopped here (Redis standalone, with sentinels or as a cluster, and PostgreSQL), and a proxy that
//! breaks connections on demand.
#![forbid(unsafe_code)]

mod addresses;
mod child_guard;
mod cluster;
mod config;
mod deployment;
mod fake_sentinel;
mod log;
mod mariadb;
mod monitor;
mod ports;
mod postgres;
mod proxy;
mod sentinels;
mod server;
mod temp_dir;
mod tls;
mod tls_server;
mod until;

pub use addresses::SEPARATE_NETWORK;
pub use cluster::{Cluster, ClusterPlan, FailoverMode, slot_of};
pub use fake_sentinel::fake_sentinel;
pub use log::Log;
pub use mariadb::Mariadb;
pub use monitor::{Command, Monitor};
pub use postgres::Postgres;
pub use proxy::Proxy;
pub use sentinels::{SentinelPlan, Sentinels};
pub use server::{Server, shared};
pub use temp_dir::TempDir;
pub use tls::{Ca, CertSpec, Identity, LOOPBACK, TlsPlan};
pub use tls_server::TlsServer;

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// The sentinels and Redis servers that the tests of one binary share. Their timeouts are so long
/// that a pause on a busy machine never makes a server count as down.
pub fn shared_sentinels() -> &'static Sentinels {
    static SHARED: OnceLock<Sentinels> = OnceLock::new();
    SHARED.get_or_init(|| {
        Sentinels::start_with(SentinelPlan {
            down_after_millis: NEVER,
            ..SentinelPlan::default()
        })
    })
}

/// The cluster that the tests of one binary share. Its timeouts are equally long.
pub fn shared_cluster() -> &'static Cluster {
    static SHARED: OnceLock<Cluster> = OnceLock::new();
    SHARED.get_or_init(|| {
        Cluster::start_with(ClusterPlan {
            node_timeout_millis: NEVER,
            ..ClusterPlan::default()
        })
    })
}

/// Longer than any test takes, in milliseconds.
const NEVER: u32 = 600_000;

/// Returns a name that is unique among all tests.
pub fn unique(what: &str) -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("{what}-{}-{number}", std::process::id())
}
