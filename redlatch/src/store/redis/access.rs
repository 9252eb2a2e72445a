//! How to connect to the servers of a deployment, independent of their addresses.

use std::borrow::Cow;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use redis::io::tcp::{TcpSettings, socket2::TcpKeepalive};
use redis::{ConnectionAddr, IntoConnectionInfo, ProtocolVersion, RedisConnectionInfo};

use super::dial::{self, Dial, Tls};
use super::fault::Fault;
use super::given::{Login, Secret};
use crate::error::{Error, Result};

/// Time without any acknowledgment after which the kernel considers the connection broken. Without it, a
/// server that vanished (no RST) would block the one connection for minutes. A server that is only stopped
/// still acknowledges and is not affected.
const SILENCE: Duration = Duration::from_secs(10);

/// What a cluster node writes instead of the host of a node without a host name, if host names are
/// preferred (`cluster-preferred-endpoint-type hostname`). It may stand for any node, not only the
/// answering one.
pub(super) const NAMELESS: &str = "?";

/// Credentials, database, TLS and socket options: everything but the address.
#[derive(Clone)]
pub(super) struct Access {
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

impl Access {
    /// Combines the URL and the builder with fixed settings: RESP3, the library name for CLIENT LIST, and
    /// sockets that notice a vanished server. `named` is the login in the URL; `login`, the builder's, has
    /// precedence.
    pub(super) fn new(
        named: &Login,
        db: i64,
        login: &Login,
        tls: Option<Arc<Tls>>,
    ) -> Result<Access> {
        let mut settings = RedisConnectionInfo::default()
            .set_db(db)
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
        if let Some(username) = login.username.as_ref().or(named.username.as_ref()) {
            settings = settings.set_username(username);
        }
        if let Some(Secret(password)) = login.password.as_ref().or(named.password.as_ref()) {
            settings = settings.set_password(password);
        }
        // The client library would not log in at all.
        if settings.username().is_some() && settings.password().is_none() {
            let reason = "there is a username without a password; for a user without a password, \
                          any password works";
            return Err(match login.username {
                Some(_) => Error::InvalidSetting {
                    setting: "username",
                    reason: reason.into(),
                },
                None => Error::InvalidUrl {
                    reason: reason.into(),
                },
            });
        }
        Ok(Access { settings, tcp, tls })
    }

    /// Returns how to connect to the server at this address.
    pub(super) fn to(&self, addr: ConnectionAddr) -> Result<Dial, Fault> {
        let info = addr.into_connection_info().map(|info| {
            let info = info.set_redis_settings(self.settings.clone());
            info.set_tcp_settings(self.tcp.clone())
        });
        let client = info.and_then(redis::Client::open);
        let client = client.map_err(|e| {
            Fault::Final(Error::InvalidUrl {
                reason: e.to_string(),
            })
        })?;
        let tls = self.tls.clone();
        Ok(Dial { client, tls })
    }

    /// The same for an endpoint.
    pub(super) fn to_endpoint(&self, endpoint: &Endpoint) -> Result<Dial, Fault> {
        self.to(endpoint.to_addr())
    }

    /// Hint appended to timeout errors if the server does not answer.
    pub(super) fn silence(&self) -> &'static str {
        dial::silence(self.tls.is_some())
    }

    /// The selected database.
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
    /// and an empty host means that of `speaker`, the answering node. `None` also for [`NAMELESS`].
    pub(super) fn told(text: &str, speaker: &Endpoint) -> Option<Endpoint> {
        let (host, port) = text.rsplit_once(':')?;
        let port = port.parse().ok()?;
        (host != NAMELESS).then(|| speaker.or_host(host, port))
    }

    /// Returns the endpoint with this port, and with this host unless it is empty.
    pub(super) fn or_host(&self, host: &str, port: u16) -> Endpoint {
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
