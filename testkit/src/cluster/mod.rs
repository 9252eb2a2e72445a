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
use slots::{Known, Range, known, ranges};

/// Masters that share the slots, and their replicas. All end as a [`Server`] does, and their files
/// with them.
///
/// A node keeps its place in [`nodes`](Cluster::nodes) whatever its role. In the beginning the
/// masters come first, in the order of their slots, then the first replica of each, and so on.
#[derive(Debug)]
pub struct Cluster {
    nodes: Vec<Server>,
    /// What every node has in its configuration.
    settings: String,
    /// How many homes there are.
    homes: usize,
    deployment: Deployment,
}

/// How to set up a [`Cluster`].
#[derive(Debug, Clone, Copy)]
pub struct ClusterPlan<'a> {
    /// How many masters share the slots.
    pub masters: usize,
    /// How many replicas each of them has.
    pub replicas: usize,
    /// `cluster-node-timeout`: how long a node does not answer before it counts as gone.
    pub node_timeout_millis: u32,
    /// Further settings of all nodes, such as `["--cluster-require-full-coverage", "no"]`.
    pub args: &'a [&'a str],
    /// Has all nodes speak TLS and nothing else, with clients and with each other.
    pub tls: Option<TlsPlan<'a>>,
    /// Whether each has an address of its own in [`APART`](crate::APART), where it listens and from
    /// where it connects to the others. So it can be cut off from them and not from clients (Linux).
    pub apart: bool,
}

/// In which way a replica takes its master's place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Takeover {
    /// The master stops writing and hands over; nothing is lost.
    Orderly,
    /// The master is not asked, the other masters are (`FORCE`).
    Force,
    /// Nobody is asked (`TAKEOVER`).
    Alone,
}

impl Default for ClusterPlan<'_> {
    fn default() -> Self {
        ClusterPlan {
            masters: 3,
            replicas: 1,
            node_timeout_millis: 2000,
            args: &[],
            tls: None,
            apart: false,
        }
    }
}

impl Cluster {
    /// Three masters with one replica each.
    pub fn start() -> Cluster {
        Cluster::start_with(ClusterPlan::default())
    }

    /// The same, otherwise. Returns when everything is in place: the nodes have the same picture of
    /// the cluster, all slots are served, and the replicas are in step.
    ///
    /// # Panics
    ///
    /// When a node does not start, or they do not find together.
    pub fn start_with(plan: ClusterPlan<'_>) -> Cluster {
        setup::cluster(plan)
    }

    /// The URL for clients: the addresses of all nodes.
    pub fn url(&self) -> String {
        self.deployment.url("cluster", &self.nodes)
    }

    /// The CA of all certificates, where there are some.
    pub fn ca(&self) -> Option<&Ca> {
        self.deployment.ca()
    }

    /// All nodes.
    pub fn nodes(&self) -> &[Server] {
        &self.nodes
    }

    /// The slot of a key.
    pub fn slot_of(&self, key: impl AsRef<[u8]>) -> u16 {
        slot_of(key.as_ref())
    }

    /// The place of the master that has the slot of a key.
    ///
    /// # Panics
    ///
    /// When the nodes that answer do not come to an agreement about it.
    pub fn owner_of(&self, key: impl AsRef<[u8]>) -> usize {
        self.owner(slot_of(key.as_ref()))
    }

    /// The place of the master that has a slot.
    ///
    /// # Panics
    ///
    /// When the nodes that answer do not come to an agreement about it.
    pub fn owner(&self, slot: u16) -> usize {
        until("one owner of a slot", || {
            self.agreed_owner(slot, self.running())
        })
    }

    /// Waits until another node has the slot of a key than `old`, as all the others that answer say;
    /// returns its place. One that was cut off learns of it last.
    ///
    /// # Panics
    ///
    /// When it takes too long.
    pub fn await_owner_change(&self, key: impl AsRef<[u8]>, old: usize) -> usize {
        let slot = slot_of(key.as_ref());
        until("another owner of a slot", || {
            match self.agreed_owner(slot, self.others(old))? {
                owner if owner == old => Err(format!("it is still node {old}")),
                owner => Ok(owner),
            }
        })
    }

    /// The place of a replica of this master, the first one that runs.
    ///
    /// # Panics
    ///
    /// When it has none.
    pub fn replica_of(&self, master: usize) -> usize {
        until("a replica", || {
            let id = self.id(master)?;
            let known = self.anybody_knows()?;
            let replicas = known
                .iter()
                .filter(|node| node.master.as_ref() == Some(&id));
            let places = replicas.filter_map(|node| self.place(node.port).ok());
            let running = places.filter(|&place| self.nodes[place].pid().is_some());
            running
                .min()
                .ok_or_else(|| format!("node {master} has none"))
        })
    }

    /// Has a replica take its master's place, and waits until all know it.
    ///
    /// # Panics
    ///
    /// When it takes too long.
    pub fn fail_over(&self, replica: usize, how: Takeover) {
        /// When an orderly takeover has failed, the replica forgets about it after five seconds.
        const AGAIN: Duration = Duration::from_secs(6);
        let command: &[&str] = match how {
            Takeover::Orderly => &["CLUSTER", "FAILOVER"],
            Takeover::Force => &["CLUSTER", "FAILOVER", "FORCE"],
            Takeover::Alone => &["CLUSTER", "FAILOVER", "TAKEOVER"],
        };
        let port = self.nodes[replica].port();
        let mut asked: Option<Instant> = None;
        until("a failover", || {
            let ranges = self.agreed()?;
            if ranges.iter().any(|range| range.master == port) {
                return Ok(());
            }
            if asked.is_none_or(|asked| asked.elapsed() > AGAIN) {
                let answer = self.nodes[replica].try_ask::<()>(command);
                answer.map_err(|error| error.to_string())?;
                asked = Some(Instant::now());
            }
            Err(format!("node {replica} is still a replica"))
        });
    }

    /// Waits until everything that runs is in place again, as it was at the start.
    ///
    /// # Panics
    ///
    /// When it takes too long, such as when somebody is frozen or slots have lost their master.
    pub fn await_whole(&self) {
        until("a whole cluster", || self.whole());
    }

    /// Runs one command on a node, on a connection of its own.
    ///
    /// # Panics
    ///
    /// When the command fails or its answer is not of the wanted type.
    pub fn ask<T: redis::FromRedisValue>(&self, place: usize, command: &[&str]) -> T {
        self.nodes[place].ask(command)
    }

    /// Kills a node as `kill -9` does.
    pub fn kill(&mut self, place: usize) {
        self.nodes[place].kill();
    }

    /// Starts a killed node again. It knows the cluster as it was.
    pub fn restart(&mut self, place: usize) {
        self.nodes[place].restart();
    }

    /// Stops a node: connections stay, nothing is answered.
    pub fn freeze(&self, place: usize) {
        self.nodes[place].freeze();
    }

    /// Lets a frozen node go on.
    pub fn thaw(&self, place: usize) {
        self.nodes[place].thaw();
    }

    fn running(&self) -> impl Iterator<Item = &Server> {
        self.nodes.iter().filter(|node| node.pid().is_some())
    }

    fn place(&self, port: u16) -> Result<usize, String> {
        let place = self.nodes.iter().position(|node| node.port() == port);
        place.ok_or_else(|| format!("a stranger at {port}"))
    }

    /// The name of a node in the cluster, as itself or others know it.
    fn id(&self, place: usize) -> Result<String, String> {
        let port = self.nodes[place].port();
        let known = known(&self.nodes[place]).or_else(|_| self.anybody_knows())?;
        let node = known.into_iter().find(|node| node.port == port);
        node.map(|node| node.id)
            .ok_or_else(|| format!("nobody knows {port}"))
    }

    /// The cluster, as one of those who answer knows it.
    fn anybody_knows(&self) -> Result<Vec<Known>, String> {
        let answer = self.running().find_map(|node| known(node).ok());
        answer.ok_or_else(|| "no node answers".to_owned())
    }

    /// Who serves what, if all who answer say the same.
    fn agreed(&self) -> Result<Vec<Range>, String> {
        let mut answers = self.running().filter_map(|node| ranges(node).ok());
        let first = answers.next().ok_or("no node answers")?;
        match answers.find(|answer| *answer != first) {
            Some(other) => Err(format!("{first:?}, says one; {other:?}, says another")),
            None => Ok(first),
        }
    }

    /// Who has a slot, if all of these who answer say the same.
    fn agreed_owner<'a>(
        &self,
        slot: u16,
        nodes: impl Iterator<Item = &'a Server>,
    ) -> Result<usize, String> {
        let mut agreed = None;
        for ranges in nodes.filter_map(|node| ranges(node).ok()) {
            let range = ranges.iter().find(|range| range.slots.contains(&slot));
            let owner = range.map(|range| range.master);
            if *agreed.get_or_insert(owner) != owner {
                return Err(format!("{agreed:?}, says one; {owner:?}, says another"));
            }
        }
        let owner = agreed.flatten().ok_or("nobody")?;
        self.place(owner)
    }

    fn whole(&self) -> Result<(), String> {
        let served = self.agreed()?;
        for node in self.running() {
            let port = node.port();
            let ask = |command: &[&str]| {
                let answer: redis::RedisResult<String> = node.try_ask(command);
                answer.map_err(|error| format!("{port}: {error}"))
            };
            let state = ask(&["CLUSTER", "INFO"])?;
            for wanted in ["cluster_state:ok", "cluster_slots_ok:16384"] {
                if !state.lines().any(|line| line == wanted) {
                    return Err(format!("{port} does not say {wanted}"));
                }
            }
            let known = known(node)?;
            let healthy = |node: &Known| node.healthy();
            for other in self.running().map(Server::port) {
                if !known.iter().any(|node| node.port == other && healthy(node)) {
                    return Err(format!("{port} does not know {other} well"));
                }
            }
            let replication = ask(&["INFO", "replication"])?;
            if replication.contains("role:slave") {
                if !replication.contains("master_link_status:up") {
                    return Err(format!("{port} is not in step"));
                }
                if !served.iter().any(|range| range.replicas.contains(&port)) {
                    return Err(format!("{port} does not serve"));
                }
            }
        }
        Ok(())
    }
}
