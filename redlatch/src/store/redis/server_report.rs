//! What the servers of a store say about themselves, for `redlatch doctor`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::time::timeout;

use super::Redis;
use super::exchange_error::ExchangeError;
use super::node::Node;
use super::pubsub::text_field;
use super::replicas::replicas_in;
use super::run_id_tracker::info_fields;
use crate::error::{Error, Result};
use crate::join::join_all;
use crate::step::{ScriptReply, unexpected_reply};

/// Number of round trips that are measured.
const ROUND_TRIPS: usize = 10;

/// What one server that serves keys says about itself. An error is its refusal to say it. For the `redlatch` command, not
/// part of the public interface.
#[derive(Debug, Clone)]
pub struct ServerReport {
    /// Host and port.
    pub address: String,
    /// The shortest of some round trips.
    pub round_trip: Duration,
    /// The fields of INFO.
    pub info: Result<BTreeMap<String, String>>,
    /// How far its clock is ahead of the local one, in milliseconds.
    pub clock_ahead_millis: Result<i64>,
    /// Number of connected replicas.
    pub replicas: Result<usize>,
    /// The commands and the keys of the default user, as ACL rules, if the server has an append-only file and tells.
    pub default_user: Option<[String; 2]>,
}

/// What one sentinel says. For the `redlatch` command, not part of the public interface.
#[derive(Debug, Clone)]
pub struct SentinelReport {
    /// Host and port.
    pub address: String,
    /// The master that it names; `None` if it knows none with that name.
    pub master: Result<Option<String>>,
}

impl Redis {
    /// Asks each sentinel, if there are any, which master it names.
    pub(crate) async fn sentinel_reports(&self) -> Result<Vec<SentinelReport>> {
        self.topology.check_callable()?;
        Ok(self.topology.sentinel_reports().await)
    }

    /// Asks each node that serves keys what it says about itself.
    pub(crate) async fn server_reports(&self) -> Result<Vec<ServerReport>> {
        let nodes = self.masters().await?;
        let reports = join_all(nodes.iter().map(|node| self.server_report(node))).await;
        reports.into_iter().collect()
    }

    /// Waits for an answer of each node that serves keys.
    pub(crate) async fn ping(&self) -> Result<()> {
        self.topology.check_callable()?;
        let pinging = async {
            let nodes = self.masters().await?;
            let answers = join_all(nodes.iter().map(|node| self.ping_node(node))).await;
            answers.into_iter().collect()
        };
        let limit = self.response_timeout;
        let answered = timeout(limit, pinging).await;
        answered.unwrap_or(Err(Error::ResponseTimeout { after: limit }))
    }

    async fn ping_node(&self, node: &Arc<Node>) -> Result<()> {
        self.answer(node, "PING").await.map(drop)
    }

    /// Waits for an answer, which may be a refusal: what users may call differs.
    async fn answer(&self, node: &Arc<Node>, command: &str) -> Result<Result<ScriptReply>> {
        match self.ask(node, &[command]).await {
            // Not of the handshake.
            Err(refusal @ (Error::NotPermitted { .. } | Error::Refused { .. }))
                if node.commands.is_connected() =>
            {
                Ok(Err(refusal))
            }
            answer => answer.map(Ok),
        }
    }

    async fn server_report(&self, node: &Arc<Node>) -> Result<ServerReport> {
        let mut fastest = self.time(node).await?;
        for _ in 1..ROUND_TRIPS {
            let next = self.time(node).await?;
            if next.0 < fastest.0 {
                fastest = next;
            }
        }
        let (round_trip, clock_ahead_millis) = fastest;
        let info = self.ask(node, &["INFO"]).await;
        let info: Result<BTreeMap<_, _>> = info.and_then(|info| match info.as_text() {
            Some(text) => {
                let owned = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
                Ok(info_fields(text).map(owned).collect())
            }
            None => Err(unexpected_reply(&info)),
        });
        let has_aof = |info: &BTreeMap<_, _>| info.get("aof_enabled").is_some_and(|on| on == "1");
        let default_user = match &info {
            Ok(info) if has_aof(info) => self.default_user(node).await.ok().flatten(),
            _ => None,
        };
        let role = self.ask(node, &["ROLE"]).await;
        Ok(ServerReport {
            address: node.commands.address().unwrap_or_default(),
            round_trip,
            info,
            clock_ahead_millis,
            replicas: role.and_then(|role| replicas_in(&role).map_err(ExchangeError::into_error)),
            default_user,
        })
    }

    /// Asks a server for its time. Returns the duration of the round trip, and how far its clock is ahead.
    async fn time(&self, node: &Arc<Node>) -> Result<(Duration, Result<i64>)> {
        let begun = Instant::now();
        // The documented users may not call PING.
        let time = self.answer(node, "TIME").await?;
        let round_trip = begun.elapsed();
        let ahead = time.and_then(|time| clock_ahead(&time, round_trip));
        Ok((round_trip, ahead))
    }

    /// Asks a server for the rules of its default user, which servers before Redis 7 return in another form.
    async fn default_user(&self, node: &Arc<Node>) -> Result<Option<[String; 2]>> {
        let user = self.ask(node, &["ACL", "GETUSER", "default"]).await?;
        let rules = |name| text_field(&user, name).map(str::to_owned);
        Ok(rules("commands")
            .zip(rules("keys"))
            .map(<[String; 2]>::from))
    }
}

/// Returns how far the clock of the server, which has just answered with its TIME, is ahead of the local one.
fn clock_ahead(time: &ScriptReply, round_trip: Duration) -> Result<i64> {
    let part = |part: &ScriptReply| part.as_text()?.parse::<i128>().ok();
    let parts: Option<Vec<i128>> = time
        .elements()
        .and_then(|parts| parts.iter().map(part).collect());
    let Some([seconds, micros]) = parts.as_deref() else {
        return Err(unexpected_reply(time));
    };
    let local = SystemTime::now().duration_since(UNIX_EPOCH);
    let local = local.map_err(|_| Error::unavailable("the local clock is before 1970"))?;
    let answered_at = local.saturating_sub(round_trip / 2).as_micros();
    // Envoy gives all microseconds, and not those of the second.
    let ahead =
        seconds * 1_000_000 + micros % 1_000_000 - i128::try_from(answered_at).unwrap_or(i128::MAX);
    Ok(i64::try_from(ahead / 1000).unwrap_or(i64::MAX))
}
