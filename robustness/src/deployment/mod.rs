//! The store of a run: real servers in one of the topologies, and ways to break them.

mod cluster;
mod sentinel;
mod services;
mod topology;

use std::path::PathBuf;

use redlatch_testkit::{Cluster, Proxy, Sentinels, Server};

pub(crate) use topology::Topology;

use crate::Result;

/// Requirements of a fault.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Needs {
    /// Whether the network between clients and servers can be broken.
    pub(crate) network: bool,
    /// Whether every write is on disk before it is answered.
    pub(crate) durable: bool,
    /// Whether a server can be cut off from the other ones, by its address, but not from clients.
    pub(crate) partitions: bool,
    /// Whether no failover happens: there are no replicas, and a node never counts as failed.
    pub(crate) no_failover: bool,
    /// Whether one of the three sentinels that clients know reports a wrong master.
    pub(crate) fake_sentinel: bool,
    /// Whether the network between clients and sentinels can be broken.
    pub(crate) sentinel_network: bool,
}

impl Needs {
    pub(crate) const NOTHING: Needs = Needs {
        network: false,
        durable: false,
        partitions: false,
        no_failover: false,
        fake_sentinel: false,
        sentinel_network: false,
    };
}

/// Running servers. Each keeps its place when its role changes.
pub(crate) trait Deployment {
    /// Returns the URL for clients.
    fn url(&self) -> String;

    /// Returns the URL for workers, if theirs is another one.
    fn worker_url(&self) -> String {
        self.url()
    }

    /// Returns the file that has the workers' password, if it changes.
    fn password_file(&self) -> Option<PathBuf> {
        None
    }

    /// Returns whether keys have slots.
    fn has_slots(&self) -> bool {
        self.masters().len() > 1
    }

    /// Returns the places of the masters. Waits while they are changing.
    fn masters(&self) -> Vec<usize>;

    fn server(&self, place: usize) -> &Server;

    /// Returns all servers, sentinels included.
    fn servers(&self) -> Vec<&Server>;

    /// Kills a server with SIGKILL.
    fn kill(&mut self, place: usize);

    /// Restarts a killed server.
    fn restart(&mut self, place: usize);

    /// Returns the network, if it was requested.
    fn network(&self) -> Option<&Proxy> {
        None
    }

    /// Returns whether there is only one server.
    fn is_single_server(&self) -> bool {
        false
    }

    /// Waits until another server has replaced this master.
    fn await_successor(&self, _: usize) -> Result<()> {
        Err("there is no server to replace it".into())
    }

    /// Promotes a replica of this master, with all its data.
    fn hand_over(&self, _: usize) -> Result<()> {
        Err("there is no replica to promote".into())
    }

    /// Waits until all servers are in the same state as at the start.
    fn await_healthy(&self) {}

    /// Returns the sentinels, if this is a Sentinel deployment.
    fn sentinels(&mut self) -> Option<&mut Sentinels> {
        None
    }

    /// Returns the network between clients and sentinels, if it was requested.
    fn sentinel_network(&self) -> &[Proxy] {
        &[]
    }

    /// Returns the server that a wrong sentinel reports as the master, if there is one.
    fn decoy(&self) -> Option<&Server> {
        None
    }

    /// Returns the cluster, if this is one.
    fn cluster(&mut self) -> Option<&mut Cluster> {
        None
    }
}

/// Options with which every write is on disk before it is answered.
const DURABLE: [&str; 4] = ["--appendonly", "yes", "--appendfsync", "always"];
