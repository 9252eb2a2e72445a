//! What a server reports about itself (HELLO), and whether it is supported.

use std::sync::Arc;

use redis::Value;

use super::connection::ReconnectingConnection;
use super::exchange_error::ExchangeError;
use crate::error::{Error, Result};
use crate::step::unexpected_reply;

/// What a server reports about itself.
pub(super) struct ServerInfo {
    /// `redis` or `valkey`; empty if it is not reported.
    server: String,
    major_minor: (u32, u32),
    mode: Mode,
}

/// Role of a server in its deployment.
#[derive(Clone, Copy)]
enum Mode {
    Standalone,
    Cluster,
    Sentinel,
}

impl ServerInfo {
    /// Queries the server once, and checks its version.
    pub(super) async fn fetch(connection: &Arc<ReconnectingConnection>) -> Result<ServerInfo> {
        let mut live = connection
            .get_or_connect()
            .await
            .map_err(ExchangeError::into_error)?;
        let hello = connection
            .query(&mut live, redis::cmd("HELLO").arg(3))
            .await;
        let info = ServerInfo::from_hello(&hello.map_err(ExchangeError::into_error)?)?;
        info.check_version()?;
        Ok(info)
    }

    fn from_hello(hello: &Value) -> Result<ServerInfo> {
        let fields = match hello {
            Value::Map(fields) => fields,
            Value::ServerError(error) => {
                return Err(ExchangeError::from_reply(error, "").into_error());
            }
            other => return Err(unexpected_reply(other)),
        };
        let field = |wanted: &str| {
            let field = fields.iter().find_map(|(name, value)| match (name, value) {
                (Value::BulkString(name), Value::BulkString(value))
                    if name == wanted.as_bytes() =>
                {
                    std::str::from_utf8(value).ok()
                }
                _ => None,
            });
            field.unwrap_or_default()
        };
        let version = field("version");
        let mut parts = version
            .split('.')
            .map_while(|part| part.parse::<u32>().ok());
        tracing::debug!(server = field("server"), version, "connected to the store");
        Ok(ServerInfo {
            server: field("server").to_owned(),
            // A server without a version counts as new.
            major_minor: (parts.next().unwrap_or(u32::MAX), parts.next().unwrap_or(0)),
            mode: match field("mode") {
                "cluster" => Mode::Cluster,
                "sentinel" => Mode::Sentinel,
                _ => Mode::Standalone,
            },
        })
    }

    /// Checks the version: 6.2 is the oldest with all that is needed, RESP3 and the commands in use. Valkey
    /// started at 7.2.
    fn check_version(&self) -> Result<()> {
        if self.server == "redis" && self.major_minor < (6, 2) {
            let (major, minor) = self.major_minor;
            return Err(Error::UnsupportedServer {
                reason: format!("it is redis {major}.{minor}"),
            });
        }
        Ok(())
    }

    /// Checks that this is a data server outside of a cluster.
    pub(super) fn check_standalone(&self) -> Result<()> {
        let reason = match self.mode {
            Mode::Standalone => return Ok(()),
            // It would refuse keys of other nodes' slots one by one, some of them after hours.
            Mode::Cluster => "it is a node of a cluster; connect with redis+cluster://",
            // It cannot run scripts.
            Mode::Sentinel => {
                "it is a sentinel; connect with redis+sentinel://host:port/name-of-the-master"
            }
        };
        Err(Error::UnsupportedServer {
            reason: reason.into(),
        })
    }

    /// Checks that this is a node of a cluster.
    pub(super) fn check_cluster_node(&self) -> Result<()> {
        match self.mode {
            Mode::Cluster => Ok(()),
            Mode::Standalone | Mode::Sentinel => Err(Error::UnsupportedServer {
                reason: "it is not in a cluster; connect with redis:// or redis+sentinel://".into(),
            }),
        }
    }

    /// Returns whether the server supports SPUBLISH and SSUBSCRIBE, added in Redis 7.0.
    pub(super) fn supports_sharded_pubsub(&self) -> bool {
        self.server != "redis" || self.major_minor >= (7, 0)
    }
}
