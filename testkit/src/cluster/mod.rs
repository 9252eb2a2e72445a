//! A cluster of real servers.

mod moving;
mod setup;
mod slots;

use std::time::{Duration, Instant};

use crate::deployment::Deployment;
use crate::server::Server;
use crate::tls::{Ca, TlsPlan};
use crate::until::until;

pub use slots::slot_of;
use slots::{NodeInfo, SlotRange, cluster_nodes, slot_ranges};

/// Masters that share the slots, and their replicas. All of them end as a [`Server`] does, and
/// their files are removed with them.
///
/// A node keeps its index in [`nodes`](Cluster::nodes) regardless of its role; only
/// [`Cluster::remove_node`] changes indices. Initially the masters come first, in the order of their
/// slots, then the first replica of each master, and so on.
#[derive(Debug)]
pub struct Cluster {
    nodes: Vec<Server>,
    /// Configuration lines of every node.
    settings: String,
    /// Number of nodes ever started. The directory of the next node has this number in its name.
    nodes_started: usize,
    deployment: Deployment,
}

/// Configuration of a [`Cluster`].
#[derive(Debug, Clone, Copy)]
pub struct ClusterPlan<'a> {
    /// Number of masters that share the slots.
    pub masters: usize,
    /// Number of replicas of each master.
    pub replicas: usize,
    /// `cluster-node-timeout`: milliseconds without an answer after which a node counts as failed.
    pub node_timeout_millis: u32,
    /// Additional settings of all nodes, such as `["--cluster-require-full-coverage", "no"]`.
    pub args: &'a [&'a str],
    /// Makes all nodes speak only TLS, with clients and with each other.
    pub tls: Option<TlsPlan<'a>>,
    /// Whether each node has its own address in [`SEPARATE_NETWORK`](crate::SEPARATE_NETWORK), where it listens and
    /// from which it connects to other nodes. Such a node can be cut off from the others but not from
    /// clients (Linux only).
    pub separate_addresses: bool,
}

/// How a replica takes over from its master.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailoverMode {
    /// The master pauses its clients until the replica has caught up, and the other masters vote; no data is lost.
    Graceful,
    /// No handshake with its own master; the other masters vote (`FORCE`).
    Force,
    /// No handshake and no vote (`TAKEOVER`).
    Takeover,
}

impl Default for ClusterPlan<'_> {
    fn default() -> Self {
        ClusterPlan {
            masters: 3,
            replicas: 1,
            node_timeout_millis: 2000,
            args: &[],
            tls: None,
            separate_addresses: false,
        }
    }
}

impl Cluster {
    /// Starts three masters with one replica each.
    pub fn start() -> Cluster {
        Cluster::start_with(ClusterPlan::default())
    }

    /// Returns the URL for clients: the addresses of all nodes.
    pub fn url(&self) -> String {
        self.deployment.url("cluster", &self.nodes)
    }

    /// Returns the CA of all certificates, if the cluster uses TLS.
    pub fn ca(&self) -> Option<&Ca> {
        self.deployment.ca()
    }

    /// Returns all nodes.
    pub fn nodes(&self) -> &[Server] {
        &self.nodes
    }

    /// Returns the slot of a key.
    pub fn slot_of(&self, key: impl AsRef<[u8]>) -> u16 {
        slot_of(key.as_ref())
    }

    /// Returns the index of the master of the slot of a key.
    ///
    /// # Panics
    ///
    /// If the nodes that answer do not reach an agreement about it.
    pub fn master_of_key(&self, key: impl AsRef<[u8]>) -> usize {
        self.master_of_slot(slot_of(key.as_ref()))
    }

    /// Returns the index of the master of a slot.
    ///
    /// # Panics
    ///
    /// If the nodes that answer do not reach an agreement about it.
    pub fn master_of_slot(&self, slot: u16) -> usize {
        until("one master of a slot", || {
            self.agreed_master(slot, self.running())
        })
    }

    /// Waits until all nodes that answer agree that the slot of a key has a master other than `old`,
    /// and returns its index. The view of `old` does not count, because it may be cut off.
    ///
    /// # Panics
    ///
    /// If it takes too long.
    pub fn await_master_change(&self, key: impl AsRef<[u8]>, old: usize) -> usize {
        let slot = slot_of(key.as_ref());
        until("another master of a slot", || {
            match self.agreed_master(slot, self.others(old))? {
                master if master == old => Err(format!("it is still node {old}")),
                master => Ok(master),
            }
        })
    }

    /// Returns the index of this master's first running replica.
    ///
    /// # Panics
    ///
    /// If it has none.
    pub fn replica_of(&self, master: usize) -> usize {
        until("a replica", || {
            let id = self.id(master)?;
            let known = self.nodes_known_to_first()?;
            let replicas = known
                .iter()
                .filter(|node| node.master.as_ref() == Some(&id));
            let indices = replicas.filter_map(|node| self.index_of(node.port).ok());
            let running = indices.filter(|&index| self.nodes[index].pid().is_some());
            running
                .min()
                .ok_or_else(|| format!("node {master} has none"))
        })
    }

    /// Makes a replica take over from its master, and waits until all nodes that answer agree on it.
    ///
    /// # Panics
    ///
    /// If it takes too long.
    pub fn fail_over(&self, replica: usize, how: FailoverMode) {
        /// A replica abandons a manual failover that has not succeeded within five seconds. Then it is
        /// requested again.
        const RETRY_AFTER: Duration = Duration::from_secs(6);
        let command: &[&str] = match how {
            FailoverMode::Graceful => &["CLUSTER", "FAILOVER"],
            FailoverMode::Force => &["CLUSTER", "FAILOVER", "FORCE"],
            FailoverMode::Takeover => &["CLUSTER", "FAILOVER", "TAKEOVER"],
        };
        let port = self.nodes[replica].port();
        let mut last_request: Option<Instant> = None;
        until("a failover", || {
            let ranges = self.agreed_slots()?;
            if ranges.iter().any(|range| range.master == port) {
                return Ok(());
            }
            if last_request.is_none_or(|last| last.elapsed() > RETRY_AFTER) {
                let answer = self.nodes[replica].try_command::<()>(command);
                answer.map_err(|error| error.to_string())?;
                last_request = Some(Instant::now());
            }
            Err(format!("node {replica} is still a replica"))
        });
    }

    /// Waits until all running nodes agree on the masters of the slots, all slots are served, no running
    /// node counts as failed, and all replicas are in sync.
    ///
    /// # Panics
    ///
    /// If it takes too long, for example because a node is frozen or slots have lost their master.
    pub fn await_healthy(&self) {
        until("a healthy cluster", || self.check_health());
    }

    /// Runs one command on a node, on a separate connection.
    ///
    /// # Panics
    ///
    /// If the command fails or its answer does not have the requested type.
    pub fn command<T: redis::FromRedisValue>(&self, index: usize, command: &[&str]) -> T {
        self.nodes[index].command(command)
    }

    /// Kills a node as `kill -9` does.
    pub fn kill(&mut self, index: usize) {
        self.nodes[index].kill();
    }

    /// Restarts a killed node. It still has its view of the cluster.
    pub fn restart(&mut self, index: usize) {
        self.nodes[index].restart();
    }

    /// Restarts a node without a setting of the [`ClusterPlan`]. It still has its view of the cluster.
    pub fn restart_without(&mut self, index: usize, setting: &str) {
        self.nodes[index].restart_without(setting);
    }

    /// Stops a node: its connections stay open, but it answers nothing.
    pub fn freeze(&self, index: usize) {
        self.nodes[index].freeze();
    }

    /// Resumes a frozen node.
    pub fn thaw(&self, index: usize) {
        self.nodes[index].thaw();
    }

    fn running(&self) -> impl Iterator<Item = &Server> {
        self.nodes.iter().filter(|node| node.pid().is_some())
    }

    fn index_of(&self, port: u16) -> Result<usize, String> {
        let index = self.nodes.iter().position(|node| node.port() == port);
        index.ok_or_else(|| format!("an unknown node at {port}"))
    }

    /// Returns the id of a node in the cluster, from itself or from other nodes.
    fn id(&self, index: usize) -> Result<String, String> {
        let port = self.nodes[index].port();
        let known = cluster_nodes(&self.nodes[index]).or_else(|_| self.nodes_known_to_first())?;
        let node = known.into_iter().find(|node| node.port == port);
        node.map(|node| node.id)
            .ok_or_else(|| format!("no node knows {port}"))
    }

    /// Returns the nodes of the cluster, as the first running node that answers knows them.
    fn nodes_known_to_first(&self) -> Result<Vec<NodeInfo>, String> {
        let answer = self.running().find_map(|node| cluster_nodes(node).ok());
        answer.ok_or_else(|| "no node answers".to_owned())
    }

    /// Returns the slot ranges and their nodes, if all nodes that answer agree.
    fn agreed_slots(&self) -> Result<Vec<SlotRange>, String> {
        let mut answers = self.running().filter_map(|node| slot_ranges(node).ok());
        let first = answers.next().ok_or("no node answers")?;
        match answers.find(|answer| *answer != first) {
            Some(other) => Err(format!("nodes disagree: {first:?} and {other:?}")),
            None => Ok(first),
        }
    }

    /// Returns the master of a slot, if all of these nodes that answer agree.
    fn agreed_master<'a>(
        &self,
        slot: u16,
        nodes: impl Iterator<Item = &'a Server>,
    ) -> Result<usize, String> {
        let mut agreed = None;
        for ranges in nodes.filter_map(|node| slot_ranges(node).ok()) {
            let range = ranges.iter().find(|range| range.slots.contains(&slot));
            let master = range.map(|range| range.master);
            if *agreed.get_or_insert(master) != master {
                return Err(format!("nodes disagree: {agreed:?} and {master:?}"));
            }
        }
        let master = agreed
            .flatten()
            .ok_or_else(|| format!("no node that answers knows a master of slot {slot}"))?;
        self.index_of(master)
    }

    fn check_health(&self) -> Result<(), String> {
        let served = self.agreed_slots()?;
        for node in self.running() {
            let port = node.port();
            let run = |command: &[&str]| {
                let answer: redis::RedisResult<String> = node.try_command(command);
                answer.map_err(|error| format!("{port}: {error}"))
            };
            let state = run(&["CLUSTER", "INFO"])?;
            for wanted in ["cluster_state:ok", "cluster_slots_ok:16384"] {
                if !state.lines().any(|line| line == wanted) {
                    return Err(format!("{port} does not report {wanted}"));
                }
            }
            let known = cluster_nodes(node)?;
            let healthy = |node: &NodeInfo| node.healthy();
            for other in self.running().map(Server::port) {
                if !known.iter().any(|node| node.port == other && healthy(node)) {
                    return Err(format!("{port} does not know {other} as a healthy node"));
                }
            }
            let replication = run(&["INFO", "replication"])?;
            if replication.contains("role:slave") {
                if !replication.contains("master_link_status:up") {
                    return Err(format!("{port} is not in sync"));
                }
                if !served.iter().any(|range| range.replicas.contains(&port)) {
                    return Err(format!("no slot range lists {port} as a replica"));
                }
            }
        }
        Ok(())
    }
}
