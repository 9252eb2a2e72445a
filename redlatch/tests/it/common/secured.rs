//! A server as docs/security.md describes it: TLS with client certificates, and a user with the
//! documented ACL rules.

use std::sync::OnceLock;

use redlatch::{Client, ClientBuilder};
use redlatch_testkit::{Identity, TlsServer};

use super::patient;

const DOCS: &str = include_str!("../../../../docs/security.md");

/// The prefix to which the rules apply.
pub(crate) const PREFIX: &str = "app:";

/// The documented ACL rules, without the word `user`.
pub(crate) struct Rules {
    /// Rules of a client.
    pub(crate) app: &'static str,
    /// Additional rules for names with their own hash tag.
    pub(crate) tagged: &'static str,
    /// Additional rules for reports of changes.
    pub(crate) reports: &'static str,
    /// Additional rules in a cluster.
    pub(crate) cluster: &'static str,
    /// Rules of a client at sentinels.
    pub(crate) sentinel: &'static str,
    /// Rules of a read-only operator.
    pub(crate) operator: &'static str,
    /// Rules of a default user that is off.
    pub(crate) default_user: &'static str,
    /// Rules of replicas at their master.
    pub(crate) replica_user: &'static str,
    /// Rules of sentinels at the servers.
    pub(crate) sentinel_user: &'static str,
}

pub(crate) fn rules() -> Rules {
    let mut lines = DOCS.lines().map(str::trim);
    let rules = std::iter::from_fn(|| {
        lines.find(|line| *line == "```acl")?;
        lines.next()
    });
    let mut rules = rules.map(|rule| rule.strip_prefix("user ").unwrap_or(rule));
    let mut next = || rules.next().expect("all rules");
    let all = Rules {
        app: next(),
        tagged: next(),
        reports: next(),
        cluster: next(),
        sentinel: next(),
        operator: next(),
        default_user: next(),
        replica_user: next(),
        sentinel_user: next(),
    };
    assert_eq!(rules.next(), None);
    all
}

/// Returns the name and password of the user with these rules.
pub(crate) fn login(rules: &str) -> (&str, &str) {
    let mut words = rules.split(' ');
    let name = words.next().expect("a name");
    let password = words.find_map(|word| word.strip_prefix('>'));
    (name, password.expect("a password"))
}

pub(crate) struct Secured {
    pub(crate) server: TlsServer,
    identity: Identity,
}

impl Secured {
    /// Returns the shared server, whose user has the rules for both kinds of name, and for reports.
    pub(crate) fn shared() -> &'static Secured {
        static SHARED: OnceLock<Secured> = OnceLock::new();
        SHARED.get_or_init(|| {
            let Rules {
                app,
                tagged,
                reports,
                ..
            } = rules();
            Secured::start(&[&format!("{app} {tagged} {reports}")])
        })
    }

    pub(crate) fn start(users: &[&str]) -> Secured {
        let server = TlsServer::start("yes", users);
        let identity = server.ca().client();
        Secured { server, identity }
    }

    /// Adds the credentials of the user with these rules.
    pub(crate) fn settings_of(&self, rules: &str, settings: ClientBuilder) -> ClientBuilder {
        let (name, password) = login(rules);
        let Identity { cert, key } = self.identity.clone();
        settings
            .tls_ca(self.server.ca().pem())
            .tls_client_cert(cert, key)
            .username(name)
            .password(password)
    }

    /// Adds the credentials of the client user, and the prefix of all its names.
    pub(crate) fn settings(&self, settings: ClientBuilder, prefix: &str) -> ClientBuilder {
        let settings = self.settings_of(rules().app, settings);
        settings.prefix(format!("{PREFIX}{prefix}"))
    }

    pub(crate) async fn client(&self, settings: ClientBuilder, prefix: &str) -> Client {
        let settings = self.settings(patient(settings), prefix);
        settings.connect(&self.server.url()).await.unwrap()
    }
}
