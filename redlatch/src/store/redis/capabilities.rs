//! What one server can do, as its answers have shown. Nothing is concluded from its version or mode.
//!
//! | question | learned from | otherwise |
//! |---|---|---|
//! | Does it report changed keys? | the answers to `CLIENT TRACKING` ([`Tracking`]), RESP2 | losses are found by renewals |
//! | Does it tell what replicas have? | the answers to `ROLE` and `WAIT` | acquisitions are not confirmed, with one warning |
//! | Does a connection with subscriptions run commands? | RESP2, replies in place of confirmations, refusals | subscriptions get a connection of their own |
//!
//! The first two are asked anew when another process replaces the server. The third is not: a connection of its own serves
//! subscriptions at any server. Whether keys have slots is a question to the whole store ([`Topology`](super::topology)), and
//! whether a node has sharded channels one to each connection ([`pubsub`](super::pubsub)).

use std::sync::atomic::{AtomicBool, Ordering};

use super::tracking::Tracking;
use crate::sync::Mutex;

#[derive(Debug, Default)]
pub(super) struct Capabilities {
    pub(super) tracking: Mutex<Tracking>,
    /// Whether it was logged that replicas confirm nothing.
    is_unconfirmed: AtomicBool,
    subscribes_apart: AtomicBool,
    /// Whether it was logged that there are no reports without RESP3.
    is_without_reports: AtomicBool,
}

impl Capabilities {
    /// Handles that another process has replaced the server, or may have (`known`: it has).
    pub(super) fn replaced(&self, known: bool) {
        *self.tracking.lock() = Tracking::default();
        if known {
            self.is_unconfirmed.store(false, Ordering::Relaxed);
        }
    }

    /// Records that the server cannot tell what its replicas have.
    pub(super) fn record_unconfirmed(&self, refusal: &str) {
        if !self.is_unconfirmed.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                refusal,
                "the server cannot tell whether its replicas have what was acquired: a failover may lose it"
            );
        }
    }

    /// Records that a connection with subscriptions runs no commands.
    pub(super) fn record_subscribes_apart(&self) {
        if !self.subscribes_apart.swap(true, Ordering::Relaxed) {
            tracing::info!("subscriptions have a connection of their own");
        }
    }

    /// Records that a connection without RESP3 cannot carry reports of changed keys. Returns whether that is new.
    pub(super) fn record_without_reports(&self) -> bool {
        !self.is_without_reports.swap(true, Ordering::Relaxed)
    }

    /// Returns whether subscriptions need a connection of their own.
    pub(super) fn subscribes_apart(&self) -> bool {
        self.subscribes_apart.load(Ordering::Relaxed)
    }
}
