//! The parts that the servers of one deployment share.

use std::net::Ipv4Addr;

use crate::addresses::address;
use crate::dir::Dir;
use crate::server::Server;
use crate::tls::{self, Ca, Certified, TlsPlan};

/// The directory and the certificates of several servers. Its owner declares it after the servers:
/// they write to the directory, so it must be removed after they have exited.
#[derive(Debug)]
pub(crate) struct Deployment {
    certified: Option<Certified>,
    apart: bool,
    dir: Dir,
}

impl Deployment {
    pub(crate) fn new(tls: Option<TlsPlan<'_>>, apart: bool) -> Deployment {
        let dir = Dir::new();
        Deployment {
            certified: tls.map(|tls| Certified::new(dir.path(), tls)),
            apart,
            dir,
        }
    }

    /// Starts one server whose home directory has the name `home`. `lines` returns its settings for
    /// its address; the settings in `mode` are passed on the command line.
    pub(crate) fn start(
        &self,
        home: &str,
        lines: impl Fn(Ipv4Addr) -> String,
        mode: &[&str],
    ) -> Server {
        let home = self.dir.path().join(home);
        let address = address(self.apart);
        let tls = |port| self.certified.as_ref().map(|all| all.alone(&home, port));
        let lines = |port| tls(port).unwrap_or_default() + &lines(address);
        Server::at_home(&home, address, lines, mode)
    }

    /// Returns the URL that lists these servers for clients.
    pub(crate) fn url(&self, kind: &str, servers: &[Server]) -> String {
        let addresses = servers
            .iter()
            .map(|server| format!("{}:{}", server.address(), server.port()));
        let addresses: Vec<_> = addresses.collect();
        let scheme = tls::scheme(self.certified.is_some());
        format!("{scheme}+{kind}://{}", addresses.join(","))
    }

    /// Returns the CA of all certificates, if the deployment uses TLS.
    pub(crate) fn ca(&self) -> Option<&Ca> {
        self.certified.as_ref().map(|certified| &certified.ca)
    }
}
