//! How to connect to the servers of a deployment, independent of their addresses.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::address_map::AddressMap;
use super::credentials::Provider;
use super::options::{ConnectOptions, Login, Secret};
#[cfg(feature = "tls")]
pub(super) use super::tls::Tls;
use crate::error::{Error, Result};
use crate::sync::Mutex;

/// Never constructed without the feature `tls`.
#[cfg(not(feature = "tls"))]
pub(super) enum Tls {}

/// Credentials, database, TLS and time limit: everything but the address.
#[derive(Clone)]
pub(super) struct ConnectionConfig {
    pub(super) login: Login,
    /// Has precedence over `login`.
    pub(super) provider: Option<Provider>,
    /// The latest one that was read from a file.
    pub(super) previous_password: Arc<Mutex<Option<Secret>>>,
    pub(super) db: i64,
    pub(super) tls: Option<Arc<Tls>>,
    pub(super) address_map: AddressMap,
    pub(super) connect_timeout: Duration,
    /// Whether the server must be a data server outside of a cluster.
    pub(super) standalone: bool,
    /// Whether one server was supported. Another one at its address is then taken for an outage.
    pub(super) was_supported: Arc<AtomicBool>,
}

impl ConnectionConfig {
    /// Combines the URL and the builder's options. `url_login` comes from the URL; `builder_login`, one of those in the
    /// options, has precedence.
    pub(super) fn new(
        url_login: &Login,
        db: i64,
        builder_login: &Login,
        provider: Option<Provider>,
        tls: Option<Arc<Tls>>,
        options: &ConnectOptions,
    ) -> Result<ConnectionConfig> {
        let (username, password) = (&builder_login.username, &builder_login.password);
        let login = Login {
            username: username.as_ref().or(url_login.username.as_ref()).cloned(),
            password: password.as_ref().or(url_login.password.as_ref()).cloned(),
        };
        // It would not log in at all.
        if login.username.is_some() && login.password.is_none() && provider.is_none() {
            let reason = "there is a username without a password; for a user without a password, \
                          any password works";
            return Err(match username {
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
            login,
            provider,
            previous_password: Arc::default(),
            db,
            tls,
            address_map: options.address_map.clone(),
            connect_timeout: options.settings.connect_timeout,
            standalone: false,
            was_supported: Arc::default(),
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

    #[cfg(test)]
    pub(super) fn login(&self) -> (Option<&str>, Option<&str>, i64) {
        use super::options::Password;

        let Login { username, password } = &self.login;
        let password = password.as_ref().map(|password| match password {
            Password::Text(Secret(text)) => &**text,
            Password::File(path) => path.to_str().unwrap(),
        });
        (username.as_deref(), password, self.db)
    }
}

/// Omits what could be secret.
impl fmt::Debug for ConnectionConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectionConfig")
            .field("db", &self.db)
            .finish_non_exhaustive()
    }
}
