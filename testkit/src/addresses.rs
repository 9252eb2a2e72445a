//! Loopback addresses to listen on.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU16, Ordering};

/// The network of servers that each have their own address ([`SentinelPlan::separate_addresses`],
/// [`ClusterPlan::separate_addresses`]).
/// Clients are outside it: they connect from 127.0.0.1.
///
/// [`SentinelPlan::separate_addresses`]: crate::SentinelPlan::separate_addresses
/// [`ClusterPlan::separate_addresses`]: crate::ClusterPlan::separate_addresses
pub const SEPARATE_NETWORK: &str = "127.1.0.0/16";

/// Returns an address that no other server of this process uses if `separate_addresses`, otherwise 127.0.0.1.
pub(crate) fn address(separate_addresses: bool) -> Ipv4Addr {
    static NEXT: AtomicU16 = AtomicU16::new(1);
    if !separate_addresses {
        return Ipv4Addr::LOCALHOST;
    }
    let [high, low] = NEXT.fetch_add(1, Ordering::Relaxed).to_be_bytes();
    Ipv4Addr::new(127, 1, high, low)
}
