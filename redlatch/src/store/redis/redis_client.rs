//! The settings of a client of the crate `redis`, as a URL: so `url` checks and applies them as any others.
//!
//! A setting that decides which server, user or database is used takes effect, or is refused with an error that names it. Settings of
//! sockets do not count, because the sockets are not shared, nor does the protocol: each connection uses RESP3 if the
//! server has it.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use redis::ConnectionAddr;

use super::endpoint::Endpoint;
use super::options::ConnectOptions;
use crate::error::{Error, Result};

/// What is encoded in the path of a socket.
const IN_PATH: &AsciiSet = &NON_ALPHANUMERIC.remove(b'/');

/// Returns the URL, with the password. `options`: those of the builder, which may have certificates.
pub(crate) fn url_of(client: &redis::Client, options: &ConnectOptions) -> Result<String> {
    let info = client.get_connection_info();
    let settings = info.redis_settings();
    let encoded = |text: Option<&str>| {
        utf8_percent_encode(text.unwrap_or_default(), NON_ALPHANUMERIC).to_string()
    };
    let (user, password) = (encoded(settings.username()), encoded(settings.password()));
    let db = settings.db();
    let tcp = |scheme, host: &str, port| {
        // Else a part of the host could count as another part of the URL.
        let host = Endpoint::new(host, port);
        if Endpoint::parse(&host.to_string(), port).as_ref() != Some(&host) {
            return unsupported("addr", &format!("the host or port of {host} is invalid"));
        }
        Ok(format!("{scheme}://{user}:{password}@{host}/?db={db}"))
    };
    match info.addr() {
        ConnectionAddr::Tcp(host, port) => tcp("redis", host, *port),
        ConnectionAddr::TcpTls { insecure: true, .. } => unsupported(
            "insecure",
            "redlatch always verifies the server's certificate; to trust your own CA, connect \
             without `insecure`, and use the builder setting `tls_ca`",
        ),
        ConnectionAddr::TcpTls {
            tls_params: Some(_),
            ..
        } if options.tls.ca.is_none() && options.tls.client.is_none() => unsupported(
            "tls_params",
            "the certificates of a `redis::Client` cannot be read; set them again on the builder: \
             `tls_ca`, `tls_client_cert`",
        ),
        ConnectionAddr::TcpTls { host, port, .. } => tcp("rediss", host, *port),
        ConnectionAddr::Unix(path) => match path.to_str() {
            Some(path) => {
                let path = utf8_percent_encode(path, IN_PATH);
                Ok(format!(
                    "redis+unix://{path}?user={user}&pass={password}&db={db}"
                ))
            }
            None => unsupported("addr", "the path of its socket is not UTF-8"),
        },
        _ => unsupported("addr", "redlatch does not know this kind of address"),
    }
}

fn unsupported(setting: &'static str, reason: &str) -> Result<String> {
    let reason = reason.to_owned();
    Err(Error::InvalidSetting { setting, reason })
}
