//! Redis and Valkey: runs steps as scripts on the server that serves their keys.
//!
//! 1. `Topology` finds the node of the step's first key: the single server, the master that the
//!    sentinels name, or the owner of the slot in a cluster.
//! 2. An attempt to acquire waits for a permit at that node (`attempt_limiter`), as does a waiter
//!    that only inspects an object. Renewals and releases do not queue.
//! 3. The script is sent by SHA (EVALSHA), and in full (EVAL) if the server replies NOSCRIPT.
//! 4. A subscription is sent before the script, and WAIT for the replicas behind it, in the same
//!    round trip.
//! 5. Redirections (MOVED, ASK) are followed within one exchange. Other failures make the topology
//!    check which server to use.
//! 6. A step that can be repeated is repeated on a new connection until the response timeout. A
//!    step that must not be applied twice is repeated only while it is known to have had no effect.
//!
//! The files, from the top down:
//!
//! ```text
//! exchange                    one command: sent, redirected, repeated until its deadline
//! reporters  server_report    connections that report changed keys · facts about servers
//! topology                    which server has a key
//! sentinel  master_view         the master, as the sentinels name it
//! cluster  node_ids  slot       the owners of the slots · which nodes belong to the cluster
//! refresh_task                watches a deployment for changes
//! node  replicas              the connections to one server · acknowledgments of its replicas
//! connection  pubsub          one connection, opened on demand · its channels
//! run_id_tracker  server_info whether the server process has changed · its version
//! capabilities  tracking      what a server can do, as its answers have shown
//! connector  tls              how a connection is made
//! wire                        one socket, many callers: pipeline, codec, stream
//! connection_config  url  options  credentials  endpoint  address_map  redis_client
//! exchange_error  pace        errors and retries · pauses in an outage
//! ```

use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

pub(crate) use self::address_map::AddressMap;
pub use self::credentials::Credentials;
pub(crate) use self::credentials::{Password, Provider};
pub(super) use self::exchange::CommandRequest;
use self::exchange::{PooledCmd, RawAnswer};
use self::exchange_error::ExchangeError;
use self::node::{Node, NodeSettings};
use self::options::ConnectOptions;
pub use self::options::ReplicaSync;
pub(crate) use self::reporters::Reporters;
pub use self::server_report::{SentinelReport, ServerReport};
pub(super) use self::slot::slot;
pub(super) use self::topology::Topology;
pub(crate) use self::url::EMBEDDED;
pub use self::url::PublicUrl;
use self::url::{Deployment, ParsedUrl};
use super::{Cursor, Delivery, Progress, ScanType, SharedSubscriber, Suspects};
use crate::error::{Error, Result};
use crate::join::Boxed;
use crate::step::{ScriptReply, Step, unexpected_reply};

mod address_map;
mod capabilities;
mod cluster;
mod connection;
mod connection_config;
mod connector;
mod credentials;
mod endpoint;
mod exchange;
mod exchange_error;
mod master_view;
mod node;
mod node_ids;
pub(crate) mod options;
mod pace;
mod pubsub;
#[cfg(feature = "redis")]
pub(crate) mod redis_client;
mod refresh_task;
#[cfg(test)]
mod refusing_proxy;
mod replicas;
mod reporters;
mod run_id_tracker;
mod sentinel;
mod server_info;
mod server_report;
mod slot;
#[cfg(feature = "tls")]
mod tls;
mod topology;
mod tracking;
mod url;
mod wire;

/// Keys that SCAN inspects per round trip.
const SCAN_COUNT: usize = 500;

pub(crate) struct Redis {
    pub(super) topology: Topology,
    subscriber: SharedSubscriber,
    pub(super) suspects: Arc<Suspects>,
    pub(super) response_timeout: Duration,
}

impl Redis {
    /// Connects, and checks that the servers are supported. Boxed, so that a program does not
    /// compile its own copy.
    pub(crate) fn connect<'a>(
        url: &'a str,
        options: &'a ConnectOptions,
        subscriber: SharedSubscriber,
    ) -> Boxed<'a, Result<Redis>> {
        Box::pin(async move {
            let (deployment, settings) = node_settings(url, options, subscriber)?;
            // Not repeated: a program that starts up should get the error at once. If no connection
            // can be made, the connect timeout reports that.
            let limits = settings.redis;
            let limit = limits
                .connect_timeout
                .saturating_add(limits.response_timeout);
            let connecting = Topology::connect(deployment, settings.clone());
            let topology = with_response_timeout(limit, connecting).await?;
            Ok(Redis::new(topology, settings))
        })
    }

    /// Creates the store without a connection: the first step makes it. It counts the replicas of a
    /// single server for each acquisition, because it does not know yet whether there are any.
    pub(crate) fn connect_lazy(
        url: &str,
        options: &ConnectOptions,
        subscriber: SharedSubscriber,
    ) -> Result<Redis> {
        let (deployment, settings) = node_settings(url, options, subscriber)?;
        let topology = Topology::new(deployment, settings.clone());
        Ok(Redis::new(topology, settings))
    }

    fn new(topology: Topology, settings: NodeSettings) -> Redis {
        Redis {
            topology,
            subscriber: settings.subscriber,
            suspects: settings.suspects,
            response_timeout: settings.redis.response_timeout,
        }
    }

    /// Returns a future that runs a step, and completes with the answer to
    /// [decode](RawAnswer::decode).
    pub(crate) fn run<'a, R: Send>(
        &'a self,
        step: &'a Step<'_, R>,
        channel: Option<&'a str>,
        delivery: Delivery,
        progress: &'a Progress,
    ) -> Result<Boxed<'a, Result<RawAnswer>>> {
        let request = CommandRequest::for_step(&self.topology, step, channel, delivery, progress)?;
        let sending = request.send_with_retries(self.response_timeout);
        Ok(match channel {
            None => sending,
            // Boxed again, so that steps without a subscription do not keep a channel.
            Some(channel) => Box::pin(async move {
                let ends = self.subscriber.subscription_ends(channel);
                let answer = sending.await?;
                self.subscriber.on_subscribed(channel, ends);
                Ok(answer)
            }),
        })
    }

    /// Returns the error for a request for this key that had no contact with the store for this
    /// long.
    pub(crate) fn timeout_error(&self, key: &str, after: Duration) -> Error {
        exchange_error::timeout_error(after, self.topology.timeout_hint(key))
    }

    pub(crate) async fn unsubscribe(&self, channel: &str) -> Result<()> {
        let unsubscribing = self.topology.unsubscribe(channel);
        with_response_timeout(self.response_timeout, unsubscribing).await
    }

    /// Returns the nodes that serve keys.
    async fn masters(&self) -> Result<Vec<Arc<Node>>> {
        self.topology.check_callable()?;
        with_response_timeout(self.response_timeout, self.topology.masters()).await
    }

    /// Sends a command to a node, and returns its answer.
    async fn ask(&self, node: &Arc<Node>, words: &[&str]) -> Result<ScriptReply> {
        let progress = Progress::default();
        let mut cmd = PooledCmd::new(words[0]);
        words[1..].iter().for_each(|word| cmd.text(word));
        let mut request = CommandRequest::new(&self.topology, cmd, &progress);
        (request.node, request.delivery) = (Some(node), Delivery::REQUEST);
        let answer = request.send_with_retries(self.response_timeout).await?;
        Ok(answer.reply)
    }

    /// Returns whether there is a connection to a node that serves keys.
    pub(crate) fn is_connected(&self) -> bool {
        let nodes = self.topology.known_masters();
        let mut connections = nodes.iter().flat_map(|node| node.connections());
        connections.any(|connection| connection.is_connected())
    }

    /// Returns one page of keys. Visits one node after the other.
    pub(crate) async fn scan(
        &self,
        pattern: &str,
        scan_type: ScanType,
        cursor: Cursor,
    ) -> Result<(Vec<String>, Option<Cursor>)> {
        let nodes = self.masters().await?;
        let Some(node) = nodes.get(cursor.node) else {
            return Ok((Vec::new(), None));
        };
        let scan_type = match scan_type {
            ScanType::Hashes => "hash",
            ScanType::Strings => "string",
            ScanType::Lists => "list",
        };
        let (at, count) = (cursor.key.to_string(), SCAN_COUNT.to_string());
        let scan = [
            "SCAN", &at, "MATCH", pattern, "COUNT", &count, "TYPE", scan_type,
        ];
        let answer = self.ask(node, &scan).await?;
        let [next, keys] = answer.array()?;
        let next = match next.as_text().and_then(|next| next.parse().ok()) {
            Some(next) => next,
            None => return Err(unexpected_reply(&next)),
        };
        let keys = keys.list()?.into_iter();
        // Names are text. A key that is not UTF-8 belongs to neither redlatch nor Redisson.
        let keys = keys.filter_map(|key| match key {
            ScriptReply::Bytes(key) => String::from_utf8(key).ok(),
            _ => None,
        });
        let keys = keys.collect();
        let next = match next {
            0 => Cursor {
                node: cursor.node + 1,
                key: 0,
            },
            key => Cursor { key, ..cursor },
        };
        Ok((keys, (next.node < nodes.len()).then_some(next)))
    }
}

/// Returns the servers that a URL names, and how to use them.
fn node_settings(
    url: &str,
    options: &ConnectOptions,
    subscriber: SharedSubscriber,
) -> Result<(Deployment, NodeSettings)> {
    let ParsedUrl { deployment, config } = url::parse(url, options)?;
    let redis = options.settings;
    let settings = NodeSettings {
        config,
        redis,
        subscriber,
        suspects: Arc::new(Suspects::new(redis.tracking)),
    };
    Ok((deployment, settings))
}

/// Waits for `work`, at most for `limit`.
async fn with_response_timeout<T>(
    limit: Duration,
    work: impl Future<Output = Result<T, ExchangeError>>,
) -> Result<T> {
    match timeout(limit, work).await {
        Ok(done) => done.map_err(ExchangeError::into_error),
        Err(_) => Err(Error::ResponseTimeout { after: limit }),
    }
}
