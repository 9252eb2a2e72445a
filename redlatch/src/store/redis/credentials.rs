//! Credentials that change while a program runs: tokens that expire, passwords that are rotated.

use std::fmt;
use std::future::Future;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::connection_config::ConnectionConfig;
use super::exchange_error::ExchangeError;
use super::options::{Password, Secret};
use super::wire::{Cmd, Wire};
use crate::backoff::Backoff;
use crate::error::{Cause, Error, Result};
use crate::join::Boxed;
use crate::step::{Args as _, ScriptReply};

/// The shortest time between two logins on one connection.
const SHORTEST_PAUSE: Duration = Duration::from_secs(1);

/// The longest pause between two tries to log in again.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// What a client logs in with: see
/// [`ClientBuilder::credentials`](crate::ClientBuilder::credentials).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credentials {
    username: Option<String>,
    password: Secret,
    pub(super) renewed_after: Option<Duration>,
}

impl Credentials {
    /// Creates credentials with this password, which `Debug` does not show. The user is that of the
    /// builder or the URL, else the default user.
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

    /// Sets how long after each login an open connection asks for new credentials and logs in again
    /// (AUTH), without an interruption; at least 1 s. Without it, open connections do not log in
    /// again. For a token that expires: some minutes before its end, when the server ends the
    /// connection.
    pub fn renewed_after(mut self, time: Duration) -> Credentials {
        self.renewed_after = Some(time);
        self
    }

    /// Adds the user and the password to a command.
    /// Returns the command that logs in. Without a username it has one argument, which servers without users understand, too.
    pub(super) fn auth(&self) -> Cmd {
        let mut auth = Cmd::of(&["AUTH"]);
        self.username
            .iter()
            .for_each(|username| auth.text(username));
        auth.text(&self.password.0);
        auth
    }

    /// Adds the arguments of HELLO that log in.
    pub(super) fn write(&self, cmd: &mut Cmd) {
        cmd.text(self.username.as_deref().unwrap_or("default"));
        cmd.text(&self.password.0);
    }

    /// Returns whether a server would accept or refuse both alike.
    pub(super) fn is_same_login(&self, other: &Credentials) -> bool {
        (&self.username, &self.password) == (&other.username, &other.password)
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

impl ConnectionConfig {
    /// Returns whether another try may find other credentials.
    pub(super) fn has_changing_credentials(&self) -> bool {
        self.provider.is_some() || matches!(self.login.password, Some(Password::File(_)))
    }

    /// Returns what to log in with now, if anything.
    pub(super) async fn credentials(&self) -> Result<Option<Credentials>, ExchangeError> {
        let mut credentials = match (&self.provider, &self.login.password) {
            (Some(Provider(ask)), _) => ask().await.map_err(ExchangeError::not_executed)?,
            (None, Some(Password::File(path))) => Credentials::new(self.read_password(path)?),
            (None, Some(Password::Text(Secret(text)))) => Credentials::new(text),
            (None, None) => return Ok(None),
        };
        if credentials.password.0.is_empty() && self.has_changing_credentials() {
            let reason = "the password of the credentials is empty".into();
            return Err(Error::AuthenticationFailed { reason }.into());
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
