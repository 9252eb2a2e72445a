//! How to connect to the servers of a deployment, independent of their addresses.

use std::borrow::Cow;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use redis::io::tcp::{TcpSettings, socket2::TcpKeepalive};
use redis::{ConnectionAddr, IntoConnectionInfo, ProtocolVersion, RedisConnectionInfo};

use super::connector::{self, Connector, Tls};
use super::exchange_error::ExchangeError;
use super::options::{Login, Secret};
use crate::error::{Error, Result};

/// Time without any acknowledgment after which the kernel considers the connection broken. Without it, a
/// server that vanished (no RST) would block the one connection for minutes. A server that is only stopped
/// still acknowledges and is not affected.
const TCP_TIMEOUT: Duration = Duration::from_secs(10);

/// What a cluster node writes instead of the host of a node without a host name, if host names are
/// preferred (`cluster-preferred-endpoint-type hostname`). It may stand for any node, not only the
/// answering one.
pub(super) const UNKNOWN_HOST: &str = "?";

/// Credentials, database, TLS and socket options: everything but the address.
#[derive(Clone)]
pub(super) struct ConnectionConfig {
    settings: RedisConnectionInfo,
    tcp: TcpSettings,
    tls: Option<Arc<Tls>>,
}

/// Address of a server.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Endpoint {
    host: String,
    port: u16,
}

impl ConnectionConfig {
    /// Combines the URL and the builder with fixed settings: RESP3, the library name for CLIENT LIST, and
    /// sockets that notice a vanished server. `url_login` comes from the URL; `builder_login` has
    /// precedence.
    pub(super) fn new(
        url_login: &Login,
        db: i64,
        builder_login: &Login,
        tls: Option<Arc<Tls>>,
    ) -> Result<ConnectionConfig> {
        let mut settings = RedisConnectionInfo::default()
            .set_db(db)
            .set_protocol(ProtocolVersion::RESP3)
            .set_lib_name("redlatch", env!("CARGO_PKG_VERSION"));
        let keepalive = TcpKeepalive::new()
            .with_time(TCP_TIMEOUT / 2)
            .with_interval(TCP_TIMEOUT / 4);
        let tcp = TcpSettings::default()
            .set_nodelay(true)
            .set_keepalive(keepalive);
        #[cfg(target_os = "linux")]
        let tcp = tcp.set_user_timeout(TCP_TIMEOUT);
        if let Some(username) = builder_login
            .username
            .as_ref()
            .or(url_login.username.as_ref())
        {
            settings = settings.set_username(username);
        }
        if let Some(Secret(password)) = builder_login
            .password
            .as_ref()
            .or(url_login.password.as_ref())
        {
            settings = settings.set_password(password);
        }
        // The client library would not log in at all.
        if settings.username().is_some() && settings.password().is_none() {
            let reason = "there is a username without a password; for a user without a password, \
                          any password works";
            return Err(match builder_login.username {
                Some(_) => Error::InvalidSetting {
                    setting: "username",
                    reason: reason.into(),
                },
                None => Error::InvalidUrl {
                    reason: reason.into(),
                },
            });
        }
        Ok(ConnectionConfig { settings, tcp, tls })
    }

    /// Returns how to connect to the server at this address.
    pub(super) fn connector_for_addr(
        &self,
        addr: ConnectionAddr,
    ) -> Result<Connector, ExchangeError> {
        let info = addr.into_connection_info().map(|info| {
            let info = info.set_redis_settings(self.settings.clone());
            info.set_tcp_settings(self.tcp.clone())
        });
        let client = info.and_then(redis::Client::open);
        let client = client.map_err(|e| {
            ExchangeError::Permanent(Error::InvalidUrl {
                reason: e.to_string(),
            })
        })?;
        let tls = self.tls.clone();
        Ok(Connector { client, tls })
    }

    /// The same for an endpoint.
    pub(super) fn connector_for(&self, endpoint: &Endpoint) -> Result<Connector, ExchangeError> {
        self.connector_for_addr(endpoint.to_addr())
    }

    /// Returns a hint to append to timeout errors if the server does not answer.
    pub(super) fn timeout_hint(&self) -> &'static str {
        connector::timeout_hint(self.tls.is_some())
    }

    /// Returns the selected database.
    pub(super) fn db(&self) -> i64 {
        self.settings.db()
    }

    #[cfg(test)]
    pub(super) fn credentials(&self) -> (Option<&str>, Option<&str>, i64) {
        let settings = &self.settings;
        (settings.username(), settings.password(), settings.db())
    }
}

/// Omits what could be secret.
impl fmt::Debug for ConnectionConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectionConfig")
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

    pub(super) fn to_addr(&self) -> ConnectionAddr {
        ConnectionAddr::Tcp(self.host.clone(), self.port)
    }

    /// Parses `host`, `host:port`, `[v6]` or `[v6]:port`. A non-ASCII host name is converted to its `xn--`
    /// form, which DNS and certificates use.
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
                (Cow::Borrowed(host), port)
            }
            None => {
                let (host, port) = match text.split_once(':') {
                    Some((host, port)) => (host, Some(port)),
                    None => (text, None),
                };
                let ascii = match host.is_ascii() {
                    true => Cow::Borrowed(host),
                    false => Cow::Owned(idna::domain_to_ascii(host).ok()?),
                };
                (Some(ascii).filter(|host| !host.contains(['%', ':']))?, port)
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
        good.then(|| Endpoint::new(&host, port))
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
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}
