//! What the servers of one deployment have in common.

use std::net::Ipv4Addr;

use crate::addresses::address;
use crate::dir::Dir;
use crate::server::Server;
use crate::tls::{self, Ca, Certified, TlsPlan};

/// Where the files of several servers are, and how these talk. Its owner keeps it behind the servers, which
/// write there: so the files are removed when those have ended.
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

    /// Starts one of them, with a home of that name. `lines` are its settings, for its address; of these
    /// `mode` are on the command line.
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

    /// The URL for clients that know these.
    pub(crate) fn url(&self, kind: &str, servers: &[Server]) -> String {
        let addresses = servers
            .iter()
            .map(|server| format!("{}:{}", server.address(), server.port()));
        let addresses: Vec<_> = addresses.collect();
        let scheme = tls::scheme(self.certified.is_some());
        format!("{scheme}+{kind}://{}", addresses.join(","))
    }

    /// The CA of all certificates, where there are some.
    pub(crate) fn ca(&self) -> Option<&Ca> {
        self.certified.as_ref().map(|certified| &certified.ca)
    }
}
