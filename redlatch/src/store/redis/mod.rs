//! Redis and Valkey: runs steps as scripts on the server that serves their keys.
//!
//! 1. `Topology` finds the node of the step's first key: the single server, the master that the sentinels
//!    name, or the owner of the slot in a cluster.
//! 2. An attempt to acquire waits for a permit at that node (`attempt_limiter`). Renewals, releases and
//!    inspections do not queue.
//! 3. The script is sent by SHA (EVALSHA), and in full (EVAL) if the server replies NOSCRIPT.
//! 4. A subscription is sent before the script, and WAIT for the replicas behind it, in the same round
//!    trip.
//! 5. Redirections (MOVED, ASK) are followed within one exchange. Other failures make the topology check
//!    which server to use.
//! 6. A step that can be repeated is repeated on a new connection until the response timeout. A step that
//!    must not be applied twice is repeated only while it is known to have had no effect.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Value};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, timeout, timeout_at};

pub(crate) use self::attempt_limiter::{AttemptLimiter, AttemptPermit};
use self::connection::{Connection, LiveConnection};
use self::exchange_error::{ExchangeError, Retry};
use self::node::Node;
use self::options::ConnectOptions;
pub(crate) use self::replicas::Confirmation;
pub use self::replicas::ReplicaSync;
use self::replicas::Replicas;
pub(crate) use self::topology::RedisSettings;
use self::topology::Topology;
use super::{
    Answer, Cursor, Delivery, NodeId, Progress, Route, ScanType, ServerId, SharedSubscriber,
    SuspectNodes,
};
use crate::Boxed;
use crate::error::{Error, Result};
use crate::step::{Args, Step, script_error};

mod attempt_limiter;
mod cluster;
mod connection;
mod connection_config;
mod connector;
mod exchange_error;
mod node;
pub(crate) mod options;
mod pubsub;
mod refresh_task;
mod replicas;
mod sentinel;
mod server_info;
mod shared_oneshot;
mod slot;
#[cfg(feature = "tls")]
mod tls;
mod topology;
mod url;

/// Keys that SCAN inspects per round trip.
const SCAN_COUNT: usize = 500;

/// Limit of consecutive redirections in a cluster.
const MAX_REDIRECTIONS: usize = 8;

pub(crate) struct Redis {
    topology: Topology,
    suspect_nodes: Arc<SuspectNodes>,
    response_timeout: Duration,
}

/// One command with everything needed to send it and to decode its reply.
struct Exchange<'a> {
    cmd: Cmd,
    /// Builds the command to send if the server does not know the script.
    eval_fallback: Option<&'a (dyn Fn() -> Cmd + Sync)>,
    /// The key that determines the node and is named in errors.
    key: &'a str,
    /// The node, if it is not determined by the key.
    node: Option<&'a Arc<Node>>,
    /// The channel to subscribe to first.
    channel: Option<&'a str>,
    /// Records that the command was sent.
    progress: Option<&'a Progress>,
    delivery: Delivery,
    /// Whether the script may access more keys than are declared.
    has_undeclared_keys: bool,
}

/// Reply of a server.
struct ServerReply {
    answer: Value,
    /// When the answered command was sent.
    sent_at: Instant,
    confirmation: Confirmation,
    server: ServerId,
}

impl Redis {
    /// Connects, and checks that the servers are supported.
    pub(crate) async fn connect(
        url: &str,
        options: &ConnectOptions,
        settings: RedisSettings,
        subscriber: SharedSubscriber,
    ) -> Result<Redis> {
        let response_timeout = settings.response_timeout;
        // Not repeated: a program that starts up should get the error at once. If no connection can
        // be made, the connect timeout reports that.
        let limit = settings.connect_timeout.saturating_add(response_timeout);
        let suspect_nodes = Arc::<SuspectNodes>::default();
        let parsed = url::parse(url, options)?;
        let connecting = Topology::connect(parsed, settings, subscriber, suspect_nodes.clone());
        let topology = timeout(limit, connecting).await;
        let topology = topology.map_err(|_| Error::ResponseTimeout { after: limit })??;
        Ok(Redis {
            topology,
            suspect_nodes,
            response_timeout,
        })
    }

    pub(crate) fn address(&self) -> String {
        self.topology.address()
    }

    /// Returns the cluster slot of a key. All keys of a script must be in the same slot.
    pub(crate) fn slot(&self, key: &str) -> Option<u16> {
        self.topology.slot(key)
    }

    pub(crate) async fn run<S: Step>(
        &self,
        step: &S,
        delivery: Delivery,
        channel: Option<&str>,
        progress: &Progress,
    ) -> Result<Answer<S::Reply>> {
        let eval_fallback = || self.eval_command(step);
        let exchange = self.build_exchange(step, &eval_fallback, delivery, channel, progress)?;
        let (reply, repeated) = self.send_with_retries(&exchange).await?;
        reply.decode(step, repeated)
    }

    pub(crate) async fn run_once<S: Step>(
        &self,
        step: &S,
        within: Duration,
    ) -> Result<Answer<S::Reply>> {
        let eval_fallback = || self.eval_command(step);
        let progress = Progress::default();
        let exchange =
            self.build_exchange(step, &eval_fallback, Delivery::IMMEDIATE, None, &progress)?;
        let limit = within.min(self.response_timeout);
        self.send_once(&exchange, limit).await?.decode(step, false)
    }

    pub(crate) async fn run_at_most_once<S: Step>(
        &self,
        step: &S,
        what: &'static str,
        delivery: Delivery,
        answered_within: Duration,
        progress: &Progress,
    ) -> Result<Answer<S::Reply>> {
        check_runtime()?;
        let eval_fallback = || self.eval_command(step);
        let exchange = self.build_exchange(step, &eval_fallback, delivery, None, progress)?;
        let unknown = |reason| Error::OutcomeUnknown { step: what, reason };
        let mut retry = Retry::with_timeout(self.response_timeout);
        let answer_timeout = answered_within.max(self.response_timeout);
        loop {
            let mut sending = pin!(self.send(&exchange));
            let answered = match progress
                .with_timeout(retry.started, self.response_timeout, sending.as_mut())
                .await
            {
                Some(answered) => answered,
                None => {
                    self.topology.request_refresh();
                    if !progress.was_sent() {
                        return Err(retry.deadline_error(self.timeout_hint(&exchange), progress));
                    }
                    let from = progress.timeout_start().max(Some(retry.started));
                    let answered_by = from.unwrap_or(retry.started) + answer_timeout;
                    match timeout_at(answered_by, sending).await {
                        Ok(answered) => answered,
                        Err(_) => {
                            return Err(unknown(format!("no answer within {answer_timeout:?}")));
                        }
                    }
                }
            };
            match answered {
                Ok(reply) => {
                    progress.record_answer();
                    return reply.decode(step, false);
                }
                Err(ExchangeError::Unanswered(reason)) => return Err(unknown(reason)),
                Err(failure) => {
                    progress.mark_unsent();
                    retry.pause_after(failure, progress).await?;
                    if retry.remaining().is_zero() {
                        return Err(retry.deadline_error(None, progress));
                    }
                }
            }
        }
    }

    pub(crate) fn suspect_nodes(&self) -> Arc<SuspectNodes> {
        self.suspect_nodes.clone()
    }

    pub(crate) fn node(&self, key: &str) -> Option<NodeId> {
        self.topology.known_node(key)
    }

    pub(crate) async fn settling_permit(&self, key: &str) -> Option<OwnedSemaphorePermit> {
        let limits = self.topology.limits(key);
        limits.settle_permits.clone().acquire_owned().await.ok()
    }

    /// Returns the error for a request for this key that had no contact with the store for this long.
    pub(crate) fn timeout_error(&self, key: &str, after: Duration) -> Error {
        exchange_error::timeout_error(after, self.topology.timeout_hint(key))
    }

    pub(crate) fn response_timeout(&self) -> Duration {
        self.response_timeout
    }

    pub(crate) async fn unsubscribe(&self, channel: &str) -> Result<()> {
        match timeout(self.response_timeout, self.topology.unsubscribe(channel)).await {
            Ok(done) => done.map_err(ExchangeError::into_error),
            Err(_) => Err(Error::ResponseTimeout {
                after: self.response_timeout,
            }),
        }
    }

    /// Returns one page of keys. Visits one node after the other.
    pub(crate) async fn scan(
        &self,
        pattern: &str,
        scan_type: ScanType,
        cursor: Cursor,
    ) -> Result<(Vec<String>, Option<Cursor>)> {
        check_runtime()?;
        let masters = timeout(self.response_timeout, self.topology.masters()).await;
        let nodes = masters.map_err(|_| Error::ResponseTimeout {
            after: self.response_timeout,
        })?;
        let Some(node) = nodes.get(cursor.node) else {
            return Ok((Vec::new(), None));
        };
        let mut scan = redis::cmd("SCAN");
        scan.arg(cursor.key).arg("MATCH").arg(pattern);
        scan.arg("COUNT").arg(SCAN_COUNT);
        scan.arg("TYPE").arg(match scan_type {
            ScanType::Hashes => "hash",
            ScanType::Strings => "string",
        });
        let exchange = Exchange {
            node: Some(node),
            ..Exchange::plain(scan)
        };
        let (reply, _) = self.send_with_retries(&exchange).await?;
        let (next, keys): (u64, Vec<Vec<u8>>) =
            redis::from_redis_value(reply.answer).map_err(|e| Error::Refused {
                reason: e.to_string(),
            })?;
        let keys = keys
            .into_iter()
            // Names are text. A key that is not UTF-8 belongs to neither redlatch nor Redisson.
            .filter_map(|key| String::from_utf8(key).ok())
            .collect();
        let next = match next {
            0 => Cursor {
                node: cursor.node + 1,
                key: 0,
            },
            key => Cursor { key, ..cursor },
        };
        Ok((keys, (next.node < nodes.len()).then_some(next)))
    }

    /// Repeats the exchange until there is an answer or the response timeout has passed. Also returns whether
    /// the answer may be that to a repetition.
    async fn send_with_retries(&self, exchange: &Exchange<'_>) -> Result<(ServerReply, bool)> {
        check_runtime()?;
        let own = Progress::default();
        let progress = exchange.progress.unwrap_or(&own);
        let mut retry = Retry::with_timeout(self.response_timeout);
        let started = retry.started;
        let answered = {
            let trying = pin!(async {
                loop {
                    match self.send(exchange).await {
                        Ok(answer) => return Ok(answer),
                        Err(failure) => retry.pause_after(failure, progress).await?,
                    }
                }
            });
            progress
                .with_timeout(started, self.response_timeout, trying)
                .await
        };
        match answered {
            Some(reply) => {
                // An error that a retry does not change is an answer, too.
                progress.record_answer();
                reply.map(|reply| (reply, retry.repeated))
            }
            None => {
                self.topology.request_refresh();
                Err(retry.deadline_error(self.timeout_hint(exchange), progress))
            }
        }
    }

    async fn send_once(&self, exchange: &Exchange<'_>, limit: Duration) -> Result<ServerReply> {
        check_runtime()?;
        match timeout(limit, pin!(self.send(exchange))).await {
            Ok(answer) => answer.map_err(ExchangeError::into_error),
            Err(_) => {
                self.topology.request_refresh();
                Err(Error::ResponseTimeout { after: limit })
            }
        }
    }

    /// Returns a hint for the timeout error if there is not even a connection.
    fn timeout_hint(&self, exchange: &Exchange<'_>) -> Option<&'static str> {
        match exchange.node {
            Some(node) => node.timeout_hint(),
            None => self.topology.timeout_hint(exchange.key),
        }
    }

    /// Makes one exchange, following redirections of the cluster.
    async fn send(&self, exchange: &Exchange<'_>) -> Result<ServerReply, ExchangeError> {
        let mut resolved;
        let mut node = match exchange.node.or(self.topology.only_node()) {
            Some(node) => node,
            None => {
                resolved = self.topology.node(exchange.key).await?;
                &resolved
            }
        };
        let mut importing = false;
        // If an earlier try was not answered, the store may have applied it. A redirection of this try does
        // not change that.
        let was_sent_before = exchange.progress.is_some_and(Progress::was_sent);
        for _ in 0..MAX_REDIRECTIONS {
            let answered = self.send_to(node, exchange, importing).await;
            if exchange.delivery.queued {
                if answered.is_ok() {
                    node.limits.attempt_limiter.record_answer();
                }
                drop(exchange.progress.and_then(Progress::take_permit));
            }
            let failure = match answered {
                Ok(answer) => return Ok(answer),
                Err(failure) => failure,
            };
            let other = match &failure {
                ExchangeError::Moved(to) => {
                    Box::pin(self.topology.handle_moved(exchange.key, to)).await
                }
                ExchangeError::Ask(_) if exchange.has_undeclared_keys => {
                    let message = "TRYAGAIN the slot is moving, and some of its keys are on another \
                                node";
                    return Err(ExchangeError::Busy(message.into()));
                }
                ExchangeError::Ask(to) => self.topology.handle_ask(exchange.key, to),
                ExchangeError::NotMaster(_)
                | ExchangeError::NotExecuted(_)
                | ExchangeError::Busy(_)
                | ExchangeError::Unanswered(_)
                | ExchangeError::Permanent(_) => None,
            };
            let Some(other) = other else {
                if !matches!(
                    failure,
                    ExchangeError::Permanent(_) | ExchangeError::Busy(_)
                ) {
                    self.topology.request_refresh();
                }
                return Err(failure);
            };
            if let Some(progress) = exchange.progress
                && !was_sent_before
            {
                // The node that redirected did not run the command.
                progress.mark_unsent();
            }
            resolved = other;
            (node, importing) = (&resolved, matches!(failure, ExchangeError::Ask(_)));
        }
        Err(ExchangeError::NotExecuted(
            "too many redirects between the nodes of the cluster".into(),
        ))
    }

    /// Makes one exchange with this node. An attempt keeps its permit until the caller takes it back.
    async fn send_to(
        &self,
        node: &Node,
        exchange: &Exchange<'_>,
        importing: bool,
    ) -> Result<ServerReply, ExchangeError> {
        let connection = match exchange.delivery.route {
            Route::Commands => &node.commands,
            Route::Acquisitions | Route::AcquisitionsOf(_) => &node.attempts,
        };
        let mut permit = None;
        if exchange.delivery.queued {
            let available = node.limits.attempt_limiter.try_acquire();
            permit = match available.filter(|_| missing_connection(node, exchange).is_none()) {
                Some(permit) => Some(permit),
                None => self.acquire_attempt_permit(node, exchange).await?,
            };
        }
        // If an attempt is dropped without an answer, its permit passes to the task that settles it. An
        // inspection needs no settling, so its permit ends here.
        if exchange.delivery.replicate
            && let Some(progress) = exchange.progress
            && let Some(permit) = permit.take()
        {
            progress.keep_permit(permit);
        }
        let same_connection = Arc::ptr_eq(connection, &node.pubsub);
        // While a slot moves, its subscriptions stay at the source node, which ends them when the move is
        // complete; waiters then retry. The target node would refuse them.
        let channel = exchange.channel.filter(|_| !importing);
        if let Some(channel) = channel {
            node.pubsub.add_channel(channel);
            if !same_connection {
                Box::pin(node.pubsub.connect_and_subscribe(channel)).await?;
            }
        }
        let mut live = connection.get_or_connect().await?;
        if let Route::AcquisitionsOf(server) = exchange.delivery.route
            && server != live.server()
        {
            let reason = "another server replaced this one and may not have the acquisition";
            return Err(ExchangeError::Unanswered(reason.into()));
        }
        let replicas = node.replicas.as_ref();
        let replicas = replicas.filter(|_| exchange.delivery.replicate);
        if let Some(replicas) = replicas {
            Box::pin(replicas.ensure_counted(connection, &live)).await?;
        }
        if let Some(progress) = exchange.progress {
            progress.mark_sent();
        }
        let mut sent_at = Instant::now();
        let channel = channel.filter(|_| same_connection);
        let context = SendContext {
            connection,
            importing,
            replicas,
        };
        let (mut answer, mut confirmation) =
            context.send(&mut live, &exchange.cmd, channel).await?;
        if let Value::ServerError(error) = &answer
            && error.code() == "NOSCRIPT"
            && let Some(eval_fallback) = exchange.eval_fallback
        {
            // A new or flushed server. EVAL loads the script for later.
            sent_at = Instant::now();
            (answer, confirmation) =
                Box::pin(context.send(&mut live, &eval_fallback(), None)).await?;
        }
        match answer {
            Value::ServerError(error) => {
                Err(match ExchangeError::from_reply(&error, exchange.key) {
                    // With a single server there is no other node, so a retry does not help.
                    ExchangeError::NotMaster(message) if self.topology.is_single() => {
                        ExchangeError::Permanent(script_error(exchange.key, message))
                    }
                    failure => {
                        if matches!(failure, ExchangeError::NotMaster(_)) {
                            connection.discard(&live);
                        }
                        failure
                    }
                })
            }
            answer => {
                let server = live.server();
                connection.recycle(live);
                Ok(ServerReply {
                    answer,
                    sent_at,
                    confirmation,
                    server,
                })
            }
        }
    }

    /// Waits for the permit to send an attempt to this node. Without a connection no attempt has a permit: all
    /// wait for one try to connect, and fail together if that fails.
    ///
    /// Boxed: few attempts wait.
    fn acquire_attempt_permit<'a>(
        &'a self,
        node: &'a Node,
        exchange: &'a Exchange<'_>,
    ) -> Boxed<'a, Result<Option<AttemptPermit>, ExchangeError>> {
        Box::pin(async move {
            loop {
                let permit = match (node.limits.attempt_limiter.try_acquire(), exchange.progress) {
                    (Some(permit), _) => Some(permit),
                    (None, Some(progress)) => {
                        let _queued = progress.wait_for_permit(node.limits.attempt_limiter.clone());
                        node.limits.attempt_limiter.acquire().await
                    }
                    (None, None) => node.limits.attempt_limiter.acquire().await,
                };
                let Some(connection) = missing_connection(node, exchange) else {
                    return Ok(permit);
                };
                drop(permit);
                connection.get_or_connect().await?;
            }
        })
    }

    fn build_exchange<'a, S: Step>(
        &self,
        step: &'a S,
        eval_fallback: &'a (dyn Fn() -> Cmd + Sync),
        delivery: Delivery,
        channel: Option<&'a str>,
        progress: &'a Progress,
    ) -> Result<Exchange<'a>> {
        let mut keys = step.keys();
        let key = keys.next().unwrap_or_default();
        self.topology.check_same_slot(key, keys)?;
        Ok(Exchange {
            eval_fallback: Some(eval_fallback),
            key,
            channel,
            progress: Some(progress),
            delivery,
            has_undeclared_keys: step.script().has_undeclared_keys(),
            ..Exchange::plain(self.evalsha_command(step))
        })
    }

    fn evalsha_command<S: Step>(&self, step: &S) -> Cmd {
        let script = step.script().sha(self.topology.publishing());
        command(step, "EVALSHA", script)
    }

    fn eval_command<S: Step>(&self, step: &S) -> Cmd {
        let script = step.script().source_for(self.topology.publishing());
        command(step, "EVAL", &script)
    }
}

/// Builds EVALSHA or EVAL with the keys and arguments of a step.
fn command<S: Step>(step: &S, verb: &str, script: &str) -> Cmd {
    let keys = step.keys();
    // Enough for the longest command with a long name, so that the buffer never grows.
    let mut cmd = Cmd::with_capacity(16, 512);
    cmd.arg(verb).arg(script).arg(keys.len());
    for key in keys {
        cmd.arg(key);
    }
    step.args(&mut Args(&mut cmd));
    cmd
}

/// Returns a connection that an attempt needs and that is not established yet.
fn missing_connection<'a>(node: &'a Node, exchange: &Exchange<'_>) -> Option<&'a Arc<Connection>> {
    let pubsub = exchange.channel.map(|_| &node.pubsub);
    let mut connections = std::iter::once(&node.attempts).chain(pubsub);
    connections.find(|connection| !connection.is_connected())
}

/// How commands are sent on one connection.
struct SendContext<'a> {
    connection: &'a Arc<Connection>,
    importing: bool,
    /// The replicas that must confirm the command.
    replicas: Option<&'a Arc<Replicas>>,
}

impl SendContext<'_> {
    /// Sends a command, behind a subscription and followed by WAIT for the replicas, in one round trip.
    async fn send(
        &self,
        live: &mut LiveConnection,
        cmd: &Cmd,
        channel: Option<&str>,
    ) -> Result<(Value, Confirmation), ExchangeError> {
        if channel.is_none() && self.replicas.is_none() {
            let answer = self
                .connection
                .query_node(live, cmd, self.importing)
                .await?;
            return Ok((answer, Confirmation::NOT_NEEDED));
        }
        // Boxed, as are other rare paths, so that common futures stay small.
        Box::pin(self.send_pipelined(live, cmd, channel)).await
    }

    async fn send_pipelined(
        &self,
        live: &mut LiveConnection,
        cmd: &Cmd,
        channel: Option<&str>,
    ) -> Result<(Value, Confirmation), ExchangeError> {
        let connection = self.connection;
        let (mut before, after) = (live.clone(), live.clone());
        // One connection keeps order: the step runs after the subscription has started, and WAIT comes
        // behind the step. `biased`, because otherwise the second poll would start with another branch.
        // `unconstrained`, because otherwise the first poll of a task with a used-up budget would send
        // nothing, and a WAIT sent by another task would come before the step.
        let all = async {
            tokio::join!(
                biased;
                async {
                    match channel {
                        Some(channel) => connection.subscribe(&mut before, channel).await,
                        None => Ok(()),
                    }
                },
                connection.query_node(live, cmd, self.importing),
                async {
                    match self.replicas {
                        Some(replicas) => replicas.confirm(connection, &after),
                        None => Confirmation::NOT_NEEDED,
                    }
                },
            )
        };
        let (subscribed, answer, confirmation) = tokio::task::unconstrained(all).await;
        subscribed?;
        Ok((answer?, confirmation))
    }
}

impl ServerReply {
    fn decode<S: Step>(self, step: &S, repeated: bool) -> Result<Answer<S::Reply>> {
        Ok(Answer {
            reply: step.reply(self.answer)?,
            sent_at: self.sent_at,
            repeated,
            confirmation: self.confirmation,
            server: self.server,
        })
    }
}

impl<'a> Exchange<'a> {
    fn plain(cmd: Cmd) -> Exchange<'a> {
        Exchange {
            cmd,
            eval_fallback: None,
            key: "",
            node: None,
            channel: None,
            progress: None,
            delivery: Delivery::IMMEDIATE,
            has_undeclared_keys: false,
        }
    }
}

/// Checks for a runtime with timers: without it, timeouts would panic.
fn check_runtime() -> Result<()> {
    crate::runtime::current().map(drop)
}
