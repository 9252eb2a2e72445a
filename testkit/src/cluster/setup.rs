//! How nodes form a cluster, join it and leave it.

use std::thread;

use super::slots::{cluster_nodes, own_master_id};
use super::{Cluster, ClusterPlan};
use crate::config;
use crate::deployment::Deployment;
use crate::ports::free_port;
use crate::sentinels::FAST_REPLICATION;
use crate::server::Server;
use crate::until::until;

/// Number of slots in a cluster.
const SLOTS: usize = 16_384;

/// Starts a node that knows no other node.
fn start_node(deployment: &Deployment, number: usize, settings: &str) -> Server {
    let settings = |address| {
        // The cluster bus, on which nodes talk to each other, has a separate port.
        let bus = free_port();
        format!("{settings}\ncluster-announce-ip {address}\ncluster-port {bus}\n")
    };
    deployment.start(&format!("node-{number}"), settings, &[])
}

impl Cluster {
    /// Starts a cluster with this configuration. Returns once the nodes agree on the state of the
    /// cluster, all slots are served, and the replicas are in sync.
    ///
    /// # Panics
    ///
    /// If a node does not start, or the nodes do not form a cluster.
    pub fn start_with(plan: ClusterPlan<'_>) -> Cluster {
        let deployment = Deployment::new(plan.tls, plan.separate_addresses);
        let args: Vec<String> = plan.args.iter().map(|&arg| arg.into()).collect();
        let settings = format!(
            "{FAST_REPLICATION}cluster-enabled yes
cluster-config-file nodes.conf
cluster-node-timeout {}
{}",
            plan.node_timeout_millis,
            config::lines(&args)
        );
        let count = plan.masters * (1 + plan.replicas);
        let nodes = thread::scope(|scope| {
            let start = |index| start_node(&deployment, index, &settings);
            let starting: Vec<_> = (0..count)
                .map(|index| scope.spawn(move || start(index)))
                .collect();
            let started = starting
                .into_iter()
                .map(|node| node.join().expect("it starts"));
            started.collect()
        });
        let cluster = Cluster {
            nodes,
            settings,
            nodes_started: count,
            deployment,
        };
        for (index, node) in cluster.nodes[..plan.masters].iter().enumerate() {
            let first = (SLOTS * index / plan.masters).to_string();
            let last = (SLOTS * (index + 1) / plan.masters - 1).to_string();
            let () = node.command(&["CLUSTER", "ADDSLOTSRANGE", &first, &last]);
            // Otherwise the nodes would have to resolve their conflicting epochs one after the other.
            let () = node.command(&["CLUSTER", "SET-CONFIG-EPOCH", &(index + 1).to_string()]);
        }
        for index in 1..count {
            cluster.meet(index, &cluster.nodes[..index]);
        }
        for (index, node) in cluster.nodes.iter().enumerate().skip(plan.masters) {
            cluster.replicate(node, index % plan.masters);
        }
        cluster.await_healthy();
        cluster
    }

    /// Adds a master without slots; returns its index once all nodes know it.
    ///
    /// # Panics
    ///
    /// If it does not start, or does not join the cluster.
    pub fn add_node(&mut self) -> usize {
        let node = start_node(&self.deployment, self.nodes_started, &self.settings);
        self.nodes_started += 1;
        self.nodes.push(node);
        let index = self.nodes.len() - 1;
        self.meet(index, &self.nodes[..index]);
        self.await_healthy();
        index
    }

    /// Removes a node from the cluster and ends it. Its slots and replicas move to another master,
    /// and all nodes forget it. The index of every later node decreases by one.
    ///
    /// # Panics
    ///
    /// If it takes too long.
    pub fn remove_node(&mut self, index: usize) {
        let id = until("an id", || self.id(index));
        let other_master = until("a successor", || self.other_master(index));
        let slots = until("its slots", || self.slots_of(index));
        if !slots.is_empty() {
            self.move_slots(&slots, other_master);
        }
        for node in self.others(index) {
            let follows =
                |id: &String| own_master_id(node).map(|master| master.as_ref() == Some(id));
            if until("its own master", || follows(&id)) {
                self.replicate(node, other_master);
            }
        }
        // Kill it first, or the others would learn of it again by gossip.
        self.nodes[index].kill();
        for node in self.others(index) {
            until("a node forgotten", || {
                if !cluster_nodes(node)?.iter().any(|known| known.id == id) {
                    return Ok(());
                }
                let forget = node.try_command::<()>(&["CLUSTER", "FORGET", &id]);
                forget.map_err(|error| error.to_string())
            });
        }
        self.nodes.remove(index);
        self.await_healthy();
    }

    /// Makes a node meet each of the others. Relying on gossip would take longer.
    fn meet(&self, index: usize, others: &[Server]) {
        let new_node = &self.nodes[index];
        let bus: Vec<String> = new_node.command(&["CONFIG", "GET", "cluster-port"]);
        let (address, port) = (new_node.address().to_string(), new_node.port().to_string());
        for other in others.iter().filter(|node| node.pid().is_some()) {
            let () = other.command(&["CLUSTER", "MEET", &address, &port, &bus[1]]);
        }
    }

    /// Makes a node a replica of a master, as soon as the node knows that master.
    fn replicate(&self, node: &Server, master: usize) {
        let id = until("an id", || self.id(master));
        until("a replica", || {
            let follow = node.try_command::<()>(&["CLUSTER", "REPLICATE", &id]);
            follow.map_err(|error| error.to_string())
        });
    }

    pub(super) fn others(&self, index: usize) -> impl Iterator<Item = &Server> {
        let port = self.nodes[index].port();
        self.running().filter(move |node| node.port() != port)
    }

    /// Returns another master that has slots.
    fn other_master(&self, index: usize) -> Result<usize, String> {
        let port = self.nodes[index].port();
        let served = self.agreed_slots()?;
        let mut masters = served.iter().map(|range| range.master);
        self.index_of(
            masters
                .find(|&master| master != port)
                .ok_or("no other master")?,
        )
    }

    fn slots_of(&self, index: usize) -> Result<Vec<u16>, String> {
        let port = self.nodes[index].port();
        let served = self
            .agreed_slots()?
            .into_iter()
            .filter(|range| range.master == port);
        Ok(served.flat_map(|range| range.slots).collect())
    }
}
