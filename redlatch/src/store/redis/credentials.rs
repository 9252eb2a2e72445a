//! Credentials that change while a program runs: tokens that expire, passwords that are rotated.

use std::fmt;
use std::future::Future;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::connection_config::ConnectionConfig;
use super::exchange_error::ExchangeError;
use super::options::{Login, Password, Secret};
use super::wire::{Cmd, Wire};
use crate::error::{Cause, Error, Result};
use crate::join::Boxed;
use crate::step::{Args as _, ScriptReply};

/// How long after a failure a connection in use tries to log in again.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// What a client logs in with: see [`ClientBuilder::credentials`](crate::ClientBuilder::credentials).
#[derive(Debug, Clone)]
pub struct Credentials {
    username: Option<String>,
    password: Secret,
    renewed_after: Option<Duration>,
}

impl Credentials {
    /// Returns credentials of the default user with this password. `Debug` does not show it.
    pub fn new(password: impl Into<String>) -> Credentials {
        Credentials {
            username: None,
            password: Secret(password.into()),
            renewed_after: None,
        }
    }

    /// Sets the user (ACL).
    pub fn username(mut self, username: impl Into<String>) -> Credentials {
        self.username = Some(username.into());
        self
    }

    /// Sets how long after each login the open connections ask for new credentials and log in again (AUTH), without an
    /// interruption. Without it, they do not. For a token that expires, some minutes before its end, because servers end the
    /// connection then.
    pub fn renewed_after(mut self, time: Duration) -> Credentials {
        self.renewed_after = Some(time);
        self
    }
}

/// Provides the credentials for each new connection.
#[derive(Clone)]
pub(crate) struct Provider(Arc<Ask>);

type Ask = dyn Fn() -> Boxed<'static, Result<Credentials, Cause>> + Send + Sync;

impl Provider {
    pub(crate) fn new<F, C, E>(ask: F) -> Provider
    where
        F: Fn() -> C + Send + Sync + 'static,
        C: Future<Output = Result<Credentials, E>> + Send + 'static,
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        Provider(Arc::new(move || {
            let asked = ask();
            Box::pin(async move {
                asked.await.map_err(|error| {
                    let error = error.into();
                    Cause::from(format!("the credentials provider failed: {error}"))
                })
            })
        }))
    }
}

impl fmt::Debug for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Provider")
    }
}

/// What a connection logs in with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CurrentLogin {
    username: Option<String>,
    password: String,
}

impl CurrentLogin {
    /// Adds the user and the password to a command.
    pub(super) fn write(&self, cmd: &mut Cmd) {
        cmd.text(self.username.as_deref().unwrap_or("default"));
        cmd.text(&self.password);
    }
}

impl ConnectionConfig {
    /// Returns whether another try may find other credentials.
    pub(super) fn has_changing_login(&self) -> bool {
        self.provider.is_some() || matches!(self.login.password, Some(Password::File(_)))
    }

    /// Returns what to log in with now, if anything, and when to log in again.
    pub(super) async fn current_login(
        &self,
    ) -> Result<(Option<CurrentLogin>, Option<Duration>), ExchangeError> {
        let Login { username, password } = &self.login;
        let (username, password, renewed_after) = match (&self.provider, password) {
            (Some(Provider(ask)), _) => {
                let asked = ask().await.map_err(ExchangeError::not_executed)?;
                let Secret(password) = asked.password;
                (
                    asked.username.or_else(|| username.clone()),
                    password,
                    asked.renewed_after,
                )
            }
            (None, Some(Password::File(path))) => (username.clone(), read_password(path)?, None),
            (None, Some(Password::Text(Secret(text)))) => (username.clone(), text.clone(), None),
            (None, None) => return Ok((None, None)),
        };
        if password.is_empty() && self.has_changing_login() {
            let reason = "the password of the credentials is empty".into();
            return Err(Error::AuthenticationFailed { reason }.into());
        }
        Ok((Some(CurrentLogin { username, password }), renewed_after))
    }

    /// Logs in again on a connection in use, until it ends or no credentials need that any more.
    pub(super) async fn log_in_again(self, wire: Weak<Wire>, after: Duration) {
        let mut next = Some(after);
        while let Some(after) = next {
            sleep(after).await;
            let Some(wire) = wire.upgrade().filter(|wire| !wire.has_ended()) else {
                return;
            };
            let renewed = timeout(self.connect_timeout, self.renew_login(&wire)).await;
            let limit = || ExchangeError::not_executed("no answer in time");
            next = renewed
                .unwrap_or_else(|_| Err(limit()))
                .unwrap_or_else(|failure| {
                    let reason = failure.reason();
                    tracing::warn!(reason, "a connection could not log in again; retrying");
                    Some(RETRY_AFTER)
                });
        }
    }

    async fn renew_login(&self, wire: &Arc<Wire>) -> Result<Option<Duration>, ExchangeError> {
        let (login, renewed_after) = self.current_login().await?;
        let mut auth = Cmd::of(&["AUTH"]);
        login.iter().for_each(|login| login.write(&mut auth));
        match wire.send(&auth).await.reply {
            Some(ScriptReply::Error(error)) => Err(ExchangeError::from_refusal("AUTH", &error)),
            // The connection has ended; the next one logs in.
            None => Ok(None),
            Some(_) => Ok(renewed_after),
        }
    }
}

/// Returns the first line of a file.
fn read_password(path: &std::path::Path) -> Result<String, ExchangeError> {
    let text = std::fs::read_to_string(path).map_err(|error| {
        let text = format!("the password cannot be read: {}: {error}", path.display());
        ExchangeError::NotExecuted(Cause::new(text, error))
    })?;
    Ok(text.lines().next().unwrap_or_default().to_owned())
}
