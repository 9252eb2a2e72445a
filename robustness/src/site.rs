//! Where the locks are kept: real servers in one topology or another, and how to break them.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use clap::ValueEnum;
use redlatch_testkit::{Proxy, Server};

use crate::Result;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Topology {
    /// One server.
    Single,
}

impl Topology {
    pub(crate) const ALL: [Topology; 1] = [Topology::Single];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Topology::Single => "single",
        }
    }

    pub(crate) fn start(self, needs: Needs) -> Result<Box<dyn Site>> {
        match self {
            Topology::Single => Ok(Box::new(Single::start(needs)?)),
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
}

/// Servers that run.
pub(crate) trait Site {
    /// What the clients connect to.
    fn url(&self) -> String;

    /// Those that take writes.
    fn masters(&mut self) -> Vec<&mut Server>;

    /// The network, if it was asked for.
    fn network(&self) -> Option<&Proxy> {
        None
    }
}

struct Single {
    server: Server,
    proxy: Option<Proxy>,
    _disk: Option<Disk>,
}

impl Single {
    fn start(needs: Needs) -> Result<Single> {
        let disk = needs.durable.then(Disk::new).transpose()?;
        let server = match &disk {
            None => Server::start(),
            Some(disk) => {
                let dir = disk.0.to_string_lossy();
                let durable = ["--appendonly", "yes", "--appendfsync", "always"];
                Server::start_with(&[&durable[..], &["--dir", &dir]].concat())
            }
        };
        let proxy = needs.network.then(|| Proxy::to(server.port()));
        Ok(Single {
            server,
            proxy,
            _disk: disk,
        })
    }
}

impl Site for Single {
    fn url(&self) -> String {
        match &self.proxy {
            Some(proxy) => proxy.url(),
            None => self.server.url(),
        }
    }

    fn masters(&mut self) -> Vec<&mut Server> {
        vec![&mut self.server]
    }

    fn network(&self) -> Option<&Proxy> {
        self.proxy.as_ref()
    }
}

/// A folder that goes when it is dropped.
struct Disk(PathBuf);

impl Disk {
    fn new() -> Result<Disk> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("redlatch-robustness-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path)?;
        Ok(Disk(path))
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
