//! The topologies, and the one with a single server.

use clap::ValueEnum;
use redlatch_testkit::{Proxy, Server};

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

    pub(crate) fn start(self, needs: Needs) -> Result<Box<dyn Deployment>> {
        match self {
            Topology::Single => Ok(Box::new(Single::start(needs))),
            Topology::Sentinel => Ok(Box::new(sentinel::SentinelDeployment::start(needs))),
            Topology::Cluster => Ok(Box::new(cluster::start(needs))),
        }
    }
}

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

impl Deployment for Single {
    fn url(&self) -> String {
        match &self.proxy {
            Some(proxy) => proxy.url(),
            None => self.server.url(),
        }
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
