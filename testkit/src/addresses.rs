//! Loopback addresses to listen on.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU16, Ordering};

/// The network of servers that have an address each ([`SentinelPlan::apart`], [`ClusterPlan::apart`]).
/// Clients are not in it: they come from 127.0.0.1.
///
/// [`SentinelPlan::apart`]: crate::SentinelPlan::apart
/// [`ClusterPlan::apart`]: crate::ClusterPlan::apart
pub const APART: &str = "127.1.0.0/16";

/// An address that no other server of this process has, or the same for all.
pub(crate) fn address(apart: bool) -> Ipv4Addr {
    static NEXT: AtomicU16 = AtomicU16::new(1);
    if !apart {
        return Ipv4Addr::LOCALHOST;
    }
    let [high, low] = NEXT.fetch_add(1, Ordering::Relaxed).to_be_bytes();
    Ipv4Addr::new(127, 1, high, low)
}
