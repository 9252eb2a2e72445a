//! The parts that the servers of one deployment share.

use std::net::Ipv4Addr;

use crate::addresses::address;
use crate::server::Server;
use crate::temp_dir::TempDir;
use crate::tls::{self, Ca, TlsConfig, TlsPlan};

/// The directory and the certificates of several servers. Its owner declares it after the servers:
/// they write to the directory, so it must be removed after they have exited.
#[derive(Debug)]
pub(crate) struct Deployment {
    tls_config: Option<TlsConfig>,
    separate_addresses: bool,
    dir: TempDir,
}

impl Deployment {
    pub(crate) fn new(tls: Option<TlsPlan<'_>>, separate_addresses: bool) -> Deployment {
        let dir = TempDir::new();
        Deployment {
            tls_config: tls.map(|tls| TlsConfig::new(dir.path(), tls)),
            separate_addresses,
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
        let address = address(self.separate_addresses);
        let tls = |port| {
            self.tls_config
                .as_ref()
                .map(|all| all.tls_only(&home, port))
        };
        let lines = |port| tls(port).unwrap_or_default() + &lines(address);
        Server::start_in_dir(&home, address, lines, mode)
    }

    /// Returns the URL that lists these servers for clients.
    pub(crate) fn url(&self, kind: &str, servers: &[Server]) -> String {
        let addresses = servers
            .iter()
            .map(|server| format!("{}:{}", server.address(), server.port()));
        let addresses: Vec<_> = addresses.collect();
        let scheme = tls::scheme(self.tls_config.is_some());
        format!("{scheme}+{kind}://{}", addresses.join(","))
    }

    /// Returns the CA of all certificates, if the deployment uses TLS.
    pub(crate) fn ca(&self) -> Option<&Ca> {
        self.tls_config.as_ref().map(|tls_config| &tls_config.ca)
    }
}
