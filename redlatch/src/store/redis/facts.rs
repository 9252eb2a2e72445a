//! What a server says of itself (HELLO), and whether that is one that we can work with.

use std::sync::Arc;

use redis::Value;

use super::fault::Fault;
use super::link::Link;
use crate::error::{Error, Result};
use crate::step::unexpected;

pub(super) struct Facts {
    /// `redis`, `valkey`; empty if it does not say.
    server: String,
    major_minor: (u32, u32),
    mode: Mode,
}

/// What a server is there for.
#[derive(Clone, Copy)]
enum Mode {
    Alone,
    InACluster,
    Sentinel,
}

/// The id of the server's process, out of INFO.
pub(super) fn run_id(info: Value) -> Option<String> {
    let info: String = redis::from_redis_value(info).ok()?;
    let lines = info.lines().filter_map(|line| line.split_once(':'));
    let mut run_ids = lines.filter(|(name, _)| *name == "run_id");
    run_ids.next().map(|(_, id)| id.trim().to_owned())
}

impl Facts {
    /// Asks once.
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
            // Who does not say is taken to be new.
            major_minor: (parts.next().unwrap_or(u32::MAX), parts.next().unwrap_or(0)),
            mode: match fact("mode") {
                "cluster" => Mode::InACluster,
                "sentinel" => Mode::Sentinel,
                _ => Mode::Alone,
            },
        })
    }

    /// 6.2 is the oldest that works: RESP3 with all that we ask of it. Valkey began at 7.2.
    fn check_version(&self) -> Result<()> {
        if self.server == "redis" && self.major_minor < (6, 2) {
            let (major, minor) = self.major_minor;
            return Err(Error::UnsupportedServer {
                reason: format!("it is redis {major}.{minor}"),
            });
        }
        Ok(())
    }

    /// A server that holds data, in no cluster.
    pub(super) fn check_alone(&self) -> Result<()> {
        let reason = match self.mode {
            Mode::Alone => return Ok(()),
            // Its slots' keys would be refused one by one, some of them after hours.
            Mode::InACluster => "it is a node of a cluster; connect with redis+cluster://",
            // It knows no scripts.
            Mode::Sentinel => {
                "it is a sentinel; connect with redis+sentinel://host:port/name-of-the-master"
            }
        };
        Err(Error::UnsupportedServer {
            reason: reason.into(),
        })
    }

    /// A node of a cluster.
    pub(super) fn check_cluster(&self) -> Result<()> {
        match self.mode {
            Mode::InACluster => Ok(()),
            Mode::Alone | Mode::Sentinel => Err(Error::UnsupportedServer {
                reason: "it is in no cluster; connect with redis:// or redis+sentinel://".into(),
            }),
        }
    }

    /// SPUBLISH and SSUBSCRIBE came with Redis 7.0.
    pub(super) fn knows_sharded_channels(&self) -> bool {
        self.server != "redis" || self.major_minor >= (7, 0)
    }
}
