//! Configuration files: defaults for what neither the command line nor the environment sets.
//!
//! 1. With --config or REDLATCH_CONFIG, only that file is read, and it must exist. Otherwise the
//!    user's file and the system's are read, if they exist.
//! 2. A key is the name of an option without its dashes. A file has no sections.
//! 3. The first file that sets a key wins (see [`StoreArgs::fill_from`]).
//! 4. An error names the file, the line and the key. It never contains a value, which may have a
//!    password.

use std::ffi::OsStr;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::ValueEnum as _;
use redlatch::ReplicaSync;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::duration;
use crate::exit::Failure;
use crate::output::LogFormat;
use crate::output::stderr::warning;
use crate::store::args::{StoreArgs, UrlSource, has_password, parse_replica_sync, without_secrets};

/// The file of all users of the machine.
const SYSTEM_FILE: &str = "/etc/redlatch.toml";

/// The name of a user's file in its configuration directory.
const USER_FILE: &str = "redlatch.toml";

const KEYS: [&str; 15] = [
    "url",
    "prefix",
    "user",
    "password-file",
    "credentials-command",
    "sentinel-user",
    "sentinel-password-file",
    "tls-ca",
    "tls-server-name",
    "tls-cert",
    "tls-key",
    "response-timeout",
    "replicas",
    "label",
    "log-format",
];

/// What configuration files set.
#[derive(Debug, Default)]
pub(crate) struct Config {
    pub(crate) store_args: StoreArgs,
    /// The label of `redlatch run`.
    pub(crate) label: Option<String>,
    pub(crate) log_format: Option<LogFormat>,
    /// What the operator should know, printed when the format of messages is known.
    warnings: Vec<String>,
}

impl Config {
    /// Reads the file that `option` names, else the user's and the system's.
    pub(crate) fn load(option: Option<&OsStr>) -> Result<Config, Failure> {
        match option {
            Some(option) => read(Path::new(option)),
            None => load_defaults(user_file().into_iter().chain([SYSTEM_FILE.into()])),
        }
    }

    pub(crate) fn print_warnings(&self) {
        for message in &self.warnings {
            warning!("{message}");
        }
    }
}

/// Reads the files that exist, the most important first.
fn load_defaults(paths: impl Iterator<Item = PathBuf>) -> Result<Config, Failure> {
    let mut config = Config::default();
    for path in paths {
        if let Err(error) = std::fs::metadata(&path) {
            match error.kind() {
                ErrorKind::NotFound | ErrorKind::NotADirectory => continue,
                // The directory is closed to this user, so it is another user's: a service that
                // root started may have the HOME of root.
                ErrorKind::PermissionDenied => {
                    let path = path.display();
                    let message = format!("{path}: ignored: {error}; check HOME");
                    config.warnings.push(message);
                    continue;
                }
                // Reading it fails, too, and is reported.
                _ => {}
            }
        }
        let lower = read(&path)?;
        config.store_args.fill_from(lower.store_args);
        config.label = config.label.or(lower.label);
        config.log_format = config.log_format.or(lower.log_format);
        config.warnings.extend(lower.warnings);
    }
    Ok(config)
}

/// Returns the path of the user's file, which may not exist.
fn user_file() -> Option<PathBuf> {
    // A relative path is invalid by the XDG specification, and is ignored.
    let directory = std::env::var_os("XDG_CONFIG_HOME")
        .map(PathBuf::from)
        .filter(|path| path.is_absolute())
        .or_else(|| {
            let home = std::env::home_dir().filter(|home| home.is_absolute());
            home.map(|home| home.join(".config"))
        });
    directory.map(|directory| directory.join(USER_FILE))
}

fn read(path: &Path) -> Result<Config, Failure> {
    let source = Source {
        path,
        text: &read_text(path)?,
    };
    let mut config = source.parse()?;
    if let Some(url) = &config.store_args.url
        && has_password(url)
        && is_readable_by_all(path)
    {
        config.warnings.push(format!(
            "{}: every user of this machine can read the password in the URL; make the file readable \
             only by those who need it (chmod o-r), or use password-file",
            path.display()
        ));
    }
    Ok(config)
}

fn read_text(path: &Path) -> Result<String, Failure> {
    std::fs::read_to_string(path).map_err(|error| {
        let shown = without_secrets(&path.to_string_lossy());
        let reason = match error.kind() {
            ErrorKind::InvalidData => io::Error::other("it is not valid UTF-8"),
            _ => error,
        };
        Failure::usage(format!(
            "{shown}: the configuration file cannot be read: {reason}"
        ))
    })
}

fn is_readable_by_all(path: &Path) -> bool {
    std::fs::metadata(path)
        .is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o004 != 0)
}

/// A configuration file.
struct Source<'a> {
    path: &'a Path,
    text: &'a str,
}

/// A key of a configuration file with its value.
struct Entry<'a> {
    source: &'a Source<'a>,
    key: &'a str,
    key_span: Range<usize>,
    value: &'a Spanned<DeValue<'a>>,
}

impl Source<'_> {
    fn parse(&self) -> Result<Config, Failure> {
        let table = DeTable::parse(self.text).map_err(|error| {
            let at = error.span().unwrap_or_default().start;
            // Some messages add what was expected in a second line.
            let message = error.message().lines().collect::<Vec<_>>().join(", ");
            self.failure_at(at, &message)
        })?;
        let mut entries: Vec<Entry<'_>> = table
            .get_ref()
            .iter()
            .map(|(key, value)| Entry {
                source: self,
                key: key.get_ref(),
                key_span: key.span(),
                value,
            })
            .collect();
        // The table is sorted by key; the first error of the file should be reported.
        entries.sort_by_key(|entry| entry.key_span.start);
        let mut config = Config::default();
        for entry in &entries {
            entry.apply_to(&mut config)?;
        }
        Ok(config)
    }

    /// Returns an error at this byte of the file.
    fn failure_at(&self, at: usize, message: &str) -> Failure {
        let (path, line) = (self.path.display(), self.line_at(at));
        Failure::usage(format!("{path}:{line}: {message}"))
    }

    /// Returns the number of the line that contains this byte, from 1.
    fn line_at(&self, at: usize) -> usize {
        let before = self.text.as_bytes().iter().take(at);
        before.filter(|byte| **byte == b'\n').count() + 1
    }
}

impl Entry<'_> {
    fn apply_to(&self, config: &mut Config) -> Result<(), Failure> {
        let args = &mut config.store_args;
        match self.key {
            "url" => {
                args.url = Some(self.text()?.to_owned());
                args.url_source = Some(UrlSource {
                    path: self.source.path.to_owned(),
                    line: self.source.line_at(self.key_span.start),
                });
            }
            "prefix" => args.prefix = Some(self.text()?.to_owned()),
            "user" => args.user = Some(self.text()?.to_owned()),
            "password-file" => args.default_password_file = Some(self.path()?),
            "credentials-command" => args.default_credentials_command = Some(self.command()?),
            "sentinel-user" => args.sentinel_user = Some(self.text()?.to_owned()),
            "sentinel-password-file" => {
                args.default_sentinel_password_file = Some(self.path()?);
            }
            "tls-ca" => args.tls_ca = Some(self.path()?),
            "tls-server-name" => args.tls_server_name = Some(self.text()?.to_owned()),
            "tls-cert" => args.tls_cert = Some(self.path()?),
            "tls-key" => args.tls_key = Some(self.path()?),
            "response-timeout" => args.response_timeout = Some(self.duration()?),
            "replicas" => args.replicas = Some(self.replica_sync()?),
            "label" => config.label = Some(self.text()?.to_owned()),
            "log-format" => config.log_format = Some(self.log_format()?),
            _ => return Err(self.unknown_key()),
        }
        Ok(())
    }

    fn text(&self) -> Result<&str, Failure> {
        let text = self.value.get_ref().as_str();
        text.ok_or_else(|| self.wrong_type("a string"))
    }

    /// Returns a path. A relative one is relative to the directory of the file.
    fn path(&self) -> Result<PathBuf, Failure> {
        match self.text()? {
            "" => Err(self.invalid("the path is empty")),
            path => Ok(match self.source.path.parent() {
                Some(directory) => directory.join(path),
                None => path.into(),
            }),
        }
    }

    fn command(&self) -> Result<String, Failure> {
        match self.text()? {
            "" => Err(self.invalid("the command is empty")),
            command => Ok(command.to_owned()),
        }
    }

    fn duration(&self) -> Result<Duration, Failure> {
        let text = self.text_or_integer("a string such as \"3s\", or a number of seconds")?;
        duration::parse(text).map_err(|error| self.invalid(&error))
    }

    fn replica_sync(&self) -> Result<ReplicaSync, Failure> {
        let text = self.text_or_integer("\"all\", \"majority\", \"off\" or a number")?;
        parse_replica_sync(text).map_err(|error| self.invalid(&error))
    }

    fn log_format(&self) -> Result<LogFormat, Failure> {
        LogFormat::from_str(self.text()?, false).map_err(|_| self.invalid("use text or json"))
    }

    /// Returns a string, or the digits of an integer.
    fn text_or_integer(&self, wanted: &str) -> Result<&str, Failure> {
        match self.value.get_ref() {
            DeValue::String(text) => Ok(text),
            DeValue::Integer(number) if number.radix() == 10 => Ok(number.as_str()),
            _ => Err(self.wrong_type(wanted)),
        }
    }

    fn wrong_type(&self, wanted: &str) -> Failure {
        let found = self.value.get_ref().type_str();
        self.invalid(&format!("the type is {found}; use {wanted}"))
    }

    fn invalid(&self, message: &str) -> Failure {
        let message = format!("{}: {message}", self.key);
        self.source.failure_at(self.key_span.start, &message)
    }

    fn unknown_key(&self) -> Failure {
        let hint = match self.key {
            "password" | "sentinel-password" => {
                format!("; write it to a file, and use {}-file", self.key)
            }
            _ => format!("; the keys are {}", KEYS.join(", ")),
        };
        let key = without_secrets(self.key);
        let message = format!("{key}: unknown key{hint}");
        self.source.failure_at(self.key_span.start, &message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, String> {
        let path = Path::new("/etc/redlatch.toml");
        let source = Source { path, text };
        source.parse().map_err(|failure| failure.message)
    }

    #[test]
    fn all_keys_are_known() {
        for key in KEYS {
            let error = parse(&format!("{key} = true")).unwrap_err();
            assert!(
                error.contains(&format!("{key}: the type is boolean; use")),
                "{error}"
            );
        }
    }

    #[test]
    fn example_names_all_keys() {
        let example = include_str!("../../redlatch.example.toml");
        let is_setting = |line: &&str| line.starts_with(|c: char| c.is_ascii_lowercase());
        let lines = example.lines().filter_map(|line| line.strip_prefix('#'));
        let settings: Vec<&str> = lines.filter(is_setting).collect();
        parse(&settings.join("\n")).unwrap();
        let keys: Vec<&str> = settings
            .iter()
            .filter_map(|line| line.split(' ').next())
            .collect();
        assert_eq!(keys, KEYS);
    }

    #[test]
    fn errors_name_file_line_and_key_in_one_line() {
        for (text, line, message) in [
            (
                "\nulr = 'x'",
                2,
                "ulr: unknown key; the keys are url, prefix, user, ",
            ),
            ("[store]\nurl = 'x'", 1, "store: unknown key"),
            ("store.url = 'x'", 1, "store: unknown key"),
            ("password = 'secret'", 1, "use password-file"),
            ("b = 1\na = 1", 1, "b: unknown key"),
            ("\"redis://:secret@h\" = 'url'", 1, "***: unknown key"),
            (
                "url = 'x'\nuser = 5",
                2,
                "user: the type is integer; use a string",
            ),
            ("url = ['secret']", 1, "url: the type is array"),
            ("tls-ca = ''", 1, "tls-ca: the path is empty"),
            ("response-timeout = '5x'", 1, "response-timeout: "),
            ("response-timeout = -5", 1, "response-timeout: "),
            (
                "response-timeout = 1.5",
                1,
                "response-timeout: the type is float",
            ),
            ("response-timeout = 0x10", 1, "response-timeout: "),
            ("replicas = 'most'", 1, "replicas: use all, majority"),
            ("log-format = 'xml'", 1, "log-format: use text or json"),
            ("url = 'x'\nurl = 'y'", 2, "duplicate key"),
            ("url = \"secret", 1, "invalid"),
            ("\n\nurl redis://secret@h", 3, ""),
            ("url = redis://secret@h", 1, ""),
        ] {
            let error = parse(text).unwrap_err();
            let start = format!("/etc/redlatch.toml:{line}: ");
            assert!(error.starts_with(&start), "{text}: {error}");
            assert!(error.contains(message), "{text}: {error}");
            assert!(!error.contains("secret"), "{text}: {error}");
            assert!(!error.contains('\n'), "{text}: {error}");
        }
    }

    /// The user's file comes first.
    #[test]
    fn first_file_that_sets_a_key_wins() {
        let id = std::process::id();
        let paths = ["user", "missing", "system"]
            .map(|name| std::env::temp_dir().join(format!("redlatch-config-{id}-{name}")));
        std::fs::write(&paths[0], "url = 'redis://user'").unwrap();
        std::fs::write(
            &paths[2],
            "url = 'redis://system'\nuser = 'system'\nlog-format = 'json'",
        )
        .unwrap();
        let config = load_defaults(paths.clone().into_iter());
        let _ = (
            std::fs::remove_file(&paths[0]),
            std::fs::remove_file(&paths[2]),
        );
        let config = config.unwrap();
        assert_eq!(config.store_args.url(), "redis://user");
        assert_eq!(config.store_args.user.as_deref(), Some("system"));
        assert_eq!(config.log_format, Some(LogFormat::Json));
    }

    #[test]
    fn values_are_those_of_the_options() {
        let config = parse(
            "url = 'redis://h'\nreplicas = 2\nresponse-timeout = '1m'\ntls-ca = 'ca.pem'\n\
             tls-key = '/k'\nlog-format = 'json'",
        );
        let config = config.unwrap();
        assert_eq!(config.log_format, Some(LogFormat::Json));
        let args = config.store_args;
        assert_eq!(args.url.as_deref(), Some("redis://h"));
        assert_eq!(args.replicas, Some(ReplicaSync::AtLeast(2)));
        assert_eq!(args.response_timeout, Some(Duration::from_secs(60)));
        assert_eq!(args.tls_ca.as_deref(), Some(Path::new("/etc/ca.pem")));
        assert_eq!(args.tls_key.as_deref(), Some(Path::new("/k")));
        let seconds = parse("response-timeout = 7").unwrap().store_args;
        assert_eq!(seconds.response_timeout, Some(Duration::from_secs(7)));
    }
}
