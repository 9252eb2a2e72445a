//! TLS: reads and checks certificates, makes the handshake and explains its failures.
//!
//! The crypto provider is that of the process, if it has set one, and ring otherwise. The system's certificates are
//! read only if they are used.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::net::TcpStream;
use tokio::task::spawn_blocking;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{
    AlertDescription, CertificateError, ClientConfig, Error as TlsError, RootCertStore,
};

use super::endpoint::Endpoint;
use super::exchange_error::ExchangeError;
use super::options::{Certificates, Pem};
use super::wire::WireError;
use crate::error::{Cause, Error, ErrorSource, Result};
use crate::sync::Mutex;

pub(super) type TlsStream = tokio_rustls::client::TlsStream<TcpStream>;

/// The TLS settings of a deployment.
pub(super) struct Tls {
    certificates: Certificates,
    loaded: Mutex<Option<LoadedConfig>>,
}

/// The configuration in use, its source, and when it was loaded.
struct LoadedConfig {
    source: PemContents,
    config: Arc<ClientConfig>,
    at: Instant,
}

/// How long the system's certificates are used before a new connection reads them again. Reading takes some
/// milliseconds, too long for each of many connections.
const SYSTEM_CERTS_MAX_AGE: Duration = Duration::from_secs(60);

/// The same after a handshake that failed because of a certificate: the system's may have been replaced.
const SYSTEM_CERTS_RETRY_AGE: Duration = Duration::from_secs(1);

/// The contents of the certificates.
#[derive(Clone, PartialEq, Eq)]
struct PemContents {
    ca: Option<Vec<u8>>,
    client: Option<(Vec<u8>, Vec<u8>)>,
}

impl Tls {
    pub(super) fn new(certificates: &Certificates) -> Result<Arc<Tls>> {
        if let Some(name) = &certificates.server_name {
            let invalid = |reason| invalid_setting("tls_server_name", reason);
            parse_server_name(name).map_err(invalid)?;
        }
        Ok(Arc::new(Tls {
            certificates: certificates.clone(),
            loaded: Mutex::default(),
        }))
    }

    /// Connects to a server, which can be reached at another address, and verifies its identity.
    pub(super) async fn connect(
        self: &Arc<Self>,
        at: &Endpoint,
        reachable: &Endpoint,
    ) -> Result<TlsStream, ExchangeError> {
        let host = self.server_name(at);
        let name = parse_server_name(host).map_err(|reason| Error::InvalidUrl { reason })?;
        let handshake = async |config: &Arc<ClientConfig>| {
            let stream = reachable.connect().await?;
            let connector = TlsConnector::from(config.clone());
            Ok::<_, ExchangeError>(connector.connect(name.clone(), stream).await)
        };
        let config = self.load_config(SYSTEM_CERTS_MAX_AGE).await?;
        let mut outcome = handshake(&config).await?;
        if let Err(error) = &outcome
            && matches!(tls_error(error), Some(TlsError::InvalidCertificate(_)))
        {
            let newer = self.load_config(SYSTEM_CERTS_RETRY_AGE).await?;
            if !Arc::ptr_eq(&newer, &config) {
                outcome = handshake(&newer).await?;
            }
        }
        outcome.map_err(|error| {
            self.explain(&error, at).unwrap_or_else(|| {
                ExchangeError::NotExecuted(Cause::new(format!("TLS handshake: {error}"), error))
            })
        })
    }

    /// Returns the name that the certificate of this server must have.
    fn server_name<'a>(&'a self, at: &'a Endpoint) -> &'a str {
        self.certificates
            .server_name
            .as_deref()
            .unwrap_or(at.host())
    }

    /// Returns the configuration. It reads files, so it runs on a blocking thread.
    async fn load_config(
        self: &Arc<Self>,
        max_age: Duration,
    ) -> Result<Arc<ClientConfig>, ExchangeError> {
        let tls = self.clone();
        let config = spawn_blocking(move || tls.config(max_age)).await;
        let config = config.map_err(|_| ExchangeError::not_executed("connecting was interrupted"));
        Ok(config??)
    }

    /// Explains a failure of the first exchange on a connection: the first at which a server can reject the
    /// client certificate. Some servers just disconnect.
    pub(super) fn explain_first_exchange(
        &self,
        error: &WireError,
        at: &Endpoint,
    ) -> Option<ExchangeError> {
        if let WireError::Io(error) = error
            && let Some(failure) = self.explain(error, at)
        {
            return Some(failure);
        }
        let hint = match self.certificates.client.is_some() {
            true => "it may have rejected the client certificate",
            false => "it may require a client certificate (builder setting `tls_client_cert`)",
        };
        let disconnected = matches!(error, WireError::Io(_) | WireError::Closed);
        disconnected.then(|| {
            let reason = format!(
                "the server closed the connection right after the TLS handshake: {error}; {hint}"
            );
            ExchangeError::NotExecuted(Cause::new(reason, error.clone()))
        })
    }

    /// Explains a TLS error, and names the server: it may be the only one with the problem.
    fn explain(&self, error: &io::Error, at: &Endpoint) -> Option<ExchangeError> {
        let tls = tls_error(error)?;
        let reason = describe_tls_error(
            tls,
            self.server_name(at),
            self.certificates.client.is_some(),
        );
        Some(ExchangeError::Permanent(Error::TlsFailed {
            reason: format!("{at}: {reason}"),
            source: Some(ErrorSource::new(tls.clone())),
        }))
    }

    /// Reads the certificates; the system's if they were read longer ago than `max_age`. If reading fails, a
    /// running program keeps its current ones.
    fn config(&self, max_age: Duration) -> Result<Arc<ClientConfig>> {
        let mut loaded = self.loaded.lock();
        let source = PemContents::read(&self.certificates);
        if let (Ok(source), Some(loaded)) = (&source, loaded.as_ref())
            && loaded.source == *source
            && (source.ca.is_some() || loaded.at.elapsed() < max_age)
        {
            return Ok(loaded.config.clone());
        }
        let fresh = source.and_then(|source| {
            let config = Arc::new(source.config()?);
            let at = Instant::now();
            Ok(LoadedConfig { source, config, at })
        });
        match (fresh, loaded.as_ref()) {
            (Ok(fresh), _) => Ok(loaded.insert(fresh).config.clone()),
            (Err(error), Some(loaded)) => {
                tracing::warn!(%error, "certificates cannot be read; using the previous ones");
                Ok(loaded.config.clone())
            }
            (Err(error), None) => Err(error),
        }
    }
}

/// Parses the name in a certificate. The error is the reason why that is not possible.
fn parse_server_name(name: &str) -> std::result::Result<ServerName<'static>, String> {
    let parsed = ServerName::try_from(name.to_owned());
    parsed.map_err(|_| format!("{name:?} is neither a host name nor an address"))
}

const CA_SETTING: &str = "tls_ca";
const CLIENT_CERT_SETTING: &str = "tls_client_cert";

impl PemContents {
    fn read(certificates: &Certificates) -> Result<PemContents> {
        let read = |pem: &Pem, setting| match pem {
            Pem::Text(text) => Ok(text.clone()),
            Pem::File(path) => std::fs::read(path)
                .map_err(|error| invalid_setting(setting, format!("{}: {error}", path.display()))),
        };
        let ca = certificates.ca.as_ref().map(|pem| read(pem, CA_SETTING));
        let client = certificates.client.as_ref();
        let client = client.map(|(cert, key)| -> Result<_> {
            let cert = read(cert, CLIENT_CERT_SETTING)?;
            Ok((cert, read(key, CLIENT_CERT_SETTING)?))
        });
        Ok(PemContents {
            ca: ca.transpose()?,
            client: client.transpose()?,
        })
    }

    fn config(&self) -> Result<ClientConfig> {
        let provider = CryptoProvider::get_default().cloned();
        let provider = provider.unwrap_or_else(|| Arc::new(ring::default_provider()));
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| invalid_setting("tls", error.to_string()))?
            .with_root_certificates(self.roots()?);
        let Some((cert, key)) = &self.client else {
            return Ok(builder.with_no_client_auth());
        };
        let chain = chain(cert, CLIENT_CERT_SETTING)?;
        // The error of a key is not repeated: it could contain the key.
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|_| {
            invalid_setting(
                CLIENT_CERT_SETTING,
                "it contains no usable private key in PEM".into(),
            )
        })?;
        let config = builder.with_client_auth_cert(chain, key);
        config.map_err(|error| invalid_setting(CLIENT_CERT_SETTING, error.to_string()))
    }

    fn roots(&self) -> Result<RootCertStore> {
        let mut roots = RootCertStore::empty();
        match &self.ca {
            Some(ca) => {
                for cert in chain(ca, CA_SETTING)? {
                    roots
                        .add(cert)
                        .map_err(|error| invalid_setting(CA_SETTING, error.to_string()))?;
                }
            }
            None => {
                let found = rustls_native_certs::load_native_certs();
                for error in &found.errors {
                    tracing::debug!(%error, "a system certificate could not be read");
                }
                // One invalid certificate among a hundred must not affect the others.
                roots.add_parsable_certificates(found.certs);
                if roots.is_empty() {
                    return Err(invalid_setting(
                        CA_SETTING,
                        "it is not set, and the system has no trusted certificates".into(),
                    ));
                }
            }
        }
        Ok(roots)
    }
}

/// Reads at least one certificate.
fn chain(pem: &[u8], setting: &'static str) -> Result<Vec<CertificateDer<'static>>> {
    let chain = CertificateDer::pem_slice_iter(pem).collect::<std::result::Result<Vec<_>, _>>();
    let chain = chain.unwrap_or_default();
    match chain.is_empty() {
        true => Err(invalid_setting(
            setting,
            "it contains no certificate in PEM".into(),
        )),
        false => Ok(chain),
    }
}

fn invalid_setting(setting: &'static str, reason: String) -> Error {
    Error::InvalidSetting { setting, reason }
}

/// Returns a text that explains a TLS error and what to do.
fn describe_tls_error(tls: &TlsError, host: &str, has_certificate: bool) -> String {
    match tls {
        TlsError::InvalidCertificate(problem) => {
            let problem = match problem {
                CertificateError::UnknownIssuer => {
                    "was not issued by a trusted CA (builder setting `tls_ca`)".into()
                }
                CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                    "has expired".into()
                }
                CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                    "is not valid yet; check the clock".into()
                }
                CertificateError::NotValidForName => format!("is not for {host}"),
                CertificateError::NotValidForNameContext { presented, .. } => {
                    match presented.is_empty() {
                        true => format!("is not for {host}: it has no subjectAltName"),
                        false => {
                            let presented = presented.join(", ");
                            format!(
                                "is not for {host}, but for {presented} (builder setting `tls_server_name`)"
                            )
                        }
                    }
                }
                other => format!("was rejected: {other}"),
            };
            format!("the server's certificate {problem}")
        }
        TlsError::AlertReceived(
            AlertDescription::CertificateRequired
            | AlertDescription::HandshakeFailure
            | AlertDescription::BadCertificate
            | AlertDescription::UnsupportedCertificate
            | AlertDescription::CertificateRevoked
            | AlertDescription::CertificateExpired
            | AlertDescription::CertificateUnknown
            | AlertDescription::UnknownCA
            | AlertDescription::AccessDenied,
        ) => match has_certificate {
            true => format!("the server rejected the client certificate: {tls}"),
            false => format!(
                "the server requires a client certificate (builder setting `tls_client_cert`): \
                 {tls}"
            ),
        },
        TlsError::InvalidMessage(_) => {
            format!(
                "the server does not speak TLS on this port: {tls}; use redis://, or its TLS port"
            )
        }
        other => other.to_string(),
    }
}

/// Returns the TLS error in an error of a TLS stream.
fn tls_error(error: &io::Error) -> Option<&TlsError> {
    error.get_ref()?.downcast_ref()
}
