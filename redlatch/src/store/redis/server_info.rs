//! What a server reports about itself when a connection is made, and whether it is supported.

use super::pubsub::text_field;
use super::run_id_tracker::info_field;
use crate::error::{Error, Result};
use crate::step::{ScriptReply, unexpected_reply};

/// What a server reports. What it does not report is empty.
#[derive(Debug, Default)]
pub(super) struct ServerInfo<'a> {
    server: &'a str,
    version: &'a str,
    mode: &'a str,
}

impl<'a> ServerInfo<'a> {
    /// Reads the answer to HELLO.
    pub(super) fn from_hello(hello: &'a ScriptReply) -> Result<ServerInfo<'a>> {
        if hello.elements().is_none() {
            return Err(unexpected_reply(hello));
        }
        let field = |name| text_field(hello, name).unwrap_or_default();
        Ok(ServerInfo {
            server: field("server"),
            version: field("version"),
            mode: field("mode"),
        })
    }

    /// Reads the answer to INFO, which may be a refusal.
    pub(super) fn from_info(info: &'a ScriptReply) -> ServerInfo<'a> {
        let text = info.as_text().unwrap_or_default();
        let field = |name| info_field(text, name).unwrap_or_default();
        let (server, version, mode) = match field("valkey_version") {
            "" => ("redis", field("redis_version"), field("redis_mode")),
            version => ("valkey", version, field("server_mode")),
        };
        // A proxy with one address may say that it is a cluster (Envoy does), whatever is behind
        // it.
        let mode = if mode == "cluster" { "" } else { mode };
        ServerInfo {
            server,
            version,
            mode,
        }
    }

    /// Checks whether the server is supported. `standalone`: it must be a data server outside of a
    /// cluster.
    pub(super) fn check(&self, standalone: bool) -> Result<()> {
        self.check_version()?;
        match standalone {
            true => check_standalone(self.mode),
            false => Ok(()),
        }
    }

    /// Checks the version of a server. A server or proxy without a version counts as new.
    fn check_version(&self) -> Result<()> {
        let ServerInfo {
            server,
            version,
            mode,
        } = *self;
        tracing::debug!(server, version, "connected to the store");
        let mut parts = version
            .split('.')
            .map_while(|part| part.parse::<u32>().ok());
        let major_minor = (parts.next().unwrap_or(u32::MAX), parts.next().unwrap_or(0));
        // The oldest with all commands in use. Valkey started at 7.2. A sentinel may be older than
        // its servers.
        match server == "redis" && mode != "sentinel" && major_minor < (6, 2) {
            true => unsupported(&format!("it is redis {version}")),
            false => Ok(()),
        }
    }
}

/// Checks that a server in this mode is a data server outside of a cluster.
fn check_standalone(mode: &str) -> Result<()> {
    match mode {
        // It would refuse keys of other nodes' slots one by one, some of them after hours.
        "cluster" => unsupported("it is a node of a cluster; connect with redis+cluster://"),
        // It cannot run scripts.
        "sentinel" => unsupported(
            "it is a sentinel; connect with redis+sentinel://host:port/name-of-the-master",
        ),
        _ => Ok(()),
    }
}

fn unsupported(reason: &str) -> Result<()> {
    let reason = reason.to_owned();
    Err(Error::UnsupportedServer { reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn info_tells_what_hello_does_not() {
        for (text, refused) in [
            ("redis_version:7.0.15\r\nredis_mode:standalone\r\n", None),
            (
                "redis_version:5.0.14\r\nredis_mode:standalone\r\n",
                Some("redis 5.0.14"),
            ),
            // Envoy.
            ("redis_version:7.0.15\r\nredis_mode:cluster\r\n", None),
            // A service, or an imitation.
            ("uptime_in_seconds:1\r\n", None),
            (
                "redis_version:7.2.4\r\nserver_name:valkey\r\nvalkey_version:9.1.2\r\nserver_mode:sentinel\r\n",
                Some("sentinel"),
            ),
        ] {
            let info = text.into();
            let checked = ServerInfo::from_info(&info).check(true);
            let error = checked.err().map(|error| error.to_string());
            let as_expected = match refused {
                Some(refused) => error.as_ref().is_some_and(|error| error.contains(refused)),
                None => error.is_none(),
            };
            assert!(as_expected, "{text:?}: {error:?}");
        }
        // A user without permission.
        let refusal = ScriptReply::error("NOPERM no");
        ServerInfo::from_info(&refusal).check(true).unwrap();
    }
}
