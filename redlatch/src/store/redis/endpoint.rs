//! Addresses of servers.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::path::PathBuf;

use tokio::net::TcpStream;

use super::exchange_error::ExchangeError;
use super::wire::connect_tcp;

/// What a cluster node writes instead of the host of a node without a host name, if host names are
/// preferred (`cluster-preferred-endpoint-type hostname`). It may stand for any node, not only the
/// answering one.
pub(super) const UNKNOWN_HOST: &str = "?";

/// Address of a server, or the path of its socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Address {
    Tcp(Endpoint),
    Unix(PathBuf),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp(endpoint) => endpoint.fmt(f),
            Address::Unix(path) => path.display().fmt(f),
        }
    }
}

/// Address of a server.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Endpoint {
    host: String,
    port: u16,
}

impl Endpoint {
    pub(super) fn new(host: &str, port: u16) -> Endpoint {
        Endpoint {
            host: host.to_owned(),
            port,
        }
    }

    pub(super) fn host(&self) -> &str {
        &self.host
    }

    /// Parses `host`, `host:port`, `[v6]` or `[v6]:port`. The host is ASCII, as DNS and certificates have it.
    pub(super) fn parse(text: &str, default_port: u16) -> Option<Endpoint> {
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (host, port) = rest.split_once(']')?;
                // May contain a zone: `fe80::1%eth0`.
                let address = host.split('%').next()?;
                address.parse::<Ipv6Addr>().ok()?;
                let port = match port {
                    "" => None,
                    port => Some(port.strip_prefix(':')?),
                };
                (host, port)
            }
            None => {
                let mut parts = text.splitn(2, ':');
                let (host, port) = (parts.next()?, parts.next());
                let host = Some(host).filter(|host| host.is_ascii() && !host.contains(['%', ':']));
                (host?, port)
            }
        };
        let port = match port {
            Some(port) => port.parse().ok().filter(|&port| port > 0)?,
            None => default_port,
        };
        let is_host = |c: char| !c.is_whitespace() && !c.is_control() && !"/?#@[]".contains(c);
        let is_wildcard = host
            .parse()
            .is_ok_and(|address: IpAddr| address.is_unspecified());
        let good = !host.is_empty() && !is_wildcard && host.chars().all(is_host);
        good.then(|| Endpoint::new(host, port))
    }

    /// Parses an address in a redirection: the port follows the last colon, a v6 address has no brackets,
    /// and an empty host means that of `responder`, the answering node. `None` also for [`UNKNOWN_HOST`].
    pub(super) fn parse_redirect(text: &str, responder: &Endpoint) -> Option<Endpoint> {
        let (host, port) = text.rsplit_once(':')?;
        let port = port.parse().ok()?;
        (host != UNKNOWN_HOST).then(|| responder.with_host_and_port(host, port))
    }

    /// Returns the endpoint with this port, and with this host unless it is empty.
    pub(super) fn with_host_and_port(&self, host: &str, port: u16) -> Endpoint {
        match host {
            "" => Endpoint::new(&self.host, port),
            host => Endpoint::new(host, port),
        }
    }

    pub(super) fn port(&self) -> u16 {
        self.port
    }

    /// Connects to it.
    pub(super) async fn connect(&self) -> Result<TcpStream, ExchangeError> {
        let connected = connect_tcp(&self.host, self.port).await;
        connected.map_err(|error| ExchangeError::unreachable(self, error))
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}
