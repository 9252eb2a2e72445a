//! The URL of a store, understood without ever repeating what could be secret in it.

use std::sync::Arc;

use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo};

use super::access::{Access, Endpoint};
use super::dial::Tls;
use super::given::{Given, Login};
use crate::error::{Error, Result};

/// What a URL names.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) deployment: Deployment,
    /// How its data servers are spoken to.
    pub(super) access: Access,
}

/// Which servers there are, as far as the URL tells.
#[derive(Debug)]
pub(super) enum Deployment {
    /// One server.
    Single(ConnectionAddr),
    /// Whichever server these sentinels call the master of this name.
    Sentinel {
        sentinels: Vec<Endpoint>,
        master: String,
        /// How the sentinels are spoken to.
        access: Access,
    },
    /// A cluster of which these nodes know the others.
    Cluster(Vec<Endpoint>),
}

const SENTINEL_PORT: u16 = 26379;
const NODE_PORT: u16 = 6379;

/// The forms of URL, for messages.
const FORMS: &str = "redis://host:port, redis+unix:///path, redis+sentinel://host:port,host:port/master, \
     redis+cluster://host:port,host:port or embedded:";

/// Understands the URL of a store on servers, together with what the builder was given.
pub(super) fn target(url: &str, given: &Given) -> Result<Target> {
    let Some((scheme, rest)) = url.split_once(':') else {
        return invalid("it has no scheme; write redis://host:port".into());
    };
    let (base, kind) = scheme.split_once('+').unwrap_or((scheme, ""));
    // What the client library sees has no TLS: that is ours.
    let (base, secure) = match base {
        "redis" | "valkey" => (base, false),
        "rediss" | "valkeys" => ("redis", true),
        "unix" if kind.is_empty() => (base, false),
        other if rest.starts_with("//") && is_plain(scheme) => {
            return invalid(format!("unknown scheme {other:?}; take {FORMS}"));
        }
        // Not repeated: without `//` it may be a user name.
        _ => return invalid("it has no known scheme; write redis://host:port".into()),
    };
    if secure && kind == "unix" {
        return invalid("there is no TLS over a unix socket; write redis+unix:///path".into());
    }
    let ways = Ways {
        base,
        given,
        tls: tls(secure, rest, given)?,
    };
    match kind {
        "" => ways.single(&format!("{base}:{rest}")),
        "unix" => ways.single(url),
        "sentinel" => ways.sentinel(rest),
        "cluster" => ways.cluster(rest),
        _ if is_plain(kind) => invalid(format!("unknown scheme {scheme:?}; take {FORMS}")),
        _ => invalid("it has no known scheme; write redis://host:port".into()),
    }
}

fn is_plain(scheme: &str) -> bool {
    scheme.chars().all(|c| c.is_ascii_lowercase() || c == '+')
}

/// What all servers that a URL names have in common.
struct Ways<'a> {
    /// The scheme for the client library.
    base: &'a str,
    given: &'a Given,
    tls: Option<Arc<Tls>>,
}

impl Ways<'_> {
    fn single(self, url: &str) -> Result<Target> {
        let info = understood(url)?;
        Ok(Target {
            deployment: Deployment::Single(info.addr().clone()),
            access: Access::new(&info, &self.given.login, self.tls)?,
        })
    }

    fn sentinel(self, rest: &str) -> Result<Target> {
        let parts = Parts::of(rest)?;
        let (master, db) = match parts.path.split_once('/') {
            Some((master, db)) => (master, db),
            None => (parts.path, ""),
        };
        if master.is_empty() {
            return invalid(
                "it does not name the master; write redis+sentinel://host:port,host:port/master"
                    .into(),
            );
        }
        let mut sentinel_user = String::new();
        let mut sentinel_password = String::new();
        for (name, value) in parts.query() {
            match name {
                "sentinel_user" => value.clone_into(&mut sentinel_user),
                "sentinel_password" => value.clone_into(&mut sentinel_password),
                _ => {
                    return invalid(
                        "it has an unknown parameter; known are sentinel_user and \
                         sentinel_password"
                            .into(),
                    );
                }
            }
        }
        let credentials = match (&*sentinel_user, &*sentinel_password) {
            ("", "") => String::new(),
            (user, "") => format!("{user}@"),
            (user, password) => format!("{user}:{password}@"),
        };
        Ok(Target {
            deployment: Deployment::Sentinel {
                sentinels: parts.hosts(SENTINEL_PORT)?,
                master: master.to_owned(),
                access: self.access(&credentials, "", &self.given.sentinel_login)?,
            },
            access: self.access(parts.credentials, db, &self.given.login)?,
        })
    }

    fn cluster(self, rest: &str) -> Result<Target> {
        let parts = Parts::of(rest)?;
        if !matches!(parts.path, "" | "0") {
            return invalid(
                "a cluster has no databases but 0; leave out what follows the /".into(),
            );
        }
        if !parts.query.is_empty() {
            return invalid("parameters after a ? are not known for a cluster".into());
        }
        Ok(Target {
            deployment: Deployment::Cluster(parts.hosts(NODE_PORT)?),
            access: self.access(parts.credentials, "", &self.given.login)?,
        })
    }

    /// What credentials and database come to, as the client library understands them.
    fn access(&self, credentials: &str, db: &str, login: &Login) -> Result<Access> {
        let url = format!("{}://{credentials}host/{db}", self.base);
        Access::new(&understood(&url)?, login, self.tls.clone())
    }
}

/// TLS, if the URL asks for it. Certificates for a connection that is not secure are a mistake that
/// must not be made in silence.
fn tls(secure: bool, rest: &str, given: &Given) -> Result<Option<Arc<Tls>>> {
    match (secure, given.tls.setting()) {
        (false, None) => return Ok(None),
        (false, Some(setting)) => {
            return Err(Error::InvalidSetting {
                setting,
                reason: "the URL does not ask for TLS; write rediss:// instead of redis://".into(),
            });
        }
        (true, _) => {}
    }
    if rest.contains('#') {
        // Elsewhere it is `#insecure`.
        return invalid(
            "nothing is known after a #; the server's certificate is always checked, for an own CA \
             there is the builder setting `tls_ca`"
                .into(),
        );
    }
    #[cfg(feature = "tls")]
    return Ok(Some(super::tls::Tls::new(&given.tls)));
    #[cfg(not(feature = "tls"))]
    return invalid("TLS is not part of this build; enable the feature `tls` of redlatch".into());
}

/// A URL with several hosts, in pieces.
struct Parts<'a> {
    /// With the `@`, or nothing.
    credentials: &'a str,
    hosts: &'a str,
    path: &'a str,
    query: &'a str,
}

impl<'a> Parts<'a> {
    fn of(rest: &'a str) -> Result<Parts<'a>> {
        let Some(rest) = rest.strip_prefix("//") else {
            return invalid(format!("it has no hosts; take {FORMS}"));
        };
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let at = authority.rfind('@').map_or(0, |at| at + 1);
        let (credentials, hosts) = authority.split_at(at);
        Ok(Parts {
            credentials,
            hosts,
            path: path.trim_end_matches('/'),
            query,
        })
    }

    fn hosts(&self, port: u16) -> Result<Vec<Endpoint>> {
        let hosts = self.hosts.split(',').map(|host| {
            let endpoint = Endpoint::parse(host, port);
            endpoint.map_or_else(
                || invalid("one of its hosts is none; write host:port,host:port".into()),
                Ok,
            )
        });
        hosts.collect()
    }

    fn query(&self) -> impl Iterator<Item = (&'a str, &'a str)> {
        let pairs = self.query.split('&').filter(|pair| !pair.is_empty());
        pairs.map(|pair| pair.split_once('=').unwrap_or((pair, "")))
    }
}

fn understood(url: &str) -> Result<ConnectionInfo> {
    url.into_connection_info().map_err(|e| Error::InvalidUrl {
        reason: e.to_string(),
    })
}

fn invalid<T>(reason: String) -> Result<T> {
    Err(Error::InvalidUrl { reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(url: &str) -> Result<Target> {
        super::target(url, &Given::default())
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
            "redis+cluster://:secret@a,b?secret=1",
            "redis+sentinel://:secret@a,b",
            "redis+sentinel://:secret@a,b/master/notadb",
            "redis+sentinel://:secret@a:secret/master",
            "redis+sentinel://a/master?secret=secret",
        ] {
            let error = target(url).unwrap_err();
            assert!(matches!(error, Error::InvalidUrl { .. }), "{url}: {error}");
            let said = format!("{error} {error:?}");
            assert!(!said.contains("secret"), "{url}: {said}");
        }
    }

    #[test]
    fn good_urls_are_understood() {
        for url in [
            "redis://127.0.0.1",
            "redis://user:pw@[::1]:6380/3",
            "valkey://localhost",
            "redis+unix:///run/redis.sock?db=1",
            "unix:///run/redis.sock",
        ] {
            let target = target(url).unwrap();
            assert!(
                matches!(target.deployment, Deployment::Single(_)),
                "{target:?}"
            );
        }
    }

    #[test]
    #[cfg(not(feature = "tls"))]
    fn without_tls_it_is_said_what_is_missing() {
        for url in ["rediss://h", "valkeys://h", "rediss+cluster://h"] {
            let said = target(url).unwrap_err().to_string();
            assert!(said.contains("feature `tls`"), "{said}");
        }
    }

    #[test]
    #[cfg(feature = "tls")]
    fn tls_is_asked_for_by_the_scheme() {
        for url in [
            "rediss://h",
            "valkeys://u:p@h:1/2",
            "rediss+cluster://a,b",
            "rediss+sentinel://a/m",
        ] {
            target(url).unwrap();
        }
    }

    #[test]
    fn sentinels_and_their_master_are_named() {
        let url = "redis+sentinel://us%40er:p%3Aw@h1,[::1]:2,h3:3/orders/5?sentinel_password=s%20p";
        let target = target(url).unwrap();
        let Deployment::Sentinel {
            sentinels,
            master,
            access,
        } = target.deployment
        else {
            panic!("{target:?}");
        };
        let named: Vec<String> = sentinels.iter().map(Endpoint::to_string).collect();
        assert_eq!(named, ["h1:26379", "[::1]:2", "h3:3"]);
        assert_eq!(master, "orders");
        assert_eq!(target.access.credentials(), (Some("us@er"), Some("p:w"), 5));
        assert_eq!(access.credentials(), (None, Some("s p"), 0));
    }

    #[test]
    fn nodes_of_a_cluster_are_named() {
        let target = target("valkey+cluster://:pw@h1:1,h2/").unwrap();
        let Deployment::Cluster(nodes) = target.deployment else {
            panic!("{target:?}");
        };
        let named: Vec<String> = nodes.iter().map(Endpoint::to_string).collect();
        assert_eq!(named, ["h1:1", "h2:6379"]);
        assert_eq!(target.access.credentials(), (None, Some("pw"), 0));
    }
}
