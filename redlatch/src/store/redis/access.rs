//! How the servers of a deployment are spoken to, wherever they are.

use std::fmt;
use std::time::Duration;

use redis::io::tcp::{TcpSettings, socket2::TcpKeepalive};
use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo, ProtocolVersion};

use super::fault::Fault;
use crate::error::Error;

/// How long the kernel may go without hearing from the server before it calls the connection
/// broken. Without it a server that vanished (no RST) would hold the one connection for minutes;
/// a server that is merely stopped still acknowledges and is not affected.
const SILENCE: Duration = Duration::from_secs(10);

/// Credentials, database, TLS and socket options: all but the address.
#[derive(Clone)]
pub(super) struct Access(ConnectionInfo);

/// Where a server listens.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Endpoint {
    host: String,
    port: u16,
}

impl Access {
    /// What a URL asks for, and what we want besides: RESP3, our name for CLIENT LIST, and sockets
    /// that notice a vanished server.
    pub(super) fn new(info: &ConnectionInfo) -> Access {
        let settings = info
            .redis_settings()
            .clone()
            .set_protocol(ProtocolVersion::RESP3)
            .set_lib_name("redlatch", env!("CARGO_PKG_VERSION"));
        let keepalive = TcpKeepalive::new()
            .with_time(SILENCE / 2)
            .with_interval(SILENCE / 4);
        let tcp = TcpSettings::default()
            .set_nodelay(true)
            .set_keepalive(keepalive);
        #[cfg(target_os = "linux")]
        let tcp = tcp.set_user_timeout(SILENCE);
        let info = info.clone().set_redis_settings(settings);
        Access(info.set_tcp_settings(tcp))
    }

    /// A client of the server at this address.
    pub(super) fn to(&self, addr: ConnectionAddr) -> Result<redis::Client, Fault> {
        let info = self.0.clone().set_addr(addr).into_connection_info();
        let client = info.and_then(redis::Client::open);
        client.map_err(|e| {
            Fault::Final(Error::InvalidUrl {
                reason: e.to_string(),
            })
        })
    }

    /// A client of the server that listens there.
    pub(super) fn to_endpoint(&self, endpoint: &Endpoint) -> Result<redis::Client, Fault> {
        let Endpoint { host, port } = endpoint.clone();
        self.to(match self.0.addr() {
            ConnectionAddr::TcpTls {
                insecure,
                tls_params,
                ..
            } => ConnectionAddr::TcpTls {
                host,
                port,
                insecure: *insecure,
                tls_params: tls_params.clone(),
            },
            _ => ConnectionAddr::Tcp(host, port),
        })
    }

    /// The database that is selected.
    pub(super) fn db(&self) -> i64 {
        self.0.redis_settings().db()
    }

    #[cfg(test)]
    pub(super) fn credentials(&self) -> (Option<&str>, Option<&str>, i64) {
        let settings = self.0.redis_settings();
        (settings.username(), settings.password(), settings.db())
    }
}

/// Without what could be secret.
impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Access")
            .field("db", &self.db())
            .finish_non_exhaustive()
    }
}

impl Endpoint {
    pub(super) fn new(host: &str, port: u16) -> Endpoint {
        Endpoint {
            host: host.to_owned(),
            port,
        }
    }

    /// `host`, `host:port`, `[v6]` or `[v6]:port`.
    pub(super) fn parse(text: &str, default_port: u16) -> Option<Endpoint> {
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (host, port) = rest.split_once(']')?;
                let port = match port {
                    "" => None,
                    port => Some(port.strip_prefix(':')?),
                };
                (host, port)
            }
            None => match text.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (text, None),
            },
        };
        let port = match port {
            Some(port) => port.parse().ok().filter(|&port| port > 0)?,
            None => default_port,
        };
        let is_host = |c: char| !c.is_whitespace() && !c.is_control() && !"/?#@[]".contains(c);
        let good = !host.is_empty() && host.chars().all(is_host);
        good.then(|| Endpoint::new(host, port))
    }

    /// As servers write it in redirections: the port is after the last colon, a v6 address has no
    /// brackets, and without a host it is that of whoever speaks.
    pub(super) fn told(text: &str, speaker: &Endpoint) -> Option<Endpoint> {
        let (host, port) = text.rsplit_once(':')?;
        let host = match host {
            "" | "?" => &speaker.host,
            host => host,
        };
        Some(Endpoint::new(host, port.parse().ok()?))
    }

    /// The same host, or another if there is one named.
    pub(super) fn or_host(&self, host: &str, port: u16) -> Endpoint {
        match host {
            "" | "?" => Endpoint::new(&self.host, port),
            host => Endpoint::new(host, port),
        }
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
