//! Where the locks are kept: real servers in one topology or another, and how to break them.

mod nodes;
mod watched;

use clap::ValueEnum;
use redlatch_testkit::{Cluster, Proxy, Sentinels, Server};

use crate::Result;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Topology {
    /// One server.
    Single,
    /// A master, two replicas and three sentinels.
    Sentinel,
    /// Three masters with a replica each.
    Cluster,
}

impl Topology {
    pub(crate) const ALL: [Topology; 3] = [Topology::Single, Topology::Sentinel, Topology::Cluster];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Topology::Single => "single",
            Topology::Sentinel => "sentinel",
            Topology::Cluster => "cluster",
        }
    }

    pub(crate) fn start(self, needs: Needs) -> Result<Box<dyn Site>> {
        match self {
            Topology::Single => Ok(Box::new(Single::start(needs))),
            Topology::Sentinel => Ok(Box::new(watched::Watched::start(needs))),
            Topology::Cluster => Ok(Box::new(nodes::cluster(needs))),
        }
    }
}

/// What a fault needs of the servers.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Needs {
    /// A network that can be broken between the clients and the servers.
    pub(crate) network: bool,
    /// Every write is on disk before it is answered.
    pub(crate) durable: bool,
    /// A server can be cut off from the other ones, by its address, and not from clients.
    pub(crate) partitions: bool,
    /// No replica takes a master's place: there is none, and a node is never taken for gone.
    pub(crate) unreplaced: bool,
    /// One of the three sentinels that clients know of names a wrong master.
    pub(crate) liar: bool,
}

impl Needs {
    pub(crate) const NOTHING: Needs = Needs {
        network: false,
        durable: false,
        partitions: false,
        unreplaced: false,
        liar: false,
    };
}

/// Servers that run. Each has a place that it keeps, whatever its role.
pub(crate) trait Site {
    /// What the clients connect to.
    fn url(&self) -> String;

    /// The places of those that take writes. Waits while they are changing.
    fn masters(&self) -> Vec<usize>;

    fn server(&self, place: usize) -> &Server;

    /// As `kill -9` does.
    fn kill(&mut self, place: usize);

    /// Starts a killed one again.
    fn restart(&mut self, place: usize);

    /// The network, if it was asked for.
    fn network(&self) -> Option<&Proxy> {
        None
    }

    /// Whether there is only one.
    fn is_alone(&self) -> bool {
        false
    }

    /// Returns when another one is the master in place of this one.
    fn await_successor(&self, _: usize) -> Result<()> {
        Err("there is nobody to take its place".into())
    }

    /// Has a replica take the place of this master, with everything that it has.
    fn hand_over(&self, _: usize) -> Result<()> {
        Err("there is nobody to hand over to".into())
    }

    /// Returns when everything is as it was at the start.
    fn await_whole(&self) {}

    /// The sentinels, if that is what it is.
    fn sentinels(&mut self) -> Option<&mut Sentinels> {
        None
    }

    /// The server that a wrong sentinel calls the master, if there is one.
    fn decoy(&self) -> Option<&Server> {
        None
    }

    /// The cluster, if that is what it is.
    fn cluster(&mut self) -> Option<&mut Cluster> {
        None
    }
}

/// What has every write on disk before it is answered.
const DURABLE: [&str; 4] = ["--appendonly", "yes", "--appendfsync", "always"];

struct Single {
    server: Server,
    proxy: Option<Proxy>,
}

impl Single {
    fn start(needs: Needs) -> Single {
        let server = match needs.durable {
            true => Server::start_durable(),
            false => Server::start(),
        };
        let proxy = needs.network.then(|| Proxy::to(server.port()));
        Single { server, proxy }
    }
}

impl Site for Single {
    fn url(&self) -> String {
        match &self.proxy {
            Some(proxy) => proxy.url(),
            None => self.server.url(),
        }
    }

    fn is_alone(&self) -> bool {
        true
    }

    fn masters(&self) -> Vec<usize> {
        vec![0]
    }

    fn server(&self, _: usize) -> &Server {
        &self.server
    }

    fn kill(&mut self, _: usize) {
        self.server.kill();
    }

    fn restart(&mut self, _: usize) {
        self.server.restart();
    }

    fn network(&self) -> Option<&Proxy> {
        self.proxy.as_ref()
    }
}
