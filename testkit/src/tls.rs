//! Certificates, created on demand, and servers that use them.

use std::path::Path;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, date_time_ymd,
};

use crate::config;

/// A CA for one test.
#[derive(Debug)]
pub struct Ca {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

/// A certificate and its private key, both in PEM.
#[derive(Debug, Clone)]
pub struct Identity {
    /// The certificate in PEM.
    pub cert: String,
    /// Its private key in PEM.
    pub key: String,
}

/// The names of a server's certificate, and whether it has expired.
#[derive(Debug, Clone, Copy)]
pub struct CertSpec<'a> {
    /// Host names and addresses.
    pub names: &'a [&'a str],
    /// Whether the certificate expired years ago.
    pub expired: bool,
}

/// A valid certificate for the servers that are started here.
pub const LOOPBACK: CertSpec<'static> = CertSpec {
    names: &["127.0.0.1", "localhost"],
    expired: false,
};

impl Ca {
    /// Creates a CA.
    ///
    /// # Panics
    ///
    /// If the key or the certificate cannot be created; no test can cause this.
    pub fn new() -> Ca {
        let mut params = params(&[]);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let name = crate::unique("a CA for tests");
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().expect("a key");
        let cert = params.self_signed(&key).expect("a certificate");
        Ca {
            pem: cert.pem(),
            issuer: Issuer::new(params, key),
        }
    }

    /// Returns the CA's own certificate in PEM.
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// Creates a server certificate.
    ///
    /// # Panics
    ///
    /// If a name is invalid.
    pub fn server(&self, what: CertSpec<'_>) -> Identity {
        let mut params = params(what.names);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        if what.expired {
            params.not_after = date_time_ymd(2021, 1, 1);
        }
        self.sign(&params)
    }

    /// Creates a client certificate.
    ///
    /// # Panics
    ///
    /// As [`new`](Ca::new).
    pub fn client(&self) -> Identity {
        let mut params = params(&[]);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.sign(&params)
    }

    fn sign(&self, params: &CertificateParams) -> Identity {
        let key = KeyPair::generate().expect("a key");
        let cert = params.signed_by(&key, &self.issuer).expect("a certificate");
        Identity {
            cert: cert.pem(),
            key: key.serialize_pem(),
        }
    }
}

impl Default for Ca {
    fn default() -> Ca {
        Ca::new()
    }
}

fn params(names: &[&str]) -> CertificateParams {
    let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
    let mut params = CertificateParams::new(names).expect("names");
    params.not_before = date_time_ymd(2020, 1, 1);
    params.not_after = date_time_ymd(2100, 1, 1);
    params
}

/// The TLS settings of servers.
#[derive(Debug, Clone, Copy)]
pub struct TlsPlan<'a> {
    /// The names in their certificates, and whether these have expired.
    pub certificate: CertSpec<'a>,
    /// `tls-auth-clients`: whether clients need a certificate (`yes`, `no`, `optional`).
    pub auth_clients: &'a str,
}

impl Default for TlsPlan<'_> {
    fn default() -> Self {
        TlsPlan {
            certificate: LOOPBACK,
            auth_clients: "no",
        }
    }
}

/// A CA, and the configuration lines of servers that use its certificates.
#[derive(Debug)]
pub(crate) struct TlsConfig {
    pub(crate) ca: Ca,
    lines: String,
}

impl TlsConfig {
    /// Writes the certificates to files in `dir`. A server has one certificate for its clients and
    /// another for connecting to other servers: each is valid for one purpose only.
    pub(crate) fn new(dir: &Path, plan: TlsPlan<'_>) -> TlsConfig {
        let ca = Ca::new();
        let (server, client) = (ca.server(plan.certificate), ca.client());
        let mut args = vec!["--tls-auth-clients".into(), plan.auth_clients.into()];
        for (setting, text) in [
            ("tls-cert-file", &*server.cert),
            ("tls-key-file", &*server.key),
            ("tls-client-cert-file", &*client.cert),
            ("tls-client-key-file", &*client.key),
            ("tls-ca-cert-file", ca.pem()),
        ] {
            let path = dir.join(format!("{setting}.pem"));
            std::fs::write(&path, text).expect("a file");
            args.extend([format!("--{setting}"), config::path(&path)]);
        }
        let lines = config::lines(&args);
        TlsConfig { ca, lines }
    }

    /// Returns the settings of a server that speaks TLS in addition to plain TCP.
    pub(crate) fn with_tls_port(&self, tls_port: u16) -> String {
        format!("{}tls-port {tls_port}\n", self.lines)
    }

    /// Returns the settings of a server that speaks only TLS, with clients and with other servers.
    /// Tests inspect it through a Unix socket in its home directory. Since Redis 7.2, nodes of a cluster report their ports without TLS
    /// there, so these are announced to be the ones with TLS.
    pub(crate) fn tls_only(&self, home: &Path, tls_port: u16) -> String {
        let socket = ["--unixsocket".into(), config::path(&home.join("socket"))];
        let (tls, socket) = (self.with_tls_port(tls_port), config::lines(&socket));
        format!(
            "{tls}port 0\ntls-replication yes\ntls-cluster yes\ncluster-announce-port {tls_port}{socket}"
        )
    }
}

/// Returns the scheme of URLs.
pub(crate) fn scheme(tls: bool) -> &'static str {
    match tls {
        true => "rediss",
        false => "redis",
    }
}
