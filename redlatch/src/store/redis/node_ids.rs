//! Decides which nodes belong to the cluster, by their ids.
//!
//! Addresses are reused: a node of another cluster may get the address of a node that is gone, and has slots and an
//! epoch of its own. What must not happen: a client takes it for the node before it, and acquires a name there
//! while the holder of that name is valid in the right cluster. So:
//!
//! 1. The ids of all nodes in the answer in use are known, by address. On every new connection a node is asked for its id.
//!    If another one is expected at its address, it is used only if that id is known at another address.
//! 2. An answer that names none of the known nodes is from another cluster, and does not count.
//! 3. A cluster that was set up again has new ids. So both rules end when no answer that counts was received for
//!    [`FORGOTTEN_AFTER`]. From then on a client that reaches only a node of another cluster uses that.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use super::endpoint::Endpoint;

/// How long ids are known after the last answer of a node that belongs to the cluster: as long as earlier epochs are
/// ignored.
pub(super) const FORGOTTEN_AFTER: Duration = Duration::from_secs(10);

/// The ids of the nodes of the cluster.
#[derive(Debug, Default)]
pub(super) struct NodeIds {
    known: BTreeMap<Endpoint, String>,
    /// When the latest answer that counts was received.
    confirmed_at: Option<Instant>,
}

impl NodeIds {
    /// Returns whether the node with this id may be used at this address.
    pub(super) fn accepts_node(&self, at: &Endpoint, id: &str, now: Instant) -> bool {
        !self.known.contains_key(at) || self.contains(id) || self.is_forgotten(now)
    }

    /// Returns whether an answer that names these nodes is from this cluster.
    pub(super) fn accepts_answer(&self, nodes: &BTreeMap<Endpoint, String>, now: Instant) -> bool {
        self.is_named_in(nodes) || self.is_forgotten(now)
    }

    /// Records an answer, whether it is used or not.
    pub(super) fn record_answer(&mut self, nodes: &BTreeMap<Endpoint, String>, now: Instant) {
        if self.is_named_in(nodes) {
            self.confirmed_at = Some(now);
        }
    }

    /// Records the nodes in the answer in use.
    pub(super) fn replace(&mut self, nodes: &BTreeMap<Endpoint, String>, now: Instant) {
        self.known.clone_from(nodes);
        self.confirmed_at = Some(now);
    }

    fn contains(&self, id: &str) -> bool {
        self.known.values().any(|known| known == id)
    }

    /// Returns whether these nodes include a known one. Servers before 4.0 report no ids.
    fn is_named_in(&self, nodes: &BTreeMap<Endpoint, String>) -> bool {
        self.known.is_empty() || nodes.is_empty() || nodes.values().any(|id| self.contains(id))
    }

    fn is_forgotten(&self, now: Instant) -> bool {
        self.confirmed_at
            .is_none_or(|confirmed_at| now >= confirmed_at + FORGOTTEN_AFTER)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(port: u16) -> Endpoint {
        Endpoint::new("h", port)
    }

    fn nodes(all: &[(u16, &str)]) -> BTreeMap<Endpoint, String> {
        all.iter()
            .map(|&(port, id)| (at(port), id.to_owned()))
            .collect()
    }

    #[test]
    fn foreign_node_is_refused_at_known_address() {
        let begun = Instant::now();
        let mut ids = NodeIds::default();
        assert!(ids.accepts_node(&at(1), "a", begun), "nothing is known");
        ids.replace(&nodes(&[(1, "a"), (2, "b")]), begun);
        let cases = [
            (1, "a", true),
            // It has moved.
            (1, "b", true),
            (1, "foreign", false),
            // A node that joins the cluster.
            (3, "new", true),
        ];
        for (port, id, accepted) in cases {
            assert_eq!(
                ids.accepts_node(&at(port), id, begun),
                accepted,
                "{port} {id}"
            );
            // A cluster that was set up again.
            let later = begun + FORGOTTEN_AFTER;
            assert!(ids.accepts_node(&at(port), id, later), "{port} {id}");
        }
    }

    #[test]
    fn answer_counts_if_it_names_known_node() {
        let begun = Instant::now();
        let foreign = nodes(&[(1, "x"), (2, "y")]);
        let mut ids = NodeIds::default();
        assert!(ids.accepts_answer(&foreign, begun), "nothing is known");
        ids.replace(&nodes(&[(1, "a"), (2, "b")]), begun);
        let cases: [(&[(u16, &str)], bool); 4] = [
            (&[(1, "a"), (3, "c")], true),
            (&[(7, "b")], true),
            (&[(1, "x"), (2, "y")], false),
            (&[], true),
        ];
        for (all, accepted) in cases {
            assert_eq!(ids.accepts_answer(&nodes(all), begun), accepted, "{all:?}");
        }
        // Known nodes that answer all the time, also if their answers are not used.
        for n in 1..10 {
            let now = begun + n * FORGOTTEN_AFTER / 2;
            ids.record_answer(&nodes(&[(9, "a")]), now);
            ids.record_answer(&foreign, now);
            assert!(!ids.accepts_answer(&foreign, now));
            assert!(!ids.accepts_node(&at(1), "x", now));
        }
        let last = begun + 9 * FORGOTTEN_AFTER / 2;
        assert!(ids.accepts_answer(&foreign, last + FORGOTTEN_AFTER));
        ids.replace(&foreign, last);
        assert!(!ids.accepts_answer(&nodes(&[(1, "a")]), last));
    }
}
