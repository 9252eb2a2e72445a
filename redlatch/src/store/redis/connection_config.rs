//! How to connect to the servers of a deployment, independent of their addresses.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::address_map::AddressMap;
use super::credentials::{Credentials, Login, Password, Provider, Secret};
use super::exchange_error::ExchangeError;
use super::options::ConnectOptions;
#[cfg(feature = "tls")]
pub(super) use super::tls::Tls;
use super::wire::Wire;
use crate::backoff::Backoff;
use crate::error::{Error, Result};
use crate::step::ScriptReply;
use crate::sync::Mutex;

/// The shortest time between two logins on one connection.
const SHORTEST_PAUSE: Duration = Duration::from_secs(1);

/// The longest pause between two tries to log in again.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

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

    /// Returns how to connect to servers without a login and without TLS.
    #[cfg(test)]
    pub(super) fn plain() -> ConnectionConfig {
        let (login, options) = (Login::default(), ConnectOptions::default());
        ConnectionConfig::new(&login, 0, &login, None, None, &options).unwrap()
    }

    #[cfg(test)]
    pub(super) fn login(&self) -> (Option<&str>, Option<&str>, i64) {
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

impl ConnectionConfig {
    /// Returns whether another try may find other credentials.
    pub(super) fn has_changing_credentials(&self) -> bool {
        self.provider.is_some() || matches!(self.login.password, Some(Password::File(_)))
    }

    /// Returns what to log in with now, if anything.
    pub(super) async fn credentials(&self) -> Result<Option<Credentials>, ExchangeError> {
        let mut credentials = match (&self.provider, &self.login.password) {
            (Some(provider), _) => provider.ask().await.map_err(ExchangeError::not_executed)?,
            (None, Some(Password::File(path))) => Credentials::new(self.read_password(path)?),
            (None, Some(Password::Text(Secret(text)))) => Credentials::new(text),
            (None, None) => return Ok(None),
        };
        if credentials.password.0.is_empty() && self.has_changing_credentials() {
            let reason = "the password of the credentials is empty";
            return Err(Error::authentication_failed(reason).into());
        }
        let username = credentials.username.or_else(|| self.login.username.clone());
        credentials.username = username;
        Ok(Some(credentials))
    }

    /// Reads the first line of a file. While that fails, the previous password is used: perhaps the
    /// file is being replaced.
    fn read_password(&self, path: &Path) -> Result<String, ExchangeError> {
        let read = std::fs::read_to_string(path);
        let read = read.map(|text| text.lines().next().unwrap_or_default().to_owned());
        let mut previous = self.previous_password.lock();
        let error = match read {
            Ok(password) if !password.is_empty() => {
                *previous = Some(Secret(password.clone()));
                return Ok(password);
            }
            Ok(_) => "its first line is empty".to_owned(),
            Err(error) => error.to_string(),
        };
        let error = format!("{}: {error}", path.display());
        match &*previous {
            Some(Secret(password)) => {
                tracing::warn!(error, "the password cannot be read; using the previous one");
                Ok(password.clone())
            }
            None => Err(ExchangeError::not_executed(format!(
                "the password cannot be read: {error}"
            ))),
        }
    }

    /// Logs in again on a connection in use, for as long as its credentials need that. The end of
    /// the connection aborts this.
    pub(super) async fn log_in_again(self, wire: Arc<Wire>, after: Duration) {
        let (mut next, mut failures) = (Some(after), 0);
        while let Some(after) = next {
            sleep(after.max(SHORTEST_PAUSE)).await;
            let renewed = timeout(self.connect_timeout, self.renew_login(&wire)).await;
            let limit = || ExchangeError::not_executed("no answer in time");
            next = match renewed.unwrap_or_else(|_| Err(limit())) {
                Ok(renewed_after) => {
                    failures = 0;
                    renewed_after
                }
                Err(failure) => {
                    if failures == 0 {
                        let reason = failure.reason();
                        tracing::warn!(reason, "a connection could not log in again; retrying");
                    }
                    failures += 1;
                    let pauses = Backoff::exponential(SHORTEST_PAUSE, 2.0, LONGEST_PAUSE);
                    Some(pauses.pause(failures))
                }
            };
        }
    }

    async fn renew_login(&self, wire: &Arc<Wire>) -> Result<Option<Duration>, ExchangeError> {
        let Some(credentials) = self.credentials().await? else {
            return Ok(None);
        };
        match wire.send(&credentials.auth()).await.reply {
            Some(ScriptReply::Error(error)) => Err(ExchangeError::from_refusal("AUTH", &error)),
            // The connection has ended; the next one logs in.
            None => Ok(None),
            Some(_) => Ok(credentials.renewed_after),
        }
    }
}
