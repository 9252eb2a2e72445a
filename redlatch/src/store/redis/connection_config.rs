//! How to connect to the servers of a deployment, independent of their addresses.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::options::{Login, Secret};
#[cfg(feature = "tls")]
pub(super) use super::tls::Tls;
use super::wire::Handshake;
use crate::error::{Error, Result};

/// Never constructed without the feature `tls`.
#[cfg(not(feature = "tls"))]
pub(super) enum Tls {}

/// Credentials, database, TLS and time limit: everything but the address.
#[derive(Clone)]
pub(super) struct ConnectionConfig {
    pub(super) handshake: Handshake,
    pub(super) tls: Option<Arc<Tls>>,
    pub(super) connect_timeout: Duration,
}

impl ConnectionConfig {
    /// Combines the URL and the builder. `url_login` comes from the URL; `builder_login` has precedence.
    pub(super) fn new(
        url_login: &Login,
        db: i64,
        builder_login: &Login,
        tls: Option<Arc<Tls>>,
        connect_timeout: Duration,
    ) -> Result<ConnectionConfig> {
        let [url_password, password] =
            [url_login, builder_login].map(|login| login.password.as_ref());
        let password = password.or(url_password);
        let handshake = Handshake {
            username: builder_login
                .username
                .as_ref()
                .or(url_login.username.as_ref())
                .cloned(),
            password: password.map(|Secret(password)| password.clone()),
            db,
        };
        // It would not log in at all.
        if handshake.username.is_some() && handshake.password.is_none() {
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
        Ok(ConnectionConfig {
            handshake,
            tls,
            connect_timeout,
        })
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
        self.handshake.db
    }

    #[cfg(test)]
    pub(super) fn credentials(&self) -> (Option<&str>, Option<&str>, i64) {
        let Handshake {
            username,
            password,
            db,
        } = &self.handshake;
        (username.as_deref(), password.as_deref(), *db)
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
