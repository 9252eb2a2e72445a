//! What a server reports about itself when a connection is made (HELLO), and whether it is supported.

use super::pubsub::text_field;
use crate::error::{Error, Result};
use crate::step::{ScriptReply, unexpected_reply};

/// Checks a server by its answer to HELLO. `standalone`: it must be a data server outside of a cluster.
pub(super) fn check_supported(hello: &ScriptReply, standalone: bool) -> Result<()> {
    check_version(hello)?;
    match standalone {
        true => check_standalone(hello),
        false => Ok(()),
    }
}

/// Checks the version of a server. A server or proxy without a version counts as new.
fn check_version(hello: &ScriptReply) -> Result<()> {
    if hello.elements().is_none() {
        return Err(unexpected_reply(hello));
    }
    let field = |name| text_field(hello, name).unwrap_or_default();
    let (server, version) = (field("server"), field("version"));
    tracing::debug!(server, version, "connected to the store");
    let mut parts = version
        .split('.')
        .map_while(|part| part.parse::<u32>().ok());
    let major_minor = (parts.next().unwrap_or(u32::MAX), parts.next().unwrap_or(0));
    // The oldest with all that is needed, RESP3 and the commands in use. Valkey started at 7.2.
    // A sentinel may be older than its servers.
    let is_data_server = text_field(hello, "mode") != Some("sentinel");
    match server == "redis" && is_data_server && major_minor < (6, 2) {
        true => unsupported(&format!("it is redis {version}")),
        false => Ok(()),
    }
}

/// Checks that this is a data server outside of a cluster.
fn check_standalone(hello: &ScriptReply) -> Result<()> {
    match text_field(hello, "mode") {
        // It would refuse keys of other nodes' slots one by one, some of them after hours.
        Some("cluster") => unsupported("it is a node of a cluster; connect with redis+cluster://"),
        // It cannot run scripts.
        Some("sentinel") => unsupported(
            "it is a sentinel; connect with redis+sentinel://host:port/name-of-the-master",
        ),
        _ => Ok(()),
    }
}

fn unsupported(reason: &str) -> Result<()> {
    let reason = reason.to_owned();
    Err(Error::UnsupportedServer { reason })
}
