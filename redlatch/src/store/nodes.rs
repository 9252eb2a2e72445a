//! Identities of servers, and what may be lost at them.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use tokio::sync::Notify;

use crate::error::Error;
use crate::sync::{Mutex, wait_for};

/// Identifies a server with data for as long as this process knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct NodeId(u64);

impl NodeId {
    /// Returns an id that no other node of this process has.
    pub(super) fn next() -> NodeId {
        static LATEST: AtomicU64 = AtomicU64::new(0);
        NodeId(LATEST.fetch_add(1, Ordering::Relaxed) + 1)
    }
}

/// Identifies the server at the other end of a connection. After a failover in a cluster or behind sentinels it
/// is a different one, at another address. Small, because every request keeps it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct ServerId(u32);

impl ServerId {
    /// Returns an id that no other server has.
    pub(crate) fn next() -> ServerId {
        static LATEST: AtomicU32 = AtomicU32::new(0);
        ServerId(LATEST.fetch_add(1, Ordering::Relaxed).wrapping_add(1))
    }
}

/// What servers may have lost, until the watchdog checks the holds there.
pub(crate) struct Suspects {
    pending: Mutex<Suspected>,
    added: Notify,
    /// Whether servers report changes of keys that a renewal has read, as far as is known.
    tracking: AtomicBool,
    /// How many renewals in a row that asked for reports have failed.
    failures: AtomicU32,
}

/// After so many failures in a row, servers are no longer asked for reports: one may end the connection because of that.
const MAX_FAILURES: u32 = 3;

/// What may be lost.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Suspected {
    /// Nodes that may have lost all data: a different server process answers for them after a restart or a failover.
    pub(crate) nodes: BTreeSet<NodeId>,
    /// Nodes whose data was deleted, or that did not report changes for a while. This may be so often.
    pub(crate) changed_nodes: BTreeSet<NodeId>,
    /// Keys that another client has changed or deleted.
    pub(crate) keys: BTreeSet<Box<str>>,
}

impl Suspects {
    /// `tracking`: whether servers are asked to report changes of keys.
    pub(crate) fn new(tracking: bool) -> Suspects {
        Suspects {
            pending: Mutex::default(),
            added: Notify::new(),
            tracking: tracking.into(),
            failures: AtomicU32::new(0),
        }
    }

    pub(crate) fn add_node(&self, node: NodeId) {
        self.pending.lock().nodes.insert(node);
        self.added.notify_one();
    }

    pub(crate) fn add_changed_node(&self, node: NodeId) {
        self.pending.lock().changed_nodes.insert(node);
        self.added.notify_one();
    }

    pub(crate) fn add_key(&self, key: &str) {
        self.pending.lock().keys.insert(key.into());
        self.added.notify_one();
    }

    /// Waits until there are any, and returns those added since the last call.
    ///
    /// Cancel-safe: they are removed only when they are returned.
    pub(crate) async fn next(&self) -> Suspected {
        let added = || {
            let added = std::mem::take(&mut *self.pending.lock());
            (added != Suspected::default()).then_some(added)
        };
        wait_for(&self.added, added).await
    }

    /// Returns whether servers are asked to report changes of keys.
    pub(crate) fn is_tracking(&self) -> bool {
        self.tracking.load(Ordering::Relaxed)
    }

    /// Records that a server cannot report changes.
    pub(crate) fn stop_tracking(&self, reason: &dyn fmt::Display) {
        if self.tracking.swap(false, Ordering::Relaxed) {
            tracing::debug!(%reason, "the server does not report changed locks");
        }
    }

    /// Records the outcome of a renewal that asked for reports.
    pub(crate) fn tracked(&self, outcome: Result<(), &Error>) {
        match outcome {
            Ok(()) => self.failures.store(0, Ordering::Relaxed),
            Err(error) if self.failures.fetch_add(1, Ordering::Relaxed) + 1 == MAX_FAILURES => {
                self.stop_tracking(error);
            }
            Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One server may end the connection because of the request. A single failure has other reasons.
    #[test]
    fn tracking_ends_after_three_failures_in_a_row() {
        let suspects = Suspects::new(true);
        let error = Error::NoRuntime;
        for outcome in [Err(&error), Err(&error), Ok(()), Err(&error), Err(&error)] {
            suspects.tracked(outcome);
            assert!(suspects.is_tracking());
        }
        suspects.tracked(Err(&error));
        assert!(!suspects.is_tracking());
    }
}
