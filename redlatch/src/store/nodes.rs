//! Identities of servers, and the servers that may have lost data.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use tokio::sync::Notify;

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

/// Nodes that may have lost data, because a different server process answers for them: after a restart or a
/// failover. The watchdog checks the holds there.
#[derive(Default)]
pub(crate) struct SuspectNodes {
    nodes: Mutex<BTreeSet<NodeId>>,
    added: Notify,
}

impl SuspectNodes {
    pub(crate) fn add(&self, node: NodeId) {
        self.nodes.lock().insert(node);
        self.added.notify_one();
    }

    /// Waits until there are such nodes, and returns those added since the last call.
    ///
    /// Cancel-safe: the nodes are removed only when they are returned.
    pub(crate) async fn next(&self) -> BTreeSet<NodeId> {
        let added = || Some(std::mem::take(&mut *self.nodes.lock())).filter(|all| !all.is_empty());
        wait_for(&self.added, added).await
    }
}
