//! The URL of a server, understood without ever repeating what could be secret in it.

use std::time::Duration;

use redis::io::tcp::{TcpSettings, socket2::TcpKeepalive};
use redis::{ConnectionInfo, IntoConnectionInfo, ProtocolVersion};

use crate::error::{Error, Result};

/// How long the kernel may go without hearing from the server before it calls the connection
/// broken. Without it a server that vanished (no RST) would hold the one connection for minutes;
/// a server that is merely stopped still acknowledges and is not affected.
const SILENCE: Duration = Duration::from_secs(10);

/// Schemes and what to say of those that do not work.
fn check_scheme(url: &str) -> Result<()> {
    let invalid = |reason: String| Err(Error::InvalidUrl { reason });
    let Some((scheme, _)) = url.split_once(':') else {
        return invalid("it has no scheme; write redis://host:port".into());
    };
    match scheme {
        "redis" | "valkey" | "redis+unix" | "valkey+unix" | "unix" => Ok(()),
        "rediss" | "valkeys" => {
            invalid("TLS is not supported yet; take redis:// or redis+unix://".into())
        }
        "redis+sentinel" | "redis+cluster" => {
            invalid("Sentinel and Cluster are not supported yet; take redis://".into())
        }
        other
            if url.contains("://") && other.chars().all(|c| c.is_ascii_lowercase() || c == '+') =>
        {
            invalid(format!(
                "unknown scheme {other:?}; take redis://, redis+unix:// or embedded:"
            ))
        }
        _ => invalid("it has no known scheme; write redis://host:port".into()),
    }
}

/// What the client library needs to connect: RESP3, our name for CLIENT LIST, and sockets that
/// notice a vanished server.
pub(super) fn connection_info(url: &str) -> Result<ConnectionInfo> {
    check_scheme(url)?;
    let info = url.into_connection_info().map_err(|e| Error::InvalidUrl {
        reason: e.to_string(),
    })?;
    let settings = info
        .redis_settings()
        .clone()
        .set_protocol(ProtocolVersion::RESP3)
        .set_lib_name("redlatch", env!("CARGO_PKG_VERSION"));
    let keepalive = TcpKeepalive::new()
        .with_time(SILENCE / 2)
        .with_interval(SILENCE / 4);
    let tcp = TcpSettings::default()
        .set_nodelay(true)
        .set_keepalive(keepalive);
    #[cfg(target_os = "linux")]
    let tcp = tcp.set_user_timeout(SILENCE);
    Ok(info.set_redis_settings(settings).set_tcp_settings(tcp))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_urls_are_refused_without_repeating_secrets() {
        for url in [
            "http://user:secret@host",
            "user:secret@host:6379",
            "secret",
            "",
            "rediss://:secret@host",
            "redis+cluster://:secret@a,b",
            "redis://:secret@host:notaport",
            "redis://:secret@host/notadb",
            "redis://:secret@",
            "redis://:secret@host/?protocol=9",
        ] {
            let error = connection_info(url).unwrap_err();
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
            connection_info(url).unwrap();
        }
    }
}
