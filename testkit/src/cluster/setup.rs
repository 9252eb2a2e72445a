//! How nodes form a cluster, join it and leave it.

use std::thread;

use super::slots::{known, known_master};
use super::{Cluster, ClusterPlan};
use crate::config;
use crate::deployment::Deployment;
use crate::ports::free_port;
use crate::sentinels::REPLICATION;
use crate::server::Server;
use crate::until::until;

/// Number of slots in a cluster.
const SLOTS: usize = 16_384;

pub(super) fn cluster(plan: ClusterPlan<'_>) -> Cluster {
    let deployment = Deployment::new(plan.tls, plan.apart);
    let args: Vec<String> = plan.args.iter().map(|&arg| arg.into()).collect();
    let settings = format!(
        "{REPLICATION}cluster-enabled yes
cluster-config-file nodes.conf
cluster-node-timeout {}
{}",
        plan.node_timeout_millis,
        config::lines(&args)
    );
    let count = plan.masters * (1 + plan.replicas);
    let nodes = thread::scope(|scope| {
        let start = |place| node(&deployment, place, &settings);
        let starting: Vec<_> = (0..count)
            .map(|place| scope.spawn(move || start(place)))
            .collect();
        let started = starting
            .into_iter()
            .map(|node| node.join().expect("it starts"));
        started.collect()
    });
    let cluster = Cluster {
        nodes,
        settings,
        homes: count,
        deployment,
    };
    for (place, node) in cluster.nodes[..plan.masters].iter().enumerate() {
        let first = (SLOTS * place / plan.masters).to_string();
        let last = (SLOTS * (place + 1) / plan.masters - 1).to_string();
        let () = node.ask(&["CLUSTER", "ADDSLOTSRANGE", &first, &last]);
        // Otherwise the nodes would have to resolve their conflicting epochs one after the other.
        let () = node.ask(&["CLUSTER", "SET-CONFIG-EPOCH", &(place + 1).to_string()]);
    }
    for place in 1..count {
        cluster.introduce(place, &cluster.nodes[..place]);
    }
    for (place, node) in cluster.nodes.iter().enumerate().skip(plan.masters) {
        cluster.follow(node, place % plan.masters);
    }
    cluster.await_whole();
    cluster
}

/// Starts a node that knows no other node.
fn node(deployment: &Deployment, number: usize, settings: &str) -> Server {
    let settings = |address| {
        // The cluster bus, on which nodes talk to each other, has a separate port.
        let bus = free_port();
        format!("{settings}\ncluster-announce-ip {address}\ncluster-port {bus}\n")
    };
    deployment.start(&format!("node-{number}"), settings, &[])
}

impl Cluster {
    /// Adds a master without slots; returns its index once all nodes know it.
    ///
    /// # Panics
    ///
    /// If it does not start, or does not join the cluster.
    pub fn add_node(&mut self) -> usize {
        let node = node(&self.deployment, self.homes, &self.settings);
        self.homes += 1;
        self.nodes.push(node);
        let place = self.nodes.len() - 1;
        self.introduce(place, &self.nodes[..place]);
        self.await_whole();
        place
    }

    /// Removes a node from the cluster and ends it. Its slots and replicas move to another master,
    /// and all nodes forget it. The index of every later node decreases by one.
    ///
    /// # Panics
    ///
    /// If it takes too long.
    pub fn remove_node(&mut self, place: usize) {
        let id = until("a name", || self.id(place));
        let heir = until("a successor", || self.heir(place));
        let slots = until("its slots", || self.slots_of(place));
        if !slots.is_empty() {
            self.move_slots(&slots, heir);
        }
        for node in self.others(place) {
            let follows =
                |id: &String| known_master(node).map(|master| master.as_ref() == Some(id));
            if until("its own master", || follows(&id)) {
                self.follow(node, heir);
            }
        }
        // Kill it first, or the others would learn of it again by gossip.
        self.nodes[place].kill();
        for node in self.others(place) {
            until("a node forgotten", || {
                if !known(node)?.iter().any(|known| known.id == id) {
                    return Ok(());
                }
                let forget = node.try_ask::<()>(&["CLUSTER", "FORGET", &id]);
                forget.map_err(|error| error.to_string())
            });
        }
        self.nodes.remove(place);
        self.await_whole();
    }

    /// Makes a node meet each of the others. Relying on gossip would take longer.
    fn introduce(&self, place: usize, others: &[Server]) {
        let newcomer = &self.nodes[place];
        let bus: Vec<String> = newcomer.ask(&["CONFIG", "GET", "cluster-port"]);
        let (address, port) = (newcomer.address().to_string(), newcomer.port().to_string());
        for other in others.iter().filter(|node| node.pid().is_some()) {
            let () = other.ask(&["CLUSTER", "MEET", &address, &port, &bus[1]]);
        }
    }

    /// Makes a node a replica of a master, as soon as the node knows that master.
    fn follow(&self, node: &Server, master: usize) {
        let id = until("a name", || self.id(master));
        until("a replica", || {
            let follow = node.try_ask::<()>(&["CLUSTER", "REPLICATE", &id]);
            follow.map_err(|error| error.to_string())
        });
    }

    pub(super) fn others(&self, place: usize) -> impl Iterator<Item = &Server> {
        let port = self.nodes[place].port();
        self.running().filter(move |node| node.port() != port)
    }

    /// Returns another master that has slots.
    fn heir(&self, place: usize) -> Result<usize, String> {
        let port = self.nodes[place].port();
        let served = self.agreed()?;
        let mut masters = served.iter().map(|range| range.master);
        self.place(
            masters
                .find(|&master| master != port)
                .ok_or("no other master")?,
        )
    }

    fn slots_of(&self, place: usize) -> Result<Vec<u16>, String> {
        let port = self.nodes[place].port();
        let served = self
            .agreed()?
            .into_iter()
            .filter(|range| range.master == port);
        Ok(served.flat_map(|range| range.slots).collect())
    }
}
