//! The store's address, credentials and settings. Passwords are read from files or the environment,
//! because every user of the machine can see the command line.

use std::env::VarError;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::ValueHint;
use redlatch::{ClientBuilder, PublicUrl, ReplicaSync};

use super::credentials;
use crate::duration;
use crate::exit::Failure;
use crate::output::stderr::warning;

/// Options for the store's address, login, TLS and timeouts. No option takes a password.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Store")]
pub(crate) struct StoreArgs {
    /// The store: `redis://[user@]host[:port][/db]`, with TLS `rediss://…`; `redis+unix:///path`;
    /// `redis+sentinel://host,host/master[/db]`; `redis+cluster://host,host`
    /// [default: redis://127.0.0.1:6379]
    ///
    /// Do not include a password: every user of the machine can see the command line. Put it into
    /// REDLATCH_PASSWORD or a file.
    #[arg(
        long,
        global = true,
        env = "REDLATCH_URL",
        hide_env_values = true,
        value_hint = ValueHint::Url
    )]
    pub(crate) url: Option<String>,

    /// The configuration file that sets `url`, if one does.
    #[arg(skip)]
    pub(crate) url_source: Option<UrlSource>,

    /// Precedes the name of every lock in the store, such as `staging:`. Locks with different
    /// prefixes are different. Empty: no prefix, also if the environment or a file sets one
    #[arg(
        long,
        global = true,
        env = "REDLATCH_PREFIX",
        hide_env_values = true,
        value_name = "TEXT"
    )]
    pub(crate) prefix: Option<String>,

    /// The user to log in as
    #[arg(
        long,
        global = true,
        env = "REDLATCH_USERNAME",
        hide_env_values = true,
        value_name = "NAME"
    )]
    pub(crate) user: Option<String>,

    /// The file whose first line is the password [default: the password is in REDLATCH_PASSWORD]
    #[arg(long, global = true, value_name = "PATH")]
    password_file: Option<PathBuf>,

    /// The password file that a configuration file names. REDLATCH_PASSWORD overrides it.
    #[arg(skip)]
    pub(crate) default_password_file: Option<PathBuf>,

    /// The command that prints the password, for tokens that expire. A shell runs it for each new
    /// connection, and again before the end of a time that it prints (lines after the first:
    /// `valid-for: 15m`, `user: NAME`)
    #[arg(
        long,
        global = true,
        env = "REDLATCH_CREDENTIALS_COMMAND",
        hide_env_values = true,
        value_name = "CMD",
        value_hint = ValueHint::CommandString
    )]
    pub(crate) credentials_command: Option<String>,

    /// The same of a configuration file. REDLATCH_PASSWORD overrides it.
    #[arg(skip)]
    pub(crate) default_credentials_command: Option<String>,

    /// Whether the URL has a password that overrides REDLATCH_PASSWORD.
    #[arg(skip)]
    ignores_password_variable: bool,

    /// The user for the Sentinels
    #[arg(
        long,
        global = true,
        env = "REDLATCH_SENTINEL_USERNAME",
        hide_env_values = true,
        value_name = "NAME"
    )]
    pub(crate) sentinel_user: Option<String>,

    /// The file whose first line is the password for the Sentinels [default: the password is in
    /// REDLATCH_SENTINEL_PASSWORD]
    #[arg(long, global = true, value_name = "PATH")]
    sentinel_password_file: Option<PathBuf>,

    /// The same as `default_password_file`, for the Sentinels.
    #[arg(skip)]
    pub(crate) default_sentinel_password_file: Option<PathBuf>,

    /// The same for REDLATCH_SENTINEL_PASSWORD.
    #[arg(skip)]
    ignores_sentinel_password_variable: bool,

    /// The CA certificates to trust for the store, in PEM, instead of the system's
    #[arg(
        long,
        global = true,
        env = "REDLATCH_TLS_CA",
        hide_env_values = true,
        value_name = "PATH"
    )]
    pub(crate) tls_ca: Option<PathBuf>,

    /// The name that the store's certificate must have, instead of the host in the URL
    #[arg(
        long,
        global = true,
        env = "REDLATCH_TLS_SERVER_NAME",
        hide_env_values = true,
        value_name = "NAME"
    )]
    pub(crate) tls_server_name: Option<String>,

    /// The client certificate for the store, in PEM
    #[arg(
        long,
        global = true,
        env = "REDLATCH_TLS_CERT",
        hide_env_values = true,
        value_name = "PATH"
    )]
    pub(crate) tls_cert: Option<PathBuf>,

    /// The private key of the client certificate, in PEM
    #[arg(
        long,
        global = true,
        env = "REDLATCH_TLS_KEY",
        hide_env_values = true,
        value_name = "PATH"
    )]
    pub(crate) tls_key: Option<PathBuf>,

    /// How long to wait for a reply; make it longer than a failover to survive one [default: 3s]
    #[arg(
        long,
        global = true,
        env = "REDLATCH_RESPONSE_TIMEOUT",
        hide_env_values = true,
        value_name = "DUR",
        value_parser = duration::parse,
    )]
    pub(crate) response_timeout: Option<Duration>,

    /// How many replicas must acknowledge an acquisition: `all` (it waits for all connected
    /// replicas, and needs one of them), `majority`, a number, or `off` [default: all]
    #[arg(
        long,
        global = true,
        env = "REDLATCH_REPLICAS",
        hide_env_values = true,
        value_name = "COUNT",
        value_parser = parse_replica_sync,
    )]
    pub(crate) replicas: Option<ReplicaSync>,
}

/// The place of a URL in a configuration file.
#[derive(Debug, Clone)]
pub(crate) struct UrlSource {
    pub(crate) path: PathBuf,
    pub(crate) line: usize,
}

impl fmt::Display for UrlSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.path.display(), self.line)
    }
}

/// The store if nothing names another one.
const DEFAULT_URL: &str = "redis://127.0.0.1:6379";

pub(crate) fn parse_replica_sync(text: &str) -> Result<ReplicaSync, String> {
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

/// What CMD gets instead of a URL that cannot be parsed. Without one, a `redlatch` in CMD would use
/// the default store.
const NO_URL: &str = "invalid";

impl StoreArgs {
    /// Returns the URL of the store.
    pub(crate) fn url(&self) -> &str {
        self.url.as_deref().unwrap_or(DEFAULT_URL)
    }

    /// Ignores the variables that the URL, which is an option, overrides: with a user or a password
    /// that of the user, and with a password those of the password and of its command. `is_option`:
    /// whether an option sets this field.
    pub(crate) fn ignore_overridden_variables(&mut self, is_option: impl Fn(&str) -> bool) {
        // An invalid one is reported later.
        let url = PublicUrl::parse(self.url()).unwrap_or_default();
        let is_overridden = |field, by_url| by_url && !is_option(field);
        if is_overridden("user", url.has_login) {
            self.user = None;
        }
        if is_overridden("credentials_command", url.has_password) {
            self.credentials_command = None;
        }
        if is_overridden("sentinel_user", url.has_sentinel_login) {
            self.sentinel_user = None;
        }
        self.ignores_password_variable = url.has_password;
        self.ignores_sentinel_password_variable = url.has_sentinel_password;
    }

    /// Fills missing settings from `lower`.
    ///
    /// Values that belong together are not mixed: a login in the URL excludes user and password of
    /// `lower`, and a client certificate its key.
    pub(crate) fn fill_from(&mut self, lower: StoreArgs) {
        let url = self.url.as_deref().map(PublicUrl::parse);
        // An invalid one is reported later.
        let url = url.and_then(Result::ok).unwrap_or_default();
        if !url.has_login {
            fill(&mut self.user, lower.user);
            if self.default_password_file.is_none() && self.default_credentials_command.is_none() {
                self.default_password_file = lower.default_password_file;
                self.default_credentials_command = lower.default_credentials_command;
            }
        }
        if !url.has_sentinel_login {
            fill(&mut self.sentinel_user, lower.sentinel_user);
            fill(
                &mut self.default_sentinel_password_file,
                lower.default_sentinel_password_file,
            );
        }
        if self.tls_cert.is_none() && self.tls_key.is_none() {
            self.tls_cert = lower.tls_cert;
            self.tls_key = lower.tls_key;
        }
        if self.url.is_none() {
            self.url = lower.url;
            self.url_source = lower.url_source;
        }
        fill(&mut self.prefix, lower.prefix);
        fill(&mut self.tls_ca, lower.tls_ca);
        fill(&mut self.tls_server_name, lower.tls_server_name);
        fill(&mut self.response_timeout, lower.response_timeout);
        fill(&mut self.replicas, lower.replicas);
    }

    /// Applies these options, and the passwords from files or the environment, to `builder`.
    pub(crate) fn apply_to(&self, mut builder: ClientBuilder) -> Result<ClientBuilder, Failure> {
        if let Some(prefix) = &self.prefix {
            builder = builder.prefix(prefix);
        }
        if let Some(user) = &self.user {
            builder = builder.username(user);
        }
        if let (None, Some(command)) = (&self.password_file, &self.credentials_command) {
            builder = with_command(builder, command);
        } else {
            let password = read_password(
                self.password_file.as_deref(),
                (!self.ignores_password_variable).then_some(PASSWORD_VARIABLE),
                self.default_password_file.as_deref(),
            )?;
            builder = match (password, &self.default_credentials_command) {
                (Some(Password::Text(text)), _) => builder.password(text),
                (Some(Password::File(path)), _) => builder.password_file(path),
                (None, Some(command)) => with_command(builder, command),
                (None, None) => builder,
            };
        }
        if let Some(user) = &self.sentinel_user {
            builder = builder.sentinel_username(user);
        }
        let password = read_password(
            self.sentinel_password_file.as_deref(),
            (!self.ignores_sentinel_password_variable).then_some(SENTINEL_PASSWORD_VARIABLE),
            self.default_sentinel_password_file.as_deref(),
        )?;
        builder = match password {
            Some(Password::Text(text)) => builder.sentinel_password(text),
            Some(Password::File(path)) => builder.sentinel_password_file(path),
            None => builder,
        };
        if let Some(timeout) = self.response_timeout {
            builder = builder.response_timeout(timeout);
        }
        if let Some(sync) = self.replicas {
            builder = builder.replica_sync(sync);
        }
        if let Some(ca) = &self.tls_ca {
            builder = builder.tls_ca_file(ca);
        }
        if let Some(name) = &self.tls_server_name {
            builder = builder.tls_server_name(name);
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

fn with_command(builder: ClientBuilder, command: &str) -> ClientBuilder {
    let command = command.to_owned();
    builder.credentials(move || credentials::ask(command.clone()))
}

/// Sets an option that is not set yet.
fn fill<T>(option: &mut Option<T>, lower: Option<T>) {
    if option.is_none() {
        *option = lower;
    }
}

enum Password {
    Text(String),
    /// Read again for each connection, because passwords change while the command runs.
    File(PathBuf),
}

/// Reads a password from the file, else from the environment variable, else from the default file.
fn read_password(
    file: Option<&Path>,
    variable: Option<&str>,
    default_file: Option<&Path>,
) -> Result<Option<Password>, Failure> {
    let Some(file) = file else {
        return match variable.map(|variable| (variable, std::env::var(variable))) {
            Some((_, Ok(password))) if !password.is_empty() => Ok(Some(Password::Text(password))),
            Some((variable, Err(VarError::NotUnicode(_)))) => {
                Err(Failure::usage(format!("{variable} is not valid UTF-8")))
            }
            _ => default_file.map(read_password_file).transpose(),
        };
    };
    read_password_file(file).map(Some)
}

fn read_password_file(file: &Path) -> Result<Password, Failure> {
    let path = without_secrets(&file.to_string_lossy());
    let text = std::fs::read_to_string(file)
        .map_err(|error| Failure::usage(format!("the password cannot be read: {path}: {error}")))?;
    // Others, such as a pipe or a descriptor, can be read only once.
    let is_kept = file.is_file()
        && !["/dev/fd", "/dev/stdin", "/proc"]
            .iter()
            .any(|once| file.starts_with(once));
    match text.lines().next() {
        Some(password) if !password.is_empty() => Ok(match is_kept {
            true => Password::File(file.to_owned()),
            false => Password::Text(password.to_owned()),
        }),
        _ => Err(Failure::usage(format!(
            "the password cannot be read: the first line of {path} is empty"
        ))),
    }
}

/// Warns if `url`, a command-line argument, contains a password, because other users can see it.
pub(crate) fn warn_if_url_has_password(url: &str) {
    if has_password(url) {
        warning!(
            "every user of this machine can see the password in --url, for example with ps; \
             use REDLATCH_PASSWORD, --password-file or REDLATCH_URL instead"
        );
    }
}

/// Returns whether a URL contains a password.
pub(crate) fn has_password(url: &str) -> bool {
    PublicUrl::parse(url).is_ok_and(|url| url.has_password || url.has_sentinel_password)
}

/// The first characters of each ticket.
const TICKET_START: &str = "redlatch1.";

/// Returns what may be shown of a text that was given for something else, because it may be a URL
/// with a typo, or a ticket: nothing of a text with an @ or with a ticket, else the part before the
/// first `:`, `=` or `?`.
pub(crate) fn without_secrets(text: &str) -> String {
    match text.find([':', '=', '?']) {
        _ if text.contains('@') || text.contains(TICKET_START) => "***".to_owned(),
        Some(end) => format!("{}***", &text[..=end]),
        None => text.to_owned(),
    }
}

/// Returns the environment variables to change for CMD, which must not inherit the passwords.
/// `None` removes the variable.
pub(crate) fn env_changes_for_cmd() -> Vec<(&'static str, Option<String>)> {
    let mut changes = vec![
        (PASSWORD_VARIABLE, None),
        (SENTINEL_PASSWORD_VARIABLE, None),
    ];
    // An empty one counts as unset.
    if let Some(url) = std::env::var_os(URL_VARIABLE).filter(|url| !url.is_empty()) {
        let public = url.to_str().map(PublicUrl::parse).and_then(Result::ok);
        let url = public.map_or(NO_URL.to_owned(), |url| url.without_passwords);
        changes.push((URL_VARIABLE, Some(url)));
    }
    changes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_url(url: &str) -> StoreArgs {
        StoreArgs {
            url: Some(url.to_owned()),
            ..StoreArgs::default()
        }
    }

    fn lower() -> StoreArgs {
        StoreArgs {
            prefix: Some("lower".into()),
            user: Some("lower".into()),
            default_password_file: Some("lower".into()),
            sentinel_user: Some("lower".into()),
            tls_cert: Some("lower".into()),
            tls_key: Some("lower".into()),
            response_timeout: Some(Duration::from_secs(1)),
            ..with_url("redis://lower@lower")
        }
    }

    #[test]
    fn only_unset_values_are_filled() {
        let mut args = StoreArgs {
            response_timeout: Some(Duration::from_secs(2)),
            ..with_url("redis://h")
        };
        args.fill_from(lower());
        assert_eq!(args.url(), "redis://h");
        assert_eq!(args.user.as_deref(), Some("lower"));
        assert_eq!(args.response_timeout, Some(Duration::from_secs(2)));
        let mut empty = StoreArgs::default();
        assert_eq!(empty.url(), DEFAULT_URL);
        empty.fill_from(lower());
        assert_eq!(empty.url(), "redis://lower@lower");
        assert_eq!(empty.user.as_deref(), Some("lower"));
    }

    #[test]
    fn url_of_an_option_overrides_the_variables_of_its_logins() {
        let url = "redis+sentinel://me@h/m?sentinel_password=pw";
        let with_variables = || StoreArgs {
            credentials_command: Some("variable".into()),
            ..lower()
        };
        let mut args = StoreArgs {
            url: Some(url.into()),
            ..with_variables()
        };
        args.ignore_overridden_variables(|_| false);
        assert_eq!((args.user, args.sentinel_user), (None, None));
        // A user in the URL is used with the password of a variable.
        assert!(args.credentials_command.is_some() && !args.ignores_password_variable);
        assert!(args.ignores_sentinel_password_variable);
        let mut args = StoreArgs {
            url: Some("redis://:pw@h".into()),
            ..with_variables()
        };
        args.ignore_overridden_variables(|field| field == "user");
        assert!(args.user.is_some() && args.sentinel_user.is_some());
        assert!(args.credentials_command.is_none() && args.ignores_password_variable);
    }

    #[test]
    fn logins_and_certificates_are_not_mixed() {
        for url in [
            "redis://me@h",
            "redis://:pw@h",
            "valkey+unix:///s?db=1&pass=pw",
        ] {
            let mut args = with_url(url);
            args.fill_from(lower());
            assert_eq!(args.user, None, "{url}");
            assert_eq!(args.default_password_file, None, "{url}");
            assert_eq!(args.sentinel_user.as_deref(), Some("lower"), "{url}");
        }
        let mut args = with_url("redis+sentinel://h/m?sentinel_password=pw");
        args.tls_key = Some("mine".into());
        args.fill_from(lower());
        assert_eq!(args.user.as_deref(), Some("lower"));
        assert_eq!(args.sentinel_user, None);
        assert_eq!(args.tls_cert, None);
    }

    #[test]
    fn nothing_is_shown_that_may_be_a_password() {
        for (text, shown) in [
            ("nightly", "nightly"),
            ("orders:42", "orders:***"),
            ("redis//:s3cret@h", "***"),
            ("unix;/s?pass=s3cret", "unix;/s?***"),
            ("--ulr=redis://:s3cret", "--ulr=***"),
            ("s3cret@h", "***"),
            (":s3cret", ":***"),
            ("redlatch1.s3cret", "***"),
            ("--tikcet=redlatch1.s3cret", "***"),
        ] {
            assert_eq!(without_secrets(text), shown);
        }
    }
}
