//! Identities of servers, and what may be lost at them.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use tokio::sync::Notify;

use crate::sync::{Mutex, wait_for};

/// Identifies a server with data for as long as this process knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct NodeId(u64);

impl NodeId {
    /// Returns an id that no other node of this process has.
    pub(crate) fn next() -> NodeId {
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
    /// Whether servers are asked to report changes of keys that a renewal has read. A server process that refuses is not asked again: see `store/redis/tracking`.
    tracking: bool,
}

/// What may be lost.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Suspected {
    /// Nodes that may have lost all data: a different server process answers for them after a restart or a failover.
    pub(crate) nodes: BTreeSet<NodeId>,
    /// Nodes whose data was deleted, whose connection broke, or that did not report changes for a while. This may be so often.
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
            tracking,
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
        self.tracking
    }
}
