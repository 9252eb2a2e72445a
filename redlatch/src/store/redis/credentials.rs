//! Credentials that change while a program runs: tokens that expire, passwords that are rotated.

use std::fmt;
use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::wire::Cmd;
use crate::error::{Cause, Result};
use crate::join::Boxed;

/// Credentials of the client.
#[derive(Debug, Clone, Default)]
pub(crate) struct Login {
    pub(crate) username: Option<String>,
    pub(crate) password: Option<Password>,
}

#[derive(Debug, Clone)]
pub(crate) enum Password {
    Text(Secret),
    /// The first line of this file. Read again for every new connection, because passwords change
    /// while programs run.
    File(PathBuf),
}

impl Password {
    pub(crate) fn text(text: impl Into<String>) -> Password {
        Password::Text(Secret(text.into()))
    }
}

/// Text that is never shown.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Secret(pub(crate) String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// What a client logs in with: see
/// [`ClientBuilder::credentials`](crate::ClientBuilder::credentials).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credentials {
    pub(super) username: Option<String>,
    pub(super) password: Secret,
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

    /// Returns the command that logs in. Without a username it has one argument, which servers
    /// without users understand, too.
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

    pub(super) fn ask(&self) -> Boxed<'static, Result<Credentials, Cause>> {
        (self.0)()
    }
}

impl fmt::Debug for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Provider")
    }
}
