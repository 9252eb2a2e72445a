//! The topologies, and the one with a single server.

use std::path::PathBuf;

use clap::ValueEnum;
use redlatch_testkit::{Proxy, Server};

use super::services::{Named, Sharded, WorkerAccess};
use super::{Deployment, Needs, cluster, sentinel};
use crate::Result;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Topology {
    /// One server.
    Single,
    /// A master, two replicas and three sentinels.
    Sentinel,
    /// Three masters with a replica each.
    Cluster,
    /// A master and its replica behind one name, which leads to the master.
    Named,
    /// One server that has slots and does not say so.
    Sharded,
    /// One server whose user lacks the commands that some services do not have.
    Restricted,
    /// One server without RESP3.
    Resp2,
    /// One server with a password that changes every two seconds.
    Rotating,
}

impl Topology {
    pub(crate) const ALL: [Topology; 8] = [
        Topology::Single,
        Topology::Sentinel,
        Topology::Cluster,
        Topology::Named,
        Topology::Sharded,
        Topology::Restricted,
        Topology::Resp2,
        Topology::Rotating,
    ];

    /// Those with one address.
    pub(crate) const ONE_ADDRESS: [Topology; 6] = [
        Topology::Single,
        Topology::Named,
        Topology::Sharded,
        Topology::Restricted,
        Topology::Resp2,
        Topology::Rotating,
    ];

    /// Returns whether it is a service: others are tried more often.
    pub(crate) fn is_service(self) -> bool {
        self != Topology::Single && Topology::ONE_ADDRESS.contains(&self)
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Topology::Single => "single",
            Topology::Sentinel => "sentinel",
            Topology::Cluster => "cluster",
            Topology::Named => "named",
            Topology::Sharded => "sharded",
            Topology::Restricted => "restricted",
            Topology::Resp2 => "resp2",
            Topology::Rotating => "rotating",
        }
    }

    pub(crate) fn start(self, needs: Needs) -> Result<Box<dyn Deployment>> {
        match self {
            Topology::Single => Ok(Box::new(Single::start(needs))),
            Topology::Sentinel => Ok(Box::new(sentinel::SentinelDeployment::start(needs))),
            Topology::Cluster => Ok(Box::new(cluster::start(needs))),
            Topology::Named => Ok(Box::new(Named::start(needs))),
            Topology::Sharded => Ok(Box::new(Sharded::start(needs))),
            Topology::Restricted | Topology::Resp2 | Topology::Rotating => {
                Ok(Box::new(Single::limited(self, needs)))
            }
        }
    }
}

pub(super) struct Single {
    pub(super) server: Server,
    pub(super) proxy: Option<Proxy>,
    pub(super) workers: WorkerAccess,
}

impl Single {
    fn start(needs: Needs) -> Single {
        let server = match needs.durable {
            true => Server::start_durable(),
            false => Server::start(),
        };
        let proxy = needs.network.then(|| Proxy::to(server.port()));
        let workers = WorkerAccess::default();
        Single {
            server,
            proxy,
            workers,
        }
    }
}

impl Deployment for Single {
    fn url(&self) -> String {
        match &self.proxy {
            Some(proxy) => proxy.url(),
            None => self.server.url(),
        }
    }

    fn worker_url(&self) -> String {
        self.workers.url.clone().unwrap_or_else(|| self.url())
    }

    fn password_file(&self) -> Option<PathBuf> {
        self.workers.password_file()
    }

    fn is_single_server(&self) -> bool {
        true
    }

    fn masters(&self) -> Vec<usize> {
        vec![0]
    }

    fn server(&self, _: usize) -> &Server {
        &self.server
    }

    fn servers(&self) -> Vec<&Server> {
        vec![&self.server]
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
