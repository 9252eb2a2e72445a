//! A server that speaks TLS.

use std::net::Ipv4Addr;

use crate::ports::free_port;
use crate::server::Server;
use crate::temp_dir::TempDir;
use crate::tls::{Ca, CertSpec, LOOPBACK, TlsConfig, TlsPlan};

/// A server that speaks TLS on one port, and plain TCP on another one for tests to inspect it.
#[derive(Debug)]
pub struct TlsServer {
    server: Server,
    port: u16,
    tls_config: TlsConfig,
    // Dropped after the server, which may still read it.
    _dir: TempDir,
}

impl TlsServer {
    /// Starts a server with a certificate for loopback. `auth_clients` is whether clients need a
    /// certificate (`yes`, `no`, `optional`); `users` are lines of an ACL file, without the word
    /// `user`.
    ///
    /// # Panics
    ///
    /// If `redis-server` does not start or lacks TLS support.
    pub fn start(auth_clients: &str, users: &[&str]) -> TlsServer {
        TlsServer::start_for(LOOPBACK, auth_clients, users)
    }

    /// Starts a server with another certificate.
    ///
    /// # Panics
    ///
    /// As [`start`](TlsServer::start).
    pub fn start_for(what: CertSpec<'_>, auth_clients: &str, users: &[&str]) -> TlsServer {
        let dir = TempDir::new();
        let plan = TlsPlan {
            certificate: what,
            auth_clients,
        };
        let tls_config = TlsConfig::new(dir.path(), plan);
        let mut lines = String::new();
        for user in users {
            lines += &format!("user {user}\n");
        }
        let mut port = 0;
        let server = Server::start_in_dir(
            dir.path(),
            Ipv4Addr::LOCALHOST,
            |_| {
                port = free_port();
                format!("{}{lines}", tls_config.with_tls_port(port))
            },
            &[],
        );
        TlsServer {
            server,
            port,
            tls_config,
            _dir: dir,
        }
    }

    /// Returns the URL for clients.
    pub fn url(&self) -> String {
        format!("rediss://127.0.0.1:{}", self.port)
    }

    /// Returns the TLS port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the CA of the server's certificate, which also signs client certificates.
    pub fn ca(&self) -> &Ca {
        &self.tls_config.ca
    }

    /// Returns the server on its plain port.
    pub fn plain(&self) -> &Server {
        &self.server
    }

    /// Returns the server on its plain port, to kill and restart it.
    pub fn plain_mut(&mut self) -> &mut Server {
        &mut self.server
    }
}
