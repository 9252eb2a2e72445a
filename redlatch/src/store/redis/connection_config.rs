//! How to connect to the servers of a deployment, independent of their addresses.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use redis::io::tcp::{TcpSettings, socket2::TcpKeepalive};
use redis::{ProtocolVersion, RedisConnectionInfo};

use super::options::{Login, Secret};
#[cfg(feature = "tls")]
pub(super) use super::tls::Tls;
use crate::error::{Error, Result};

/// Never constructed without the feature `tls`.
#[cfg(not(feature = "tls"))]
pub(super) enum Tls {}

/// Time without any acknowledgment after which the kernel considers the connection broken. Without it, a
/// server that vanished (no RST) would block the one connection for minutes. A server that is only stopped
/// still acknowledges and is not affected.
const TCP_TIMEOUT: Duration = Duration::from_secs(10);

/// Credentials, database, TLS and socket options: everything but the address.
#[derive(Clone)]
pub(super) struct ConnectionConfig {
    pub(super) settings: RedisConnectionInfo,
    pub(super) tcp: TcpSettings,
    pub(super) tls: Option<Arc<Tls>>,
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
        for login in [url_login, builder_login] {
            if let Some(username) = &login.username {
                settings = settings.set_username(username);
            }
            if let Some(Secret(password)) = &login.password {
                settings = settings.set_password(password);
            }
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

    /// Returns a hint to append to timeout errors if the server does not answer. A server without TLS takes
    /// the handshake for the start of a long command, and waits for its rest.
    pub(super) fn timeout_hint(&self) -> &'static str {
        match self.tls {
            Some(_) => "; the server may not speak TLS on this port",
            None => "",
        }
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
