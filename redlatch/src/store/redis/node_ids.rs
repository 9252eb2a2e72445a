//! Decides which nodes belong to the cluster, by their ids.
//!
//! Addresses are reused: a node of another cluster may get the address of a node that is gone, and has slots and an
//! epoch of its own. What must not happen: a client takes it for the node before it, and acquires a name there
//! while the holder of that name is valid in the right cluster. So:
//!
//! 1. The ids of all nodes in the answer in use are known, by address. On every new connection a node is asked for its id.
//!    If another one is expected at its address, it is used only if that id is known at another address.
//! 2. An answer that names none of the known nodes is from another cluster, and does not count.
//! 3. A cluster that was set up again has new ids. So both rules end when the nodes have been queried for
//!    [`FORGOTTEN_AFTER`] and none of the answers named a known node. From then on a client that reaches only a node of another
//!    cluster uses that. Time alone ends nothing: a client that was stopped, or did not run, has queried no node.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use super::endpoint::Endpoint;

/// How long ids are known while no answer is from a node that belongs to the cluster: as long as earlier epochs are ignored.
pub(super) const FORGOTTEN_AFTER: Duration = Duration::from_secs(10);

/// The ids of the nodes of the cluster.
#[derive(Debug, Default)]
pub(super) struct NodeIds {
    known: BTreeMap<Endpoint, String>,
    /// Since when no query of the nodes has found a known one.
    missed_since: Option<Instant>,
}

impl NodeIds {
    /// Returns whether the node with this id may be used at this address.
    pub(super) fn accepts_node(&self, at: &Endpoint, id: &str, now: Instant) -> bool {
        !self.known.contains_key(at) || self.contains(id) || self.is_forgotten(now)
    }

    /// Returns whether no node of the cluster is known yet.
    pub(super) fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// Returns whether an answer that names these nodes is from this cluster. Servers before 4.0 report no ids.
    pub(super) fn are_ours(&self, nodes: &BTreeMap<Endpoint, String>) -> bool {
        nodes.is_empty() || self.includes_known(nodes)
    }

    /// Handles the end of a query of several nodes, each of whose answers names these nodes. Returns whether answers of another
    /// cluster may be used.
    pub(super) fn end_query<'a>(
        &mut self,
        mut answers: impl Iterator<Item = &'a BTreeMap<Endpoint, String>>,
        now: Instant,
    ) -> bool {
        match answers.any(|nodes| self.includes_known(nodes)) {
            true => self.missed_since = None,
            false => drop(self.missed_since.get_or_insert(now)),
        }
        self.is_forgotten(now)
    }

    /// Records the nodes in the answer in use.
    pub(super) fn replace(&mut self, nodes: &BTreeMap<Endpoint, String>) {
        self.known.clone_from(nodes);
        self.missed_since = None;
    }

    fn contains(&self, id: &str) -> bool {
        self.known.values().any(|known| known == id)
    }

    /// Returns whether these nodes include a known one, or none is known.
    fn includes_known(&self, nodes: &BTreeMap<Endpoint, String>) -> bool {
        self.known.is_empty() || nodes.values().any(|id| self.contains(id))
    }

    fn is_forgotten(&self, now: Instant) -> bool {
        self.missed_since
            .is_some_and(|missed_since| now >= missed_since + FORGOTTEN_AFTER)
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
        ids.replace(&nodes(&[(1, "a"), (2, "b")]));
        let cases = [
            (1, "a", true),
            // It has moved.
            (1, "b", true),
            (1, "foreign", false),
            // A node that joins the cluster.
            (3, "new", true),
        ];
        for (port, id, accepted) in cases {
            // Also if the client did not run in between.
            for now in [begun, begun + 10 * FORGOTTEN_AFTER] {
                let accepts = ids.accepts_node(&at(port), id, now);
                assert_eq!(accepts, accepted, "{port} {id}");
            }
        }
    }

    #[test]
    fn answer_counts_if_it_names_known_node() {
        let (foreign, ours) = (nodes(&[(1, "x"), (2, "y")]), nodes(&[(9, "a")]));
        let mut ids = NodeIds::default();
        assert!(ids.are_ours(&foreign), "nothing is known");
        ids.replace(&nodes(&[(1, "a"), (2, "b")]));
        let cases: [(&[(u16, &str)], bool); 4] = [
            (&[(1, "a"), (3, "c")], true),
            (&[(7, "b")], true),
            (&[(1, "x"), (2, "y")], false),
            (&[], true),
        ];
        for (all, accepted) in cases {
            assert_eq!(ids.are_ours(&nodes(all)), accepted, "{all:?}");
        }
        // Known nodes answer from time to time, also if their answers are not used.
        let mut now = Instant::now();
        for _ in 0..10 {
            now += FORGOTTEN_AFTER / 2;
            assert!(!ids.end_query([&foreign].into_iter(), now));
            now += FORGOTTEN_AFTER / 2;
            assert!(!ids.end_query([&foreign, &ours].into_iter(), now));
        }
        // A cluster that was set up again. A node without slots names none, and does not confirm the ids.
        let none = nodes(&[]);
        assert!(!ids.end_query([].into_iter(), now));
        assert!(!ids.accepts_node(&at(1), "x", now));
        now += FORGOTTEN_AFTER;
        assert!(ids.end_query([&none, &foreign].into_iter(), now));
        assert!(ids.accepts_node(&at(1), "x", now));
        ids.replace(&foreign);
        assert!(!ids.are_ours(&ours) && !ids.end_query([&ours].into_iter(), now));
    }
}
