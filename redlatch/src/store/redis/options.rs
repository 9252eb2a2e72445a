//! Connection options from the builder, other than the URL.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use super::address_map::AddressMap;
use super::credentials::{Login, Provider};

/// Settings of the connections. Credentials and TLS have precedence over the URL.
#[derive(Debug, Clone, Default)]
pub(crate) struct ConnectOptions {
    pub(crate) settings: RedisSettings,
    /// For the data servers.
    pub(crate) login: Login,
    /// Has precedence over `login`.
    pub(crate) provider: Option<Provider>,
    /// For sentinels, which have users of their own.
    pub(crate) sentinel_login: Login,
    pub(crate) tls: Certificates,
    pub(crate) address_map: AddressMap,
}

/// Time limits, the replicas to wait for, and how steps are sent.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RedisSettings {
    pub(crate) connect_timeout: Duration,
    pub(crate) response_timeout: Duration,
    pub(crate) replica_sync: ReplicaSync,
    pub(crate) replica_timeout: Duration,
    /// Whether steps that wait to be sent are sent together.
    pub(crate) batching: bool,
    /// Whether servers are asked to report changes of the keys of holds.
    pub(crate) tracking: bool,
}

impl Default for RedisSettings {
    fn default() -> RedisSettings {
        RedisSettings {
            connect_timeout: Duration::from_secs(5),
            response_timeout: Duration::from_secs(3),
            replica_sync: ReplicaSync::default(),
            replica_timeout: Duration::from_secs(1),
            batching: true,
            tracking: true,
        }
    }
}

/// How many replicas must acknowledge an acquisition before it counts.
///
/// If too few do, the acquisition is released, and the error is
/// [`Error::NotReplicated`](crate::Error::NotReplicated). All settings but `Off` need a second connection.
/// It carries the attempts and waits for the replicas (Redis: WAIT), in the same round trip as the attempt.
///
/// No setting makes a lock survive every failover: the replica that becomes the master may not have the
/// lock. For actions that must not happen twice, use the tokens of a
/// [`FencedLock`](crate::FencedLock), or a [`RedLock`](crate::RedLock) over independent servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum ReplicaSync {
    /// Waits for all connected replicas, and requires that at least one of them acknowledges, if any is
    /// connected (as Redisson does with `checkLockSyncedSlaves`). The default. With a single server it is
    /// off if no replica is connected when the client connects (but with `connect_lazy`).
    #[default]
    All,
    /// Requires as many connected replicas as make, with the master, more than half of all of these servers. With a
    /// single server it is off if no replica is connected when the client connects. A master that has lost all of its
    /// replicas grants locks: only `AtLeast` prevents that.
    Majority,
    /// Requires this number of replicas, even if fewer are connected: nothing can be acquired then. So a
    /// master that was cut off from its replicas grants no locks.
    AtLeast(usize),
    /// Does not wait for replicas.
    Off,
}

/// Trusted certificates, the server's name in its certificate, and the client's own certificate.
#[derive(Debug, Clone, Default)]
pub(crate) struct Certificates {
    /// Replaces the certificates of the system.
    pub(crate) ca: Option<Pem>,
    /// Replaces the host of the address.
    pub(crate) server_name: Option<String>,
    /// Certificate and key.
    pub(crate) client: Option<(Pem, Pem)>,
}

impl Certificates {
    /// Returns the name of a setting that makes no sense without TLS, if one is set.
    pub(super) fn first_tls_setting(&self) -> Option<&'static str> {
        let settings = [
            (self.ca.is_some(), "tls_ca"),
            (self.server_name.is_some(), "tls_server_name"),
            (self.client.is_some(), "tls_client_cert"),
        ];
        let first = settings.into_iter().find(|(is_set, _)| *is_set);
        first.map(|(_, setting)| setting)
    }
}

/// Certificates or keys in PEM, or the path of their file.
#[derive(Clone)]
#[cfg_attr(not(feature = "tls"), expect(dead_code, reason = "only TLS uses it"))]
pub(crate) enum Pem {
    Text(Vec<u8>),
    /// Read again for every new connection, because certificates are renewed while programs run.
    File(PathBuf),
}

impl fmt::Debug for Pem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Pem::Text(_) => f.write_str("***"),
            Pem::File(path) => write!(f, "{path:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::credentials::Password;
    use super::*;

    #[test]
    fn secrets_are_not_shown() {
        let options = ConnectOptions {
            login: Login {
                username: Some("me".into()),
                password: Some(Password::text("s3cret")),
            },
            tls: Certificates {
                ca: None,
                server_name: None,
                client: Some((
                    Pem::File("/etc/cert.pem".into()),
                    Pem::Text(b"s3cret".into()),
                )),
            },
            ..ConnectOptions::default()
        };
        let shown = format!("{options:?}");
        assert!(shown.contains("me") && shown.contains("/etc/cert.pem"));
        assert!(
            !shown.contains("s3cret") && !shown.contains("115"),
            "{shown}"
        );
    }
}
