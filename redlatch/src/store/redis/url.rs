//! Parses the URL of a store, without repeating a secret in an error.
//!
//! Every part of a URL takes effect, or the URL is refused with an error that names the part. A part that
//! is silently dropped can put two services into different databases, and then they do not exclude each
//! other. So this file parses all forms itself:
//!
//! 1. `#` is refused everywhere: nothing is defined after it.
//! 2. The authority ends at the first `/` or `?`. The last `@` in it ends the credentials. An `@` in the
//!    path is refused, because the path then contains the rest of an unescaped password.
//! 3. Parameters are matched against those that the form knows. Unknown and repeated ones are refused.
//! 4. The database is the path (`/3`) or `db=3`. Two different ones are refused.
//!
//! Percent-encoding is decoded in users, passwords, the master's name and parameters.

use std::collections::BTreeMap;
use std::sync::Arc;

use percent_encoding::percent_decode_str;
use redis::{ConnectionAddr, IntoConnectionInfo};

use super::connection_config::{ConnectionConfig, Tls};
use super::endpoint::Endpoint;
use super::options::{ConnectOptions, Login, Secret};
use crate::error::{Error, Result};

/// The result of parsing a URL.
#[derive(Debug)]
pub(super) struct ParsedUrl {
    pub(super) deployment: Deployment,
    /// How to connect to the data servers.
    pub(super) config: ConnectionConfig,
}

/// The servers that the URL names.
#[derive(Debug)]
pub(super) enum Deployment {
    /// One server.
    Single(ConnectionAddr),
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

const SENTINEL_PORT: u16 = 26379;
const NODE_PORT: u16 = 6379;

/// The forms of URL, for messages.
const URL_FORMS: &str = "redis://host:port, redis+unix:///path, redis+sentinel://host:port,host:port/master, \
                     redis+cluster://host:port,host:port or embedded:";

/// Parses the URL of a store on servers, and combines it with the builder's options.
pub(super) fn parse(url: &str, options: &ConnectOptions) -> Result<ParsedUrl> {
    // A URL that was read from a file may end with a line break.
    let url = url.trim();
    if url.contains(char::is_control) {
        return invalid("it contains a line break, a tab or another control character");
    }
    let Some((scheme, rest)) = url.split_once(':') else {
        return invalid("it has no scheme; use redis://host:port");
    };
    let (base, kind) = scheme.split_once('+').unwrap_or((scheme, ""));
    let (use_tls, kind) = match base {
        "redis" | "valkey" => (false, kind),
        "rediss" | "valkeys" => (true, kind),
        "unix" if kind.is_empty() => (false, "unix"),
        other if rest.starts_with("//") && is_scheme_text(scheme) => {
            return invalid(format!("unknown scheme {other:?}; use {URL_FORMS}"));
        }
        // Not repeated: without `//` it may be a user name.
        _ => return invalid("it has no known scheme; use redis://host:port"),
    };
    if use_tls && kind == "unix" {
        return invalid("TLS over a unix socket is not supported; use redis+unix:///path");
    }
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
    let tls = tls(use_tls, options)?;
    let (deployment, login, db) = match kind {
        "" => single(rest)?,
        "unix" => unix(rest)?,
        "sentinel" => sentinel(rest, &options.sentinel_login, tls.clone())?,
        "cluster" => cluster(rest)?,
        _ if is_scheme_text(kind) => {
            return invalid(format!("unknown scheme {scheme:?}; use {URL_FORMS}"));
        }
        _ => return invalid("it has no known scheme; use redis://host:port"),
    };
    let config = ConnectionConfig::new(&login, db, &options.login, tls)?;
    Ok(ParsedUrl { deployment, config })
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
        (true, _) => Ok(Some(Tls::new(&options.tls))),
        #[cfg(not(feature = "tls"))]
        (true, _) => {
            invalid("this build does not include TLS; enable the feature `tls` of redlatch")
        }
    }
}

/// The servers of a URL; the credentials and the database for the data servers.
type UrlContent = (Deployment, Login, i64);

fn single(rest: &str) -> Result<UrlContent> {
    let parts = UrlParts::parse(rest, &[])?;
    let hosts = parts.hosts(NODE_PORT)?;
    let [host] = hosts.as_slice() else {
        return invalid(
            "redis:// takes one server; for several hosts use redis+sentinel:// or \
             redis+cluster://",
        );
    };
    let (deployment, db) = (Deployment::Single(host.to_addr()), parts.path);
    Ok((deployment, parts.login()?, parts.query.database(db)?))
}

fn unix(rest: &str) -> Result<UrlContent> {
    let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
    let path = path.strip_prefix("//").unwrap_or(path);
    let path = path.strip_prefix("localhost").unwrap_or(path);
    if !path.starts_with('/') {
        return invalid(
            "it has no absolute socket path, or a host, user or password before the path; use \
             redis+unix:///path?user=…&pass=…",
        );
    }
    let query = Query::parse(query, &["user", "pass"])?;
    let socket = format!("unix://{path}").into_connection_info();
    let socket = socket.map_err(|e| Error::InvalidUrl {
        reason: e.to_string(),
    })?;
    let login = login(query.get("user")?, query.get("pass")?);
    let deployment = Deployment::Single(socket.addr().clone());
    Ok((deployment, login, query.database("")?))
}

fn sentinel(rest: &str, builder_login: &Login, tls: Option<Arc<Tls>>) -> Result<UrlContent> {
    let parts = UrlParts::parse(rest, &["sentinel_user", "sentinel_password"])?;
    let (master, db) = parts.path.split_once('/').unwrap_or((parts.path, ""));
    if master.is_empty() {
        return invalid(
            "it does not name the master; use redis+sentinel://host:port,host:port/master",
        );
    }
    let query = &parts.query;
    let url_login = login(query.get("sentinel_user")?, query.get("sentinel_password")?);
    let deployment = Deployment::Sentinel {
        sentinels: parts.hosts(SENTINEL_PORT)?,
        master: percent_decode(master, "the name of the master")?,
        config: ConnectionConfig::new(&url_login, 0, builder_login, tls)?,
    };
    Ok((deployment, parts.login()?, query.database(db)?))
}

fn cluster(rest: &str) -> Result<UrlContent> {
    let parts = UrlParts::parse(rest, &[])?;
    if parts.query.database(parts.path)? != 0 {
        return invalid("a cluster has only database 0; omit the database");
    }
    let deployment = Deployment::Cluster(parts.hosts(NODE_PORT)?);
    Ok((deployment, parts.login()?, 0))
}

/// The parts of a URL with hosts.
struct UrlParts<'a> {
    /// Without the `@`.
    credentials: &'a str,
    hosts: &'a str,
    /// Without the slashes around it.
    path: &'a str,
    query: Query<'a>,
}

impl<'a> UrlParts<'a> {
    /// Takes the URL after its scheme, and the parameters that only this form knows.
    fn parse(rest: &'a str, parameters: &[&'static str]) -> Result<UrlParts<'a>> {
        let Some(rest) = rest.strip_prefix("//") else {
            return invalid(format!("it has no hosts; use {URL_FORMS}"));
        };
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        // Not repeated: it is the rest of a password.
        if path.contains('@') {
            return invalid(
                "it has an @ after the first /; in a user or password, write / as %2F, ? as %3F \
                 and @ as %40",
            );
        }
        let (credentials, hosts) = authority.rsplit_once('@').unwrap_or(("", authority));
        Ok(UrlParts {
            credentials,
            hosts,
            path: path.trim_end_matches('/'),
            query: Query::parse(query, parameters)?,
        })
    }

    fn hosts(&self, port: u16) -> Result<Vec<Endpoint>> {
        let hosts = self.hosts.split(',');
        let hosts: Option<_> = hosts.map(|host| Endpoint::parse(host, port)).collect();
        let reason = "a host is missing, or a host or port is invalid; write host:port; in a \
                      user or password, write / as %2F and ? as %3F";
        hosts.map_or_else(|| invalid(reason), Ok)
    }

    fn login(&self) -> Result<Login> {
        let credentials = self.credentials;
        let (user, password) = credentials.split_once(':').unwrap_or((credentials, ""));
        let user = percent_decode(user, "the user")?;
        let password = percent_decode(password, "the password")?;
        Ok(login(Some(user), Some(password)))
    }
}

/// Credentials in a URL; an empty one counts as missing.
fn login(user: Option<String>, password: Option<String>) -> Login {
    Login {
        username: user.filter(|user| !user.is_empty()),
        password: password.filter(|it| !it.is_empty()).map(Secret),
    }
}

const DB_PARAM: &str = "db";
const PROTOCOL_PARAM: &str = "protocol";

/// The parameters after the `?`: all known, none twice.
struct Query<'a>(BTreeMap<&'a str, &'a str>);

impl<'a> Query<'a> {
    fn parse(query: &'a str, parameters: &[&'static str]) -> Result<Query<'a>> {
        let known = [&[DB_PARAM, PROTOCOL_PARAM], parameters].concat();
        let mut values = BTreeMap::new();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            if !known.contains(&name) {
                let is_name = |c: char| c.is_ascii_alphanumeric() || "_-".contains(c);
                // With an @, or without a value, it may be the rest of a password.
                let is_public = pair.contains('=') && !query.contains('@');
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
            "redis+cluster://:secret@a,b/3",
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
            "redis+unix://u:secret@/run/redis.sock",
            "redis+unix://u:secret@localhost/run/redis.sock",
            "redis://u:%ffsecret@host",
            "redis+unix:///run/redis.sock?user=u&pass=%ffsecret",
        ] {
            let error = parse(url).unwrap_err();
            assert!(matches!(error, Error::InvalidUrl { .. }), "{url}: {error}");
            let said = format!("{error} {error:?}");
            assert!(!said.contains("secret"), "{url}: {said}");
        }
    }

    #[test]
    fn good_urls_are_parsed() {
        for url in [
            "redis://127.0.0.1",
            "redis://user:pw@[::1]:6380/3",
            "valkey://localhost",
            "redis+unix:///run/redis.sock?db=1",
            "unix:///run/redis.sock",
        ] {
            let parsed = parse(url).unwrap();
            assert!(
                matches!(parsed.deployment, Deployment::Single(_)),
                "{parsed:?}"
            );
        }
    }

    /// Scheme and host, after which a database may follow.
    fn bases() -> Vec<&'static str> {
        let mut bases = vec![
            "redis://u:p@h:1",
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
            let cluster = base.contains("cluster");
            let works = [
                ("", 0, true),
                ("\n", 0, true),
                ("?", 0, true),
                ("?db=0", 0, true),
                ("?db=3", 3, !cluster),
                ("?db=%33", 3, !cluster),
                ("?protocol=resp3&db=0", 0, true),
                ("/", 0, !unix),
                ("/0", 0, !unix),
                ("/3", 3, !cluster && !unix),
                ("/3/?db=3", 3, !cluster && !unix),
            ];
            for (part, db, works) in works {
                let url = format!("{base}{part}");
                match parse(&url) {
                    Ok(parsed) if works => assert_eq!(parsed.config.db(), db, "{url}"),
                    Err(error) if !works && cluster => {
                        assert!(error.to_string().contains("database"), "{url}: {error}");
                    }
                    // There the whole path is that of the socket.
                    Ok(parsed) if unix => {
                        let Deployment::Single(ConnectionAddr::Unix(path)) = parsed.deployment
                        else {
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
            "", ":1", "h:", "h:0", "h:x", "h:70000", "h%20x", "[h]", "[::1", "::1", "0.0.0.0",
            "[::]", "h h", "a,b",
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
            ("bücher.example", "xn--bcher-kva.example:6379"),
            ("xn--bcher-kva.example:7", "xn--bcher-kva.example:7"),
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
                assert_eq!(nodes[0].to_string(), named, "{url}");
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
            ("unix:///s?user=u%26&pass=p%3D=+", Some("u&"), Some("p==+")),
        ] {
            let parsed = parse(url).unwrap();
            assert_eq!(parsed.config.credentials(), (user, password, 0), "{url}");
        }
        let sentinel = "redis+sentinel://h/m%2Dn?sentinel_user=a:b&sentinel_password=c/d@e";
        let Deployment::Sentinel { master, config, .. } = parse(sentinel).unwrap().deployment
        else {
            panic!("no sentinels");
        };
        assert_eq!(master, "m-n");
        assert_eq!(config.credentials(), (Some("a:b"), Some("c/d@e"), 0));
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
                    prop_assert_eq!(parsed.config.credentials(), (login.0, login.1, db));
                    let Deployment::Single(ConnectionAddr::Tcp(name, port)) = parsed.deployment
                    else {
                        panic!("{url}");
                    };
                    let has_port = host.0.ends_with(":7");
                    prop_assert_eq!((&*name, port), ("h", if has_port { 7 } else { 6379 }));
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

    #[test]
    #[cfg(not(feature = "tls"))]
    fn missing_tls_feature_is_reported() {
        for url in ["rediss://h", "valkeys://h", "rediss+cluster://h"] {
            let said = parse(url).unwrap_err().to_string();
            assert!(said.contains("feature `tls`"), "{said}");
        }
    }

    #[test]
    #[cfg(feature = "tls")]
    fn scheme_enables_tls() {
        for url in [
            "rediss://h",
            "valkeys://u:p@h:1/2",
            "rediss+cluster://a,b",
            "rediss+sentinel://a/m",
        ] {
            parse(url).unwrap();
        }
    }

    #[test]
    fn sentinel_url_names_sentinels_and_master() {
        let url = "redis+sentinel://us%40er:p%3Aw@h1,[::1]:2,h3:3/orders/5?sentinel_password=s%20p";
        let parsed = parse(url).unwrap();
        let Deployment::Sentinel {
            sentinels,
            master,
            config,
        } = parsed.deployment
        else {
            panic!("{parsed:?}");
        };
        let named: Vec<String> = sentinels.iter().map(Endpoint::to_string).collect();
        assert_eq!(named, ["h1:26379", "[::1]:2", "h3:3"]);
        assert_eq!(master, "orders");
        assert_eq!(parsed.config.credentials(), (Some("us@er"), Some("p:w"), 5));
        assert_eq!(config.credentials(), (None, Some("s p"), 0));
    }

    #[test]
    fn cluster_url_names_nodes() {
        let parsed = parse("valkey+cluster://:pw@h1:1,h2/").unwrap();
        let Deployment::Cluster(nodes) = parsed.deployment else {
            panic!("{parsed:?}");
        };
        let named: Vec<String> = nodes.iter().map(Endpoint::to_string).collect();
        assert_eq!(named, ["h1:1", "h2:6379"]);
        assert_eq!(parsed.config.credentials(), (None, Some("pw"), 0));
    }
}
