//! What a server reports about itself (HELLO), and whether it is supported.

use std::sync::Arc;

use redis::Value;

use super::fault::Fault;
use super::link::Link;
use crate::error::{Error, Result};
use crate::step::unexpected;

pub(super) struct Facts {
    /// `redis` or `valkey`; empty if it is not reported.
    server: String,
    major_minor: (u32, u32),
    mode: Mode,
}

/// Role of a server in its deployment.
#[derive(Clone, Copy)]
enum Mode {
    Alone,
    InACluster,
    Sentinel,
}

/// Extracts the run id of the server process from the reply to INFO.
pub(super) fn run_id(info: Value) -> Option<String> {
    let info: String = redis::from_redis_value(info).ok()?;
    let lines = info.lines().filter_map(|line| line.split_once(':'));
    let mut run_ids = lines.filter(|(name, _)| *name == "run_id");
    run_ids.next().map(|(_, id)| id.trim().to_owned())
}

impl Facts {
    /// Asks once, and checks the version.
    pub(super) async fn of(link: &Arc<Link>) -> Result<Facts> {
        let mut live = link.live().await.map_err(Fault::into_error)?;
        let hello = link.ask(&mut live, redis::cmd("HELLO").arg(3)).await;
        let facts = Facts::read(&hello.map_err(Fault::into_error)?)?;
        facts.check_version()?;
        Ok(facts)
    }

    fn read(hello: &Value) -> Result<Facts> {
        let facts = match hello {
            Value::Map(facts) => facts,
            Value::ServerError(error) => return Err(Fault::answered(error, "").into_error()),
            other => return Err(unexpected(other)),
        };
        let fact = |wanted: &str| {
            let fact = facts.iter().find_map(|(name, value)| match (name, value) {
                (Value::BulkString(name), Value::BulkString(value))
                    if name == wanted.as_bytes() =>
                {
                    std::str::from_utf8(value).ok()
                }
                _ => None,
            });
            fact.unwrap_or_default()
        };
        let version = fact("version");
        let mut parts = version
            .split('.')
            .map_while(|part| part.parse::<u32>().ok());
        tracing::debug!(server = fact("server"), version, "connected to the store");
        Ok(Facts {
            server: fact("server").to_owned(),
            // A server without a version counts as new.
            major_minor: (parts.next().unwrap_or(u32::MAX), parts.next().unwrap_or(0)),
            mode: match fact("mode") {
                "cluster" => Mode::InACluster,
                "sentinel" => Mode::Sentinel,
                _ => Mode::Alone,
            },
        })
    }

    /// 6.2 is the oldest version with all that is needed: RESP3 and the commands in use. Valkey started at
    /// 7.2.
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
    pub(super) fn check_alone(&self) -> Result<()> {
        let reason = match self.mode {
            Mode::Alone => return Ok(()),
            // It would refuse keys of other nodes' slots one by one, some of them after hours.
            Mode::InACluster => "it is a node of a cluster; connect with redis+cluster://",
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
    pub(super) fn check_cluster(&self) -> Result<()> {
        match self.mode {
            Mode::InACluster => Ok(()),
            Mode::Alone | Mode::Sentinel => Err(Error::UnsupportedServer {
                reason: "it is not in a cluster; connect with redis:// or redis+sentinel://".into(),
            }),
        }
    }

    /// Returns whether the server supports SPUBLISH and SSUBSCRIBE, added in Redis 7.0.
    pub(super) fn knows_sharded_channels(&self) -> bool {
        self.server != "redis" || self.major_minor >= (7, 0)
    }
}
