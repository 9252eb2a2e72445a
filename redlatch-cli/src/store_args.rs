//! The store's address, credentials and settings. Passwords are read from files or the environment,
//! because every user of the machine can see the command line.

use std::path::{Path, PathBuf};
use std::time::Duration;

use redlatch::{ClientBuilder, ReplicaSync};

use crate::duration;
use crate::exit::Failure;
use crate::stderr::stderr;

/// Options for the store's address, login, TLS and timeouts. No option takes a password.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Store")]
pub(crate) struct StoreArgs {
    /// The store: `redis://[user@]host[:port][/db]`, with TLS `rediss://…`; `redis+unix:///path`;
    /// `redis+sentinel://host,host/master[/db]`; `redis+cluster://host,host`
    ///
    /// Do not include a password: every user of the machine can see the command line. Put it into
    /// REDLATCH_PASSWORD or a file.
    #[arg(
        long,
        global = true,
        env = "REDLATCH_URL",
        hide_env_values = true,
        default_value = "redis://127.0.0.1:6379"
    )]
    pub(crate) url: String,

    /// The user to log in as
    #[arg(long, global = true, env = "REDLATCH_USERNAME", value_name = "NAME")]
    user: Option<String>,

    /// The file whose first line is the password [default: the password is in REDLATCH_PASSWORD]
    #[arg(long, global = true, value_name = "PATH")]
    password_file: Option<PathBuf>,

    /// The user for the Sentinels
    #[arg(
        long,
        global = true,
        env = "REDLATCH_SENTINEL_USERNAME",
        value_name = "NAME"
    )]
    sentinel_user: Option<String>,

    /// The file whose first line is the password for the Sentinels [default: the password is in
    /// REDLATCH_SENTINEL_PASSWORD]
    #[arg(long, global = true, value_name = "PATH")]
    sentinel_password_file: Option<PathBuf>,

    /// The CA certificates to trust for the store, in PEM, instead of the system's
    #[arg(long, global = true, env = "REDLATCH_TLS_CA", value_name = "PATH")]
    tls_ca: Option<PathBuf>,

    /// The client certificate for the store, in PEM
    #[arg(long, global = true, env = "REDLATCH_TLS_CERT", value_name = "PATH")]
    tls_cert: Option<PathBuf>,

    /// The private key of the client certificate, in PEM
    #[arg(long, global = true, env = "REDLATCH_TLS_KEY", value_name = "PATH")]
    tls_key: Option<PathBuf>,

    /// How long to wait for a reply; make it longer than a failover to survive one [default: 3s]
    #[arg(
        long,
        global = true,
        env = "REDLATCH_RESPONSE_TIMEOUT",
        value_name = "DUR",
        value_parser = duration::parse,
    )]
    response_timeout: Option<Duration>,

    /// How many replicas must acknowledge an acquisition: `all` (it waits for all connected replicas, and needs
    /// one of them), `majority`, a number, or `off` [default: all]
    #[arg(
        long,
        global = true,
        env = "REDLATCH_REPLICAS",
        value_name = "COUNT",
        value_parser = parse_replica_sync,
    )]
    replicas: Option<ReplicaSync>,
}

fn parse_replica_sync(text: &str) -> Result<ReplicaSync, String> {
    match text {
        "all" => Ok(ReplicaSync::All),
        "majority" => Ok(ReplicaSync::Majority),
        "off" => Ok(ReplicaSync::Off),
        number => match number.parse() {
            Ok(0) => Ok(ReplicaSync::Off),
            Ok(count) => Ok(ReplicaSync::AtLeast(count)),
            Err(_) => Err("use all, majority, off or a number".into()),
        },
    }
}

/// Environment variables that may contain passwords.
const PASSWORD_VARIABLE: &str = "REDLATCH_PASSWORD";
const SENTINEL_PASSWORD_VARIABLE: &str = "REDLATCH_SENTINEL_PASSWORD";
const URL_VARIABLE: &str = "REDLATCH_URL";

impl StoreArgs {
    /// Applies these options, and the passwords from files or the environment, to `builder`.
    pub(crate) fn apply_to(&self, mut builder: ClientBuilder) -> Result<ClientBuilder, Failure> {
        // An empty variable counts as unset.
        let non_empty = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        if let Some(user) = non_empty(&self.user) {
            builder = builder.username(user);
        }
        if let Some(password) = read_password(self.password_file.as_deref(), PASSWORD_VARIABLE)? {
            builder = builder.password(password);
        }
        if let Some(user) = non_empty(&self.sentinel_user) {
            builder = builder.sentinel_username(user);
        }
        let file = self.sentinel_password_file.as_deref();
        if let Some(password) = read_password(file, SENTINEL_PASSWORD_VARIABLE)? {
            builder = builder.sentinel_password(password);
        }
        if let Some(timeout) = self.response_timeout {
            builder = builder.response_timeout(timeout);
        }
        if let Some(sync) = self.replicas {
            builder = builder.replica_sync(sync);
        }
        if let Some(ca) = &self.tls_ca {
            builder = builder.tls_ca_file(ca);
        }
        match (&self.tls_cert, &self.tls_key) {
            (Some(cert), Some(key)) => Ok(builder.tls_client_cert_files(cert, key)),
            (None, None) => Ok(builder),
            _ => Err(Failure::usage(
                "--tls-cert and --tls-key must be used together",
            )),
        }
    }
}

/// Reads a password from the file, or from the environment variable if there is no file.
fn read_password(file: Option<&Path>, variable: &str) -> Result<Option<String>, Failure> {
    let Some(file) = file else {
        return match std::env::var(variable) {
            Ok(password) if password.is_empty() => Ok(None),
            Ok(password) => Ok(Some(password)),
            Err(std::env::VarError::NotPresent) => Ok(None),
            Err(std::env::VarError::NotUnicode(_)) => {
                Err(Failure::usage(format!("{variable} is not valid UTF-8")))
            }
        };
    };
    let path = file.display();
    let text = std::fs::read_to_string(file)
        .map_err(|error| Failure::usage(format!("the password cannot be read: {path}: {error}")))?;
    match text.lines().next() {
        Some(password) if !password.is_empty() => Ok(Some(password.to_owned())),
        _ => Err(Failure::usage(format!(
            "the password cannot be read: the first line of {path} is empty"
        ))),
    }
}

/// Warns if `url`, a command-line argument, contains a password, because other users can see it.
pub(crate) fn warn_if_url_has_password(url: &str) {
    if without_passwords(url) != url {
        stderr!(
            "warning: every user of this machine can see the password in --url, for example with ps; \
             use REDLATCH_PASSWORD, --password-file or REDLATCH_URL instead"
        );
    }
}

/// Returns the environment variables to change for CMD, which must not inherit the passwords. `None` removes
/// the variable.
pub(crate) fn env_changes_for_cmd() -> Vec<(&'static str, Option<String>)> {
    let mut changes = vec![
        (PASSWORD_VARIABLE, None),
        (SENTINEL_PASSWORD_VARIABLE, None),
    ];
    if let Some(url) = std::env::var_os(URL_VARIABLE) {
        changes.push((URL_VARIABLE, url.to_str().map(without_passwords)));
    }
    changes
}

/// Returns the URL without its passwords, but with the user: CMD can still use it. For messages see
/// [`store::without_secrets`](crate::store::without_secrets).
fn without_passwords(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else {
        return url.to_owned();
    };
    // Splits at the last @, because an unescaped password may contain @, and also / ? and #.
    let (login, server) = match rest.rsplit_once('@') {
        Some((login, server)) => match login.split_once(':') {
            Some(("", _)) => (String::new(), server),
            Some((user, _)) => (format!("{user}@"), server),
            None => (format!("{login}@"), server),
        },
        None => (String::new(), rest),
    };
    let (server, query) = server.split_once('?').unwrap_or((server, ""));
    let is_not_password = |pair: &&str| {
        let name = pair.split('=').next().unwrap_or_default();
        !matches!(name, "pass" | "sentinel_password")
    };
    let query: Vec<&str> = query.split('&').filter(is_not_password).collect();
    let query = match query.join("&") {
        query if query.is_empty() => query,
        query => format!("?{query}"),
    };
    format!("{scheme}://{login}{server}{query}")
}

#[cfg(test)]
mod tests {
    use super::without_passwords;

    #[test]
    fn only_passwords_are_removed_from_urls() {
        for (url, expected) in [
            ("redis://h:1/2", "redis://h:1/2"),
            ("redis://u@h", "redis://u@h"),
            ("redis://u:pw@h:1/2", "redis://u@h:1/2"),
            ("rediss://:pw@h", "rediss://h"),
            ("redis://:p@w/?#@h", "redis://h"),
            ("redis+unix:///s?db=1&pass=pw", "redis+unix:///s?db=1"),
            (
                "redis+sentinel://:pw@a:1,b/m/1?sentinel_user=u&sentinel_password=pw",
                "redis+sentinel://a:1,b/m/1?sentinel_user=u",
            ),
            ("redis+unix:///s?pass=pw", "redis+unix:///s"),
            ("nothing", "nothing"),
        ] {
            assert_eq!(without_passwords(url), expected);
        }
    }
}
