//! Parses the URL of a store, without repeating a secret in an error.
//!
//! Every part of a URL takes effect, or the URL is refused with an error that names the part. A part that
//! is silently dropped can put two services into different databases, and then they do not exclude each
//! other. So this file parses all forms itself:
//!
//! 1. `#` is refused everywhere: nothing is defined after it.
//! 2. The authority ends at the first `/` or `?`. The last `@` in it ends the credentials. An `@` in the
//!    path is refused, because the path then contains the rest of an unescaped password, and so is
//!    a parameter in the path, behind `&` or `;`.
//! 3. Parameters are matched against those that the form knows. Unknown and repeated ones are refused.
//! 4. The database is the path (`/3`) or `db=3`. Two different ones are refused.
//!
//! Percent-encoding is decoded in users, passwords, the master's name and parameters.
//!
//! [`PublicUrl`] is cut from the same parts, so nothing is shown that this file reads as a secret.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use percent_encoding::percent_decode_str;

use super::connection_config::{ConnectionConfig, Tls};
use super::credentials::{Login, Password};
use super::endpoint::{Address, Endpoint};
use super::options::ConnectOptions;
use crate::error::{Error, Result};

/// The result of parsing a URL.
#[derive(Debug, Clone)]
pub(super) struct ParsedUrl {
    pub(super) deployment: Deployment,
    /// How to connect to the data servers.
    pub(super) config: ConnectionConfig,
}

/// The servers that the URL names.
#[derive(Debug, Clone)]
pub(super) enum Deployment {
    /// One server.
    Single(Address),
    /// The server that these sentinels name as the master.
    Sentinel {
        sentinels: Vec<Endpoint>,
        master: String,
        /// How to connect to the sentinels.
        config: ConnectionConfig,
    },
    /// A cluster with these nodes.
    Cluster(Vec<Endpoint>),
}

/// The URL of an embedded store.
pub(crate) const EMBEDDED: &str = "embedded:";

const SENTINEL_PORT: u16 = 26379;
const NODE_PORT: u16 = 6379;

/// The forms of URL, for messages.
const URL_FORMS: &str = "redis://host:port, redis+unix:///path, redis+sentinel://host:port,host:port/master, \
                     redis+cluster://host:port,host:port or embedded:";

/// Parses the URL of a store on servers, and combines it with the builder's options.
pub(super) fn parse(url: &str, options: &ConnectOptions) -> Result<ParsedUrl> {
    combine(&UrlParts::parse(url)?, options)
}

fn combine(parts: &UrlParts<'_>, options: &ConnectOptions) -> Result<ParsedUrl> {
    let tls = tls(parts.use_tls, options)?;
    let (deployment, db) = match parts.form {
        Form::Single => single(parts)?,
        Form::Unix => unix(parts)?,
        Form::Sentinel => sentinel(parts, options, tls.clone())?,
        Form::Cluster => cluster(parts)?,
    };
    let (login, provider) = (&options.login, options.provider.clone());
    let mut config = ConnectionConfig::new(&parts.login()?, db, login, provider, tls, options)?;
    config.standalone = parts.form != Form::Cluster;
    Ok(ParsedUrl { deployment, config })
}

/// Returns options with which a user in a URL needs no password there.
fn with_password_from_elsewhere() -> ConnectOptions {
    let login = Login {
        username: None,
        password: Some(Password::text("from elsewhere")),
    };
    ConnectOptions {
        login: login.clone(),
        sentinel_login: login,
        ..ConnectOptions::default()
    }
}

/// What may be shown and passed on of a URL. For the `redlatch` command, not part of the public
/// interface.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PublicUrl {
    /// Without users and passwords, for messages.
    pub redacted: String,
    /// With the users. Names the same servers and the same database.
    pub without_passwords: String,
    /// Whether it has a user or a password for the data servers.
    pub has_login: bool,
    /// Whether it has a password for the data servers.
    pub has_password: bool,
    /// Whether it has a user or a password for the sentinels.
    pub has_sentinel_login: bool,
    /// Whether it has a password for the sentinels.
    pub has_sentinel_password: bool,
}

impl PublicUrl {
    /// Accepts what [`Client::connect`](crate::Client::connect) accepts, with a password from
    /// elsewhere if a user in the URL has none.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidUrl`], without any part that could be secret.
    pub fn parse(url: &str) -> Result<PublicUrl> {
        if url == EMBEDDED {
            return Ok(PublicUrl {
                redacted: url.to_owned(),
                without_passwords: url.to_owned(),
                ..PublicUrl::default()
            });
        }
        let parts = UrlParts::parse(url)?;
        combine(&parts, &with_password_from_elsewhere())?;
        let (login, sentinel_login) = (parts.login()?, parts.sentinel_login()?);
        let user = parts.credentials.split(':').next().unwrap_or_default();
        let is_no_password = |name: &str| !PASSWORD_PARAMS.contains(&name);
        let is_no_login = |name: &str| is_no_password(name) && !USER_PARAMS.contains(&name);
        Ok(PublicUrl {
            redacted: parts.text("***", is_no_login),
            without_passwords: parts.text(user, is_no_password),
            has_login: login.username.is_some() || login.password.is_some(),
            has_password: login.password.is_some(),
            has_sentinel_login: sentinel_login.username.is_some()
                || sentinel_login.password.is_some(),
            has_sentinel_password: sentinel_login.password.is_some(),
        })
    }
}

fn is_scheme_text(scheme: &str) -> bool {
    scheme.chars().all(|c| c.is_ascii_lowercase() || c == '+')
}

/// Returns TLS if the URL requests it. Certificates for an insecure connection are an error: the mistake
/// must not go unnoticed.
fn tls(use_tls: bool, options: &ConnectOptions) -> Result<Option<Arc<Tls>>> {
    match (use_tls, options.tls.first_tls_setting()) {
        (false, None) => Ok(None),
        (false, Some(setting)) => Err(Error::InvalidSetting {
            setting,
            reason: "the URL does not enable TLS; use rediss:// instead of redis://".into(),
        }),
        #[cfg(feature = "tls")]
        (true, _) => Ok(Some(Tls::new(&options.tls)?)),
        #[cfg(not(feature = "tls"))]
        (true, _) => {
            invalid("this build does not include TLS; enable the feature `tls` of redlatch")
        }
    }
}

/// The servers of a URL, and the database.
type UrlContent = (Deployment, i64);

fn single(parts: &UrlParts<'_>) -> Result<UrlContent> {
    let (hosts, path) = parts.hosts_and_path(NODE_PORT)?;
    let [host] = hosts.as_slice() else {
        return invalid(
            "redis:// takes one server; for several hosts use redis+sentinel:// or \
             redis+cluster://",
        );
    };
    let deployment = Deployment::Single(Address::Tcp(host.clone()));
    Ok((deployment, parts.query.database(path)?))
}

fn unix(parts: &UrlParts<'_>) -> Result<UrlContent> {
    let path = parts.place;
    let path = path.strip_prefix("localhost").unwrap_or(path);
    if !path.starts_with('/') {
        return invalid(
            "it has no absolute socket path, or a host, user or password before the path; use \
             redis+unix:///path?user=…&pass=…",
        );
    }
    let path = percent_decode(path, "the path of the socket")?;
    let deployment = Deployment::Single(Address::Unix(path.into()));
    Ok((deployment, parts.query.database("")?))
}

fn sentinel(
    parts: &UrlParts<'_>,
    options: &ConnectOptions,
    tls: Option<Arc<Tls>>,
) -> Result<UrlContent> {
    let (mut sentinels, path) = parts.hosts_and_path(SENTINEL_PORT)?;
    // Each has one vote.
    let mut named = HashSet::new();
    sentinels.retain(|sentinel| named.insert(sentinel.clone()));
    let (master, db) = path.split_once('/').unwrap_or((path, ""));
    if master.is_empty() {
        return invalid(
            "it does not name the master; use redis+sentinel://host:port,host:port/master",
        );
    }
    let login = &options.sentinel_login;
    let deployment = Deployment::Sentinel {
        sentinels,
        master: percent_decode(master, "the name of the master")?,
        config: ConnectionConfig::new(&parts.sentinel_login()?, 0, login, None, tls, options)?,
    };
    Ok((deployment, parts.query.database(db)?))
}

fn cluster(parts: &UrlParts<'_>) -> Result<UrlContent> {
    let (hosts, path) = parts.hosts_and_path(NODE_PORT)?;
    // Whether a cluster has more than one database, its nodes know (Valkey 9: `cluster-databases`).
    Ok((Deployment::Cluster(hosts), parts.query.database(path)?))
}

/// The form of a URL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Single,
    Unix,
    Sentinel,
    Cluster,
}

impl Form {
    /// Returns the parameters that only this form knows.
    fn parameters(self) -> &'static [&'static str] {
        match self {
            Form::Single | Form::Cluster => &[],
            Form::Unix => &[USER_PARAM, PASSWORD_PARAM],
            Form::Sentinel => &[SENTINEL_USER_PARAM, SENTINEL_PASSWORD_PARAM],
        }
    }
}

/// The parts of a URL, in their order.
struct UrlParts<'a> {
    /// What precedes the credentials: the scheme, and the slashes if there are any.
    start: &'a str,
    use_tls: bool,
    form: Form,
    /// Without the `@`. Empty in a URL of a unix socket.
    credentials: &'a str,
    /// Hosts and path, or the path of the socket.
    place: &'a str,
    query: Query<'a>,
}

impl<'a> UrlParts<'a> {
    fn parse(url: &'a str) -> Result<UrlParts<'a>> {
        // A URL that was read from a file may end with a line break.
        let url = url.trim();
        if url.contains(char::is_control) {
            return invalid("it contains a line break, a tab or another control character");
        }
        let Some((scheme, rest)) = url.split_once(':') else {
            return invalid("it has no scheme; use redis://host:port");
        };
        let (base, kind) = scheme.split_once('+').unwrap_or((scheme, ""));
        let (base, use_tls) = match base {
            "redis" | "valkey" => ("redis", false),
            "rediss" | "valkeys" => ("redis", true),
            other => (other, false),
        };
        let form = match (base, kind) {
            ("redis", "") => Form::Single,
            ("redis", "sentinel") => Form::Sentinel,
            ("redis", "cluster") => Form::Cluster,
            ("redis", "unix") if use_tls => {
                return invalid("TLS over a unix socket is not supported; use redis+unix:///path");
            }
            ("redis", "unix") | ("unix", "") => Form::Unix,
            _ if rest.starts_with("//") && is_scheme_text(scheme) => {
                return invalid(format!("unknown scheme {scheme:?}; use {URL_FORMS}"));
            }
            // Not repeated: without `//` it may be a user name.
            _ => return invalid("it has no known scheme; use redis://host:port"),
        };
        if rest.contains('#') {
            let certificate = match use_tls {
                // In other clients `#insecure` disables the check of the certificate.
                true => {
                    "; the server's certificate is always verified; to trust your own CA, use the \
                     builder setting `tls_ca`"
                }
                false => "",
            };
            return invalid(format!(
                "a fragment (#) is not supported; in a user or password, write # as %23{certificate}"
            ));
        }
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let after_slashes = rest.strip_prefix("//");
        let (credentials, place) = match (form, after_slashes) {
            (Form::Unix, _) => {
                let path = after_slashes.unwrap_or(rest);
                // Not repeated: it would be shown with a password.
                if path.contains('@') {
                    return invalid(
                        "the path of its socket has an @; write it as %40. User and password follow the \
                         path: redis+unix:///path?user=…&pass=…",
                    );
                }
                ("", path)
            }
            (_, None) => return invalid(format!("it has no hosts; use {URL_FORMS}")),
            (_, Some(rest)) => {
                let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
                // Not repeated: it is the rest of a password.
                if path.contains('@') {
                    return invalid(
                        "it has an @ after the first /; in a user or password, write / as %2F, ? as \
                         %3F and @ as %40",
                    );
                }
                match authority.rfind('@') {
                    Some(end) => (&rest[..end], &rest[end + 1..]),
                    None => ("", rest),
                }
            }
        };
        // Nor is this.
        if has_parameter(place) {
            return invalid("it has a parameter without a ? before it; write ?db=…&user=…");
        }
        let start_len = scheme.len() + 1 + after_slashes.map_or(0, |_| 2);
        Ok(UrlParts {
            start: &url[..start_len],
            use_tls,
            form,
            credentials,
            place,
            query: Query::parse(query, form.parameters())?,
        })
    }

    /// Returns the hosts, and the path without the slashes around it.
    fn hosts_and_path(&self, port: u16) -> Result<(Vec<Endpoint>, &'a str)> {
        let (hosts, path) = self.place.split_once('/').unwrap_or((self.place, ""));
        if !hosts.is_ascii() {
            return invalid(
                "a host is not in ASCII; write its xn-- form, which DNS and certificates use",
            );
        }
        let hosts = hosts.split(',');
        let hosts: Option<_> = hosts.map(|host| Endpoint::parse(host, port)).collect();
        let reason = "a host is missing, or a host or port is invalid; write host:port; in a \
                      user or password, write / as %2F and ? as %3F";
        let hosts = hosts.map_or_else(|| invalid(reason), Ok)?;
        Ok((hosts, path.trim_end_matches('/')))
    }

    /// Returns the credentials for the data servers.
    fn login(&self) -> Result<Login> {
        if self.form == Form::Unix {
            let query = &self.query;
            return Ok(login(query.get(USER_PARAM)?, query.get(PASSWORD_PARAM)?));
        }
        let credentials = self.credentials;
        let (user, password) = credentials.split_once(':').unwrap_or((credentials, ""));
        let user = percent_decode(user, "the user")?;
        let password = percent_decode(password, "the password")?;
        Ok(login(Some(user), Some(password)))
    }

    /// Returns the credentials for the sentinels.
    fn sentinel_login(&self) -> Result<Login> {
        let query = &self.query;
        let user = query.get(SENTINEL_USER_PARAM)?;
        Ok(login(user, query.get(SENTINEL_PASSWORD_PARAM)?))
    }

    /// Returns the URL with other credentials, if it has any, and with the parameters of which
    /// `keeps` accepts the name.
    fn text(&self, credentials: &str, keeps: impl Fn(&str) -> bool) -> String {
        let credentials = match self.credentials.is_empty() || credentials.is_empty() {
            true => String::new(),
            false => format!("{credentials}@"),
        };
        let mut text = format!("{}{credentials}{}", self.start, self.place);
        let kept = self.query.0.iter().filter(|(name, _)| keeps(name));
        for (i, (name, value)) in kept.enumerate() {
            let separator = if i == 0 { '?' } else { '&' };
            text.push_str(&format!("{separator}{name}={value}"));
        }
        text
    }
}

/// Credentials in a URL; an empty one counts as missing.
fn login(user: Option<String>, password: Option<String>) -> Login {
    Login {
        username: user.filter(|user| !user.is_empty()),
        password: password.filter(|it| !it.is_empty()).map(Password::text),
    }
}

const DB_PARAM: &str = "db";
const PROTOCOL_PARAM: &str = "protocol";
const USER_PARAM: &str = "user";
const PASSWORD_PARAM: &str = "pass";
const SENTINEL_USER_PARAM: &str = "sentinel_user";
const SENTINEL_PASSWORD_PARAM: &str = "sentinel_password";
const USER_PARAMS: [&str; 2] = [USER_PARAM, SENTINEL_USER_PARAM];
const PASSWORD_PARAMS: [&str; 2] = [PASSWORD_PARAM, SENTINEL_PASSWORD_PARAM];

/// Returns whether a path contains a parameter that belongs after a `?`.
fn has_parameter(place: &str) -> bool {
    let place = place.to_ascii_lowercase();
    let is_parameter = |part: &str| {
        let name = part.split_once('=').map(|(name, _)| name);
        name.is_some_and(|name| {
            [DB_PARAM, PROTOCOL_PARAM].contains(&name) || USER_PARAMS.contains(&name)
        })
    };
    let has_password = ["pass=", "password="]
        .iter()
        .any(|name| place.contains(name));
    has_password || place.split(['&', ';']).skip(1).any(is_parameter)
}

/// The parameters after the `?`: all known, none twice.
struct Query<'a>(BTreeMap<&'a str, &'a str>);

impl<'a> Query<'a> {
    fn parse(query: &'a str, parameters: &[&'static str]) -> Result<Query<'a>> {
        let known = [&[DB_PARAM, PROTOCOL_PARAM], parameters].concat();
        let mut values = BTreeMap::new();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            if !known.contains(&name) {
                let is_name = |c: char| c.is_ascii_alphabetic() || "_-".contains(c);
                // It may be a part of a password, also of one behind `pass` without its `=`.
                let is_public = pair.contains('=')
                    && !query.contains('@')
                    && !values.keys().any(|name| PASSWORD_PARAMS.contains(name))
                    && !PASSWORD_PARAMS.iter().any(|param| name.starts_with(param));
                let name = match is_public && name.chars().all(is_name) {
                    true => format!("the unknown parameter {name:?}"),
                    false => "an unknown parameter after the ? (in a password, write ? as %3F)"
                        .to_owned(),
                };
                return invalid(format!(
                    "it has {name}; supported parameters: {}",
                    known.join(", ")
                ));
            }
            if values.insert(name, value).is_some() {
                return invalid(format!("it has the parameter {name} twice"));
            }
        }
        let query = Query(values);
        match query.get(PROTOCOL_PARAM)?.as_deref() {
            None | Some("3" | "resp3") => Ok(query),
            Some(_) => invalid("redlatch supports only RESP3; omit the protocol"),
        }
    }

    fn get(&self, name: &str) -> Result<Option<String>> {
        let value = self.0.get(name);
        value.map(|value| percent_decode(value, name)).transpose()
    }

    /// Returns the database: the one in the path, or the parameter, or 0.
    fn database(&self, path: &str) -> Result<i64> {
        let number = |digits: &str, place: &str| {
            let is_number = !digits.is_empty() && digits.bytes().all(|c| c.is_ascii_digit());
            match digits.parse() {
                Ok(number) if is_number => Ok(number),
                _ => invalid(format!("the database {place} is not a number")),
            }
        };
        let path = match path {
            "" => None,
            path => Some(number(path, "after the /")?),
        };
        let parameter = self.get(DB_PARAM)?.map(|db| number(&db, "in db="));
        match (path, parameter.transpose()?) {
            (Some(path), Some(parameter)) if path != parameter => invalid(format!(
                "it specifies two databases, {path} after the / and {parameter} in db="
            )),
            (path, parameter) => Ok(path.or(parameter).unwrap_or(0)),
        }
    }
}

/// Decodes percent-encoding.
fn percent_decode(text: &str, what: &str) -> Result<String> {
    match percent_decode_str(text).decode_utf8() {
        Ok(text) => Ok(text.into_owned()),
        Err(_) => invalid(format!("{what} is not valid UTF-8")),
    }
}

fn invalid<T>(reason: impl Into<String>) -> Result<T> {
    let reason = reason.into();
    Err(Error::InvalidUrl { reason })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(url: &str) -> Result<ParsedUrl> {
        super::parse(url, &ConnectOptions::default())
    }

    #[test]
    fn bad_urls_are_refused_without_repeating_secrets() {
        for url in [
            "http://user:secret@host",
            "user:secret@host:6379",
            "secret",
            "",
            "rediss://:secret@host/#insecure",
            "rediss+unix://:secret@host",
            "redis+sentinel://a/master?sentinel_user=u",
            "redis+other://:secret@a,b",
            "redis+sec ret:secret@a,b",
            "redis://:secret@host:notaport",
            "redis://:secret@host/notadb",
            "redis://:secret@",
            "redis://:secret@host/?protocol=9",
            "redis+cluster://:secret@",
            "redis+cluster://:secret@a,,b",
            "redis+cluster://:secret@a,b?other=secret",
            "redis+cluster://:secret@a,b?secret",
            "redis+sentinel://:secret@a,b",
            "redis+sentinel://:secret@a,b/master/notadb",
            "redis+sentinel://:secret@a:secret/master",
            "redis+sentinel://a/master?other=secret",
            "redis://u:12/secret@host",
            "redis://u:12?secret@host",
            "redis://u:12?secret=1@host:3/m",
            "redis://u:12#secret@host",
            "redis+sentinel://u:12/secret@host",
            "redis+sentinel://u:12/secret@host/master",
            "redis+sentinel://u:12?secret@host/master",
            "redis+cluster://u:12/secret@host",
            "redis://h?sec1ret=1",
            "unix:/s.sock&pass=secret",
            "unix:/:secret@s.sock",
            "redis+unix:///s;pass=secret",
            "redis+unix:///s;PASSWORD=secret",
            "redis+unix:///s&user=secret",
            "redis+sentinel://h/m&sentinel_password=secret",
            "redis+sentinel://h/m;pass=secret",
            "redis+unix://u:secret@/run/redis.sock",
            "redis+unix://u:secret@localhost/run/redis.sock",
            "redis://u:%ffsecret@host",
            "redis+unix:///run/redis.sock?user=u&pass=%ffsecret",
            "redis+unix:///run/redis.sock?pass=12&secret=3",
            "redis+unix:///run/redis.sock?passsecret=3",
        ] {
            let error = parse(url).unwrap_err();
            assert!(matches!(error, Error::InvalidUrl { .. }), "{url}: {error}");
            let said = format!("{error} {error:?}");
            assert!(!said.contains("secret"), "{url}: {said}");
        }
    }

    /// Scheme and host, after which a database may follow.
    fn bases() -> Vec<&'static str> {
        let mut bases = vec![
            "redis://u:p@[::1]:1",
            "valkey://h",
            "redis+sentinel://a,b:2/master",
            "redis+cluster://a,b:2",
            "redis+unix:///run/redis.sock",
            "unix:///run/redis.sock",
            "unix:/run/redis.sock",
        ];
        if cfg!(feature = "tls") {
            bases.extend([
                "rediss://h",
                "valkeys://u:p@h:1",
                "rediss+sentinel://a/master",
                "rediss+cluster://a",
            ]);
        }
        bases
    }

    #[test]
    fn every_part_takes_effect_or_is_refused_by_name() {
        let refused = [
            ("?unknown=1", "\"unknown\""),
            ("?db=0&timeout=5", "\"timeout\""),
            ("?DB=3", "\"DB\""),
            ("?d%62=3", "after the ?"),
            ("?bare", "after the ?"),
            ("?db=0&db=0", "db twice"),
            ("?db", "in db= is not a number"),
            ("?db=", "in db= is not a number"),
            ("?db=x", "in db= is not a number"),
            ("?db=-1", "in db= is not a number"),
            ("?db=%2B3", "in db= is not a number"),
            ("?db=99999999999999999999", "in db= is not a number"),
            ("?protocol=resp2", "protocol"),
            ("#insecure", "#"),
            ("#", "#"),
            ("?db=0#part", "#"),
            ("\t", "tab"),
        ];
        for base in bases() {
            for (part, named) in refused {
                // White space at the end is cut off.
                let part = part.replace('\t', "?db=\t0");
                let url = format!("{base}{part}");
                let said = parse(&url).unwrap_err().to_string();
                assert!(said.contains(named), "{url}: {said}");
            }
            let unix = base.contains("unix");
            let works = [
                ("", 0, true),
                ("\n", 0, true),
                ("?", 0, true),
                ("?db=0", 0, true),
                ("?db=3", 3, true),
                ("?db=%33", 3, true),
                ("?protocol=resp3&db=0", 0, true),
                ("/", 0, !unix),
                ("/0", 0, !unix),
                ("/3", 3, !unix),
                ("/3/?db=3", 3, !unix),
            ];
            for (part, db, works) in works {
                let url = format!("{base}{part}");
                match parse(&url) {
                    Ok(parsed) if works => {
                        assert_eq!(parsed.config.db, db, "{url}");
                        let form = match parsed.deployment {
                            Deployment::Single(Address::Tcp(_)) => None,
                            Deployment::Single(Address::Unix(_)) => Some("unix"),
                            Deployment::Sentinel { .. } => Some("sentinel"),
                            Deployment::Cluster(_) => Some("cluster"),
                        };
                        let mut forms = ["unix", "sentinel", "cluster"].into_iter();
                        assert_eq!(form, forms.find(|form| url.contains(form)), "{url}");
                        let use_tls = url.starts_with("rediss") || url.starts_with("valkeys");
                        assert_eq!(parsed.config.tls.is_some(), use_tls, "{url}");
                    }
                    // There the whole path is that of the socket.
                    Ok(parsed) if unix => {
                        let Deployment::Single(Address::Unix(path)) = parsed.deployment else {
                            panic!("{url}");
                        };
                        assert!(path.starts_with("/run/redis.sock"), "{url}: {path:?}");
                    }
                    other => panic!("{url}: {other:?}"),
                }
            }
            if !unix {
                for (part, named) in [
                    ("/3?db=4", "two databases, 3 after the / and 4"),
                    ("/0?db=4", "two databases, 0 after the / and 4"),
                    ("/x", "after the / is not a number"),
                    ("/3/4", "after the / is not a number"),
                    ("//3", "after the / is not a number"),
                    ("/+3", "after the / is not a number"),
                ] {
                    let url = format!("{base}{part}");
                    let said = parse(&url).unwrap_err().to_string();
                    assert!(said.contains(named), "{url}: {said}");
                }
            }
        }
    }

    #[test]
    fn hosts_are_valid_or_refused() {
        for host in [
            "",
            ":1",
            "h:",
            "h:0",
            "h:x",
            "h:70000",
            "h%20x",
            "[h]",
            "[::1",
            "::1",
            "0.0.0.0",
            "[::]",
            "h h",
            "a,b",
            "bücher.example",
        ] {
            let url = format!("redis://{host}/3");
            let error = parse(&url).unwrap_err();
            assert!(error.to_string().contains("host"), "{url}: {error}");
        }
        for (host, named) in [
            ("h", "h:6379"),
            ("H_1.example:7", "H_1.example:7"),
            ("[::1]", "[::1]:6379"),
            ("[fe80::1%eth0]:7", "[fe80::1%eth0]:7"),
            ("xn--bcher-kva.example:7", "xn--bcher-kva.example:7"),
            ("h1,[::1]:2,h3:3", "h1:6379,[::1]:2,h3:3"),
        ] {
            for url in [
                format!("redis+cluster://{host}"),
                format!("redis+sentinel://{host}/master"),
            ] {
                let named = match url.contains("sentinel") {
                    true => named.replace("6379", "26379"),
                    false => named.to_owned(),
                };
                let nodes = match parse(&url).unwrap().deployment {
                    Deployment::Cluster(nodes)
                    | Deployment::Sentinel {
                        sentinels: nodes, ..
                    } => nodes,
                    Deployment::Single(_) => panic!("{url}"),
                };
                let nodes: Vec<String> = nodes.iter().map(Endpoint::to_string).collect();
                assert_eq!(nodes.join(","), named, "{url}");
            }
        }
    }

    #[test]
    fn credentials_are_decoded() {
        for (url, user, password) in [
            ("redis://h", None, None),
            ("redis://:p@h", None, Some("p")),
            ("redis://u:p:q@h", Some("u"), Some("p:q")),
            ("redis://u:p@q@h", Some("u"), Some("p@q")),
            ("redis://u%3A:p%2F%3F%23%40+@h", Some("u:"), Some("p/?#@+")),
            ("redis://u:100%@h", Some("u"), Some("100%")),
            ("valkey+cluster://:pw@h1:1,h2/", None, Some("pw")),
            ("unix:///s?user=u%26&pass=p%3D=+", Some("u&"), Some("p==+")),
        ] {
            let parsed = parse(url).unwrap();
            assert_eq!(parsed.config.login(), (user, password, 0), "{url}");
        }
        for (query, user, password) in [
            ("sentinel_password=s%20p", None, Some("s p")),
            (
                "sentinel_user=a:b&sentinel_password=c/d@e",
                Some("a:b"),
                Some("c/d@e"),
            ),
        ] {
            let url = format!("redis+sentinel://us%40er:p%3Aw@h/m%2Dn/5?{query}");
            let parsed = parse(&url).unwrap();
            assert_eq!(parsed.config.login(), (Some("us@er"), Some("p:w"), 5));
            let Deployment::Sentinel { master, config, .. } = parsed.deployment else {
                panic!("{url}");
            };
            assert_eq!(master, "m-n");
            assert_eq!(config.login(), (user, password, 0));
        }
    }

    /// One part of a random URL: its text, and how an error names it if it is invalid there.
    type Piece = (&'static str, Option<&'static str>);

    fn piece(pieces: &'static [Piece]) -> impl Strategy<Value = Piece> {
        (0..pieces.len()).prop_map(|at| pieces[at])
    }

    proptest! {
        // A failure prints the URL.
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// Random URLs from parts: either every part takes effect or the error names a bad one, and no
        /// error repeats a password.
        #[test]
        fn random_urls_take_effect_as_a_whole(
            credentials in piece(&[
                ("", None),
                ("us%2Fer:s3cr%40et@", None),
                (":s3cr%40et@", None),
                ("u:s3/cret@", Some("%2F")),
                ("u:s3?cret@", Some("%3F")),
                ("u:s3#cret@", Some("%23")),
            ]),
            host in piece(&[("h", None), ("h:7", None), ("h:x", Some("host")), ("", Some("host"))]),
            path in piece(&[("", None), ("/", None), ("/3", None), ("/5", None), ("/x", Some("/"))]),
            parameters in proptest::collection::vec(
                piece(&[
                    ("db=3", None),
                    ("protocol=3", None),
                    ("dbase=3", Some("\"dbase\"")),
                    ("protocol=2", Some("protocol")),
                    ("db=three", Some("db=")),
                ]),
                0..3,
            ),
            fragment in piece(&[("", None), ("", None), ("", None), ("#insecure", Some("#"))]),
        ) {
            let query: Vec<&str> = parameters.iter().map(|(text, _)| *text).collect();
            let query = match query.is_empty() {
                true => String::new(),
                false => format!("?{}", query.join("&")),
            };
            let url = format!("redis://{}{}{}{query}{}", credentials.0, host.0, path.0, fragment.0);
            let mut bad: Vec<&str> = parameters.iter().filter_map(|(_, named)| *named).collect();
            bad.extend([credentials.1, host.1, path.1, fragment.1].into_iter().flatten());
            for name in ["db", "protocol"] {
                let times = parameters.iter().filter(|(text, _)| {
                    text.split_once('=').is_some_and(|(other, _)| other == name)
                });
                if times.count() > 1 {
                    bad.push("twice");
                }
            }
            let by_parameter = parameters.iter().any(|(text, _)| *text == "db=3");
            if path.0 == "/5" && by_parameter {
                bad.push("two databases");
            }
            match parse(&url) {
                Ok(parsed) => {
                    prop_assert!(bad.is_empty(), "{url}: {bad:?} was ignored");
                    let db = match path.0.trim_start_matches('/') {
                        "" if by_parameter => 3,
                        "" => 0,
                        number => number.parse().unwrap(),
                    };
                    let login = match credentials.0 {
                        "" => (None, None),
                        ":s3cr%40et@" => (None, Some("s3cr@et")),
                        _ => (Some("us/er"), Some("s3cr@et")),
                    };
                    prop_assert_eq!(parsed.config.login(), (login.0, login.1, db));
                    let Deployment::Single(Address::Tcp(at)) = parsed.deployment else {
                        panic!("{url}");
                    };
                    let port = if host.0.ends_with(":7") { 7 } else { 6379 };
                    prop_assert_eq!(at, Endpoint::new("h", port));
                }
                Err(error) => {
                    let said = error.to_string();
                    let named = bad.iter().any(|part| said.contains(part));
                    prop_assert!(named, "{url}: {said} names none of {bad:?}");
                    let secret = said.contains("cret") || said.contains("s3");
                    prop_assert!(!secret, "{url}: {said}");
                }
            }
        }
    }

    /// The first and the last characters of each secret: no part of it is shown.
    const SECRET_ENDS: [&str; 2] = ["HEAD9", "TAIL9"];

    /// A secret with all characters that the position permits without an escape, and with escapes.
    fn secret(permitted: &'static [&'static str]) -> impl Strategy<Value = String> {
        let escapes: &[&str] = &[
            "%40", "%2F", "%3F", "%23", "%26", "%3A", "%25", "100%", "ü", ":", "x",
        ];
        let part = proptest::sample::select([escapes, permitted].concat());
        let parts = proptest::collection::vec(part, 0..6);
        parts.prop_map(|parts| format!("{}{}{}", SECRET_ENDS[0], parts.concat(), SECRET_ENDS[1]))
    }

    /// Any URL with a password in each position, or with none.
    fn url_with_secrets() -> impl Strategy<Value = String> {
        let scheme = proptest::sample::select(vec!["redis", "valkey", "rediss", "valkeys"]);
        let form = proptest::sample::select(vec![Form::Single, Form::Sentinel, Form::Cluster]);
        let user = proptest::sample::select(vec!["", "me", "m%40e", "m@e", "ü%3A"]);
        let password = proptest::option::of(secret(&["@", "=", "&", "+"]));
        let credentials = (user, password).prop_map(|(user, password)| match (user, password) {
            ("", None) => String::new(),
            (user, None) => format!("{user}@"),
            (user, Some(password)) => format!("{user}:{password}@"),
        });
        let query = || {
            let user = proptest::sample::select(vec!["me", "m@e", "m/e?", "%40"]);
            let password = secret(&["@", "/", "?", "="]);
            let (user, password) = (proptest::option::of(user), proptest::option::of(password));
            (user, password, any::<[bool; 2]>())
        };
        let servers = (scheme, form, credentials, query());
        let servers = servers.prop_map(|(scheme, form, credentials, (user, password, more))| {
            let (name, place) = match form {
                Form::Sentinel => ("+sentinel", "a:1,[::1]:2,b/mas%2Dter/0"),
                Form::Cluster => ("+cluster", "a:1,b"),
                _ => ("", "books.example:7/3/"),
            };
            let named = ["sentinel_user", "sentinel_password"];
            let query = match form {
                Form::Sentinel => query_text(named, user, password, more),
                _ => query_text(named, None, None, [false, more[1]]),
            };
            format!("{scheme}{name}://{credentials}{place}{query}")
        });
        let start = proptest::sample::select(vec![
            "unix:",
            "unix://",
            "redis+unix:",
            "redis+unix://",
            "valkey+unix:",
            "unix://localhost",
        ]);
        let path = proptest::sample::select(vec!["/s", "/run/a;b:c.sock", "/r&/x%40y", "/&="]);
        let socket = (start, path, query()).prop_map(|(start, path, (user, password, more))| {
            let query = query_text(["user", "pass"], user, password, more);
            format!("{start}{path}{query}")
        });
        prop_oneof![servers, socket]
    }

    fn query_text(
        [user_name, password_name]: [&str; 2],
        user: Option<&str>,
        password: Option<String>,
        [db, protocol]: [bool; 2],
    ) -> String {
        let pairs = [
            protocol.then(|| "protocol=3".to_owned()),
            password.map(|password| format!("{password_name}={password}")),
            db.then(|| "db=%30".to_owned()),
            user.map(|user| format!("{user_name}={user}")),
        ];
        let pairs: Vec<String> = pairs.into_iter().flatten().collect();
        match pairs.is_empty() {
            true => String::new(),
            false => format!("?{}", pairs.join("&")),
        }
    }

    /// Else the view of one server could be that of most of them.
    #[test]
    fn sentinel_that_is_named_twice_has_one_vote() {
        let parsed = parse("redis+sentinel://a,b:26379,a:26379,b:1/m").unwrap();
        let Deployment::Sentinel { sentinels, .. } = parsed.deployment else {
            panic!("{:?}", parsed.deployment);
        };
        let named: Vec<_> = sentinels.iter().map(ToString::to_string).collect();
        assert_eq!(named, ["a:26379", "b:26379", "b:1"]);
    }

    /// The servers of a URL, the database and the credentials.
    fn meaning(url: &str, options: &ConnectOptions) -> String {
        let parsed = super::parse(url, options).unwrap_or_else(|error| panic!("{url}: {error}"));
        let sentinel = match &parsed.deployment {
            Deployment::Sentinel { config, .. } => format!("{:?}", config.login()),
            _ => String::new(),
        };
        format!(
            "{:?} {sentinel} {:?}",
            parsed.deployment,
            parsed.config.login()
        )
    }

    proptest! {
        // A failure prints the URL.
        #![proptest_config(ProptestConfig {
            cases: 4096,
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        #[test]
        #[cfg(feature = "tls")]
        fn public_forms_have_no_secret_and_name_the_same_servers(url in url_with_secrets()) {
            let has_secret = |text: &str| SECRET_ENDS.iter().any(|end| text.contains(end));
            let public = PublicUrl::parse(&url).unwrap_or_else(|error| panic!("{url}: {error}"));
            prop_assert!(!has_secret(&format!("{public:?}")), "{url}: {public:?}");
            let has_password = |url: &PublicUrl| url.has_password || url.has_sentinel_password;
            prop_assert_eq!(has_password(&public), has_secret(&url), "{}", url);
            let options = with_password_from_elsewhere();
            let kept = &public.without_passwords;
            prop_assert_eq!(meaning(kept, &options), meaning(&url, &options), "{}", url);
            let again = PublicUrl::parse(kept).unwrap();
            prop_assert!(!has_password(&again), "{}: {}", url, kept);
            prop_assert_eq!(&again.without_passwords, kept);
            prop_assert_eq!(&again.redacted, &PublicUrl::parse(&again.redacted).unwrap().redacted);
            let servers = |url: &str| format!("{:?}", super::parse(url, &options).unwrap());
            prop_assert_eq!(servers(&public.redacted), servers(&url), "{}", url);
            let parsed = super::parse(&public.redacted, &options).unwrap();
            let (user, _, _) = parsed.config.login();
            prop_assert!(matches!(user, None | Some("***")), "{}: {:?}", url, user);
        }

        /// A typo does not show a secret: the message names no part that could belong to it.
        #[test]
        fn typos_do_not_show_a_secret(
            url in url_with_secrets(),
            at in any::<proptest::sample::Index>(),
            typed in proptest::option::of(proptest::sample::select("@/?&;=:#%+ x9".chars().collect::<Vec<_>>())),
            replaces in any::<bool>(),
        ) {
            let mut chars: Vec<char> = url.chars().collect();
            let at = at.index(chars.len());
            if replaces || typed.is_none() {
                chars.remove(at);
            }
            if let Some(typed) = typed {
                chars.insert(at, typed);
            }
            let wrong: String = chars.into_iter().collect();
            let said = match PublicUrl::parse(&wrong) {
                Err(error) => format!("{error} {error:?}"),
                Ok(public) if wrong.contains("unix:") => public.redacted,
                // Without the @ behind it, the tail of a password is a valid host.
                Ok(_) => String::new(),
            };
            let shown = ["HEAD9", "EAD9", "TAIL9", "TAIL", "AIL9"].into_iter().find(|end| said.contains(end));
            prop_assert!(shown.is_none(), "{wrong}: {said}");
        }
    }

    #[test]
    fn public_forms_of_urls() {
        for (url, redacted, without_passwords) in [
            ("redis://h:1/2", "redis://h:1/2", "redis://h:1/2"),
            ("redis://h?db=3\n", "redis://h?db=3", "redis://h?db=3"),
            ("redis://u@h", "redis://***@h", "redis://u@h"),
            (
                "redis://u:p@w@h:1/2",
                "redis://***@h:1/2",
                "redis://u@h:1/2",
            ),
            ("redis://:pw@h", "redis://***@h", "redis://h"),
            ("unix:/s?pass=p@w", "unix:/s", "unix:/s"),
            (
                "redis+unix:///a;b?db=1&pass=/w&user=u@",
                "redis+unix:///a;b?db=1",
                "redis+unix:///a;b?db=1&user=u@",
            ),
            (
                "redis+sentinel://:pw@a:1,b/m/1?sentinel_user=u&sentinel_password=p@?w",
                "redis+sentinel://***@a:1,b/m/1",
                "redis+sentinel://a:1,b/m/1?sentinel_user=u",
            ),
            ("embedded:", "embedded:", "embedded:"),
        ] {
            let public = PublicUrl::parse(url).unwrap();
            assert_eq!(public.redacted, redacted);
            assert_eq!(public.without_passwords, without_passwords);
        }
        let logins = |url| {
            let public = PublicUrl::parse(url).unwrap();
            [
                public.has_login,
                public.has_password,
                public.has_sentinel_login,
                public.has_sentinel_password,
            ]
        };
        for (url, expected) in [
            ("redis://@h", [false; 4]),
            ("redis://u@h", [true, false, false, false]),
            ("redis://:pw@h", [true, true, false, false]),
            ("unix:/a&b?db=0", [false; 4]),
            ("unix:/a?user=u", [true, false, false, false]),
            ("unix:/a?pass=pw", [true, true, false, false]),
            (
                "redis+sentinel://h/m?sentinel_password=p@",
                [false, false, true, true],
            ),
            (
                "redis+sentinel://u@h/m?sentinel_user=u",
                [true, false, true, false],
            ),
        ] {
            assert_eq!(logins(url), expected, "{url}");
        }
    }

    #[test]
    #[cfg(not(feature = "tls"))]
    fn missing_tls_feature_is_reported() {
        for url in ["rediss://h", "valkeys://h", "rediss+cluster://h"] {
            let said = parse(url).unwrap_err().to_string();
            assert!(said.contains("feature `tls`"), "{said}");
        }
    }
}
