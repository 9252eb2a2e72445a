//! What a server reports about itself (HELLO), and whether it is supported.

use std::sync::Arc;

use super::connection::ReconnectingConnection;
use super::exchange_error::ExchangeError;
use super::pubsub::text_field;
use super::wire::Cmd;
use crate::error::{Error, Result};
use crate::step::{ScriptReply, unexpected_reply};

/// What a server reports about itself.
pub(super) struct ServerInfo {
    /// `redis` or `valkey`; empty if it is not reported.
    server: String,
    major_minor: (u32, u32),
    /// Its role in the deployment: `standalone`, `cluster` or `sentinel`.
    mode: String,
}

impl ServerInfo {
    /// Queries the server once, and checks its version.
    pub(super) async fn fetch(
        connection: &Arc<ReconnectingConnection>,
    ) -> Result<ServerInfo, ExchangeError> {
        let live = connection.get_or_connect().await?;
        let hello = connection.query(&live, &Cmd::of(&["HELLO", "3"])).await?;
        let info = ServerInfo::from_hello(&hello)?;
        // The oldest with all that is needed, RESP3 and the commands in use. Valkey started at 7.2.
        if info.server == "redis" && info.major_minor < (6, 2) {
            let (major, minor) = info.major_minor;
            let reason = format!("it is redis {major}.{minor}");
            return Err(Error::UnsupportedServer { reason }.into());
        }
        Ok(info)
    }

    fn from_hello(hello: &ScriptReply) -> Result<ServerInfo> {
        if hello.elements().is_none() {
            return Err(unexpected_reply(hello));
        }
        let field = |name| text_field(hello, name).unwrap_or_default();
        let version = field("version");
        let mut parts = version
            .split('.')
            .map_while(|part| part.parse::<u32>().ok());
        tracing::debug!(server = field("server"), version, "connected to the store");
        Ok(ServerInfo {
            server: field("server").to_owned(),
            // A server without a version counts as new.
            major_minor: (parts.next().unwrap_or(u32::MAX), parts.next().unwrap_or(0)),
            mode: field("mode").to_owned(),
        })
    }

    /// Checks that this is a data server outside of a cluster.
    pub(super) fn check_standalone(&self) -> Result<()> {
        let reason = match &*self.mode {
            // It would refuse keys of other nodes' slots one by one, some of them after hours.
            "cluster" => "it is a node of a cluster; connect with redis+cluster://",
            // It cannot run scripts.
            "sentinel" => {
                "it is a sentinel; connect with redis+sentinel://host:port/name-of-the-master"
            }
            _ => return Ok(()),
        };
        Err(Error::UnsupportedServer {
            reason: reason.into(),
        })
    }

    /// Checks that this is a node of a cluster.
    pub(super) fn check_cluster_node(&self) -> Result<()> {
        match &*self.mode {
            "cluster" => Ok(()),
            _ => Err(Error::UnsupportedServer {
                reason: "it is not in a cluster; connect with redis:// or redis+sentinel://".into(),
            }),
        }
    }
}
