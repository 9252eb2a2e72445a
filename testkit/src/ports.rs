//! Ports to listen on.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::net::TcpListener;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Below the range that systems use for outgoing connections.
const RANGE: std::ops::Range<u64> = 10_000..30_000;

/// Returns a loopback port that is free at this moment; another process may still take it. This
/// process uses each port only once, so that no other server listens where a server was killed. (A
/// sentinel would turn that other server into a replica.)
pub(crate) fn free_port() -> u16 {
    static FIRST: OnceLock<u64> = OnceLock::new();
    static NEXT: AtomicU64 = AtomicU64::new(0);
    // Processes that run at the same time start at different ports.
    let first = *FIRST.get_or_init(|| RandomState::new().build_hasher().finish());
    let count = RANGE.end - RANGE.start;
    for _ in 0..count {
        let number = first.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        let port = u16::try_from(RANGE.start + number % count).expect("within the range");
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
    panic!("no port in {RANGE:?} is free");
}
