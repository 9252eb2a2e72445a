//! A connection that is opened on demand and replaced when it breaks.
//!
//! 1. It is made when it is needed, by a task that all callers wait for. So a caller that stops waiting does
//!    not restart it for the others.
//! 2. After a failure the next try to connect starts after a random, growing pause ([`Pace`]). A connection
//!    counts as a success with the first answer to a step: one that breaks right after its handshake is a
//!    failure.
//! 3. On a new connection, subscriptions are restored before anything else is sent (only with
//!    [`SubscriptionMode::Restored`]; otherwise they end with their connection).
//! 4. A connection counts as broken when sending fails or when its task ends, for any reason. Waiters for
//!    its messages are woken then, because messages may have been missed. The next caller reconnects.
//! 5. A command is queued on the connection by the first poll of the future that sends it (see `PIPELINE_CAPACITY`). So
//!    commands are sent in the order of these polls.
//! 6. If another server can replace this one, its connection can be *invalidated*: every caller that waits
//!    for an answer on it gets an error at once.
//!
//! Uses the client library's multiplexed connection, but not its connection manager: that keeps the error
//! of a refused reconnection (a wrong password for a moment, too many clients) for good.

use std::collections::BTreeSet;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{
    AsyncConnectionConfig, Cmd, ConnectionAddr, Pipeline, PushInfo, PushKind, RedisError,
    RedisResult, Value,
};
use tokio::sync::{Notify, Semaphore};
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout_at};

use super::batch::{Batcher, CloseOnDrop};
use super::connection_config::ConnectionConfig;
use super::connector::RawConnection;
use super::endpoint::Endpoint;
use super::exchange_error::ExchangeError;
use super::node_ids::NodeIds;
use super::pace::Pace;
use super::pubsub::{
    CHANNELS_PER_SUBSCRIBE, SubscriptionMode, as_text, breaks_connection, is_unknown_command,
    resubscribe, set_subscribed, set_subscribed_sharded,
};
use super::run_id_tracker::{RunIdTracker, run_id};
use crate::environment::task;
use crate::error::{Cause, Error};
use crate::join::Boxed;
use crate::store::shared_oneshot::{self, Receiver, Sender};
use crate::store::{ServerId, SharedSubscriber};
use crate::sync::Mutex;

/// Commands that may queue inside the client library: more than there is memory for, so that no command waits there for
/// room. Memory is used only for commands that are queued.
///
/// A command that waited for room would be queued when its task is polled again, perhaps behind commands that were sent
/// after it: behind the release that settles it, if it is an acquisition in a batch, or behind the WAIT that confirms
/// it.
///
/// What is queued is limited elsewhere: attempts by the attempt limiter, and other commands by their number of callers.
/// Callers that give up leave their command in the queue only at a server that reads nothing. On Linux the kernel ends
/// such a connection 10 s after its buffers are full.
const PIPELINE_CAPACITY: usize = Semaphore::MAX_PERMITS;

/// The longest pause before connecting is retried: short enough to find a restarted server quickly, long
/// enough that a thousand clients do not keep it from starting.
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

pub(super) struct ReconnectingConnection {
    config: ConnectionConfig,
    target: Target,
    connect_timeout: Duration,
    /// Whether steps that wait to be sent are sent together.
    batching: bool,
    shared: Arc<Shared>,
    connecting: Mutex<Connecting>,
}

/// Where the server of a connection is.
#[derive(Clone)]
pub(super) enum Target {
    /// At one fixed address.
    Fixed(ConnectionAddr),
    /// At one fixed address, where a node of the cluster with these ids is expected.
    ClusterNode(Endpoint, Arc<Mutex<NodeIds>>),
    /// At an address that a resolver resolves for each connection.
    CurrentMaster(Arc<dyn MasterResolver>),
}

/// Resolves the address of the current master, which may change.
pub(super) trait MasterResolver: Send + Sync {
    /// Returns the current address.
    fn resolve(self: Arc<Self>) -> Boxed<'static, Result<Endpoint, ExchangeError>>;

    /// Returns whether this is the current address, as far as is known.
    fn is_current(&self, endpoint: &Endpoint) -> bool;
}

/// The current try to connect. It runs in a task of its own: a caller may stop waiting without restarting it
/// for the others, and all callers get its outcome.
struct Connecting {
    generation: Generation,
    outcome: Option<Outcome>,
    task: Option<AbortHandle>,
    /// The latest generation that must not be used, even if connecting succeeds.
    invalidated: Generation,
    /// The resolved address of the connection, or of the one being made, if it can change.
    endpoint: Option<Endpoint>,
    /// The server of the latest connection, and its endpoint, if that can change.
    server: (ServerId, Option<Endpoint>),
    /// Connections since the latest answer to a step.
    pace: Pace,
    /// Ends a pause.
    retry: Arc<Notify>,
}

type Outcome = Receiver<Result<LiveConnection, ExchangeError>>;

struct Shared {
    subscriber: SharedSubscriber,
    subscription_mode: SubscriptionMode,
    live: Mutex<Option<Established>>,
    /// The subscribed channels; where subscriptions are restored, the channels to restore.
    channels: Mutex<BTreeSet<String>>,
    /// When a connection was lost and that was logged, until there is a new one.
    lost_at: Mutex<Option<Instant>>,
    /// The latest connection to a server without sharded channels.
    without_sharded_channels: AtomicU64,
    /// Tracks which server process the connections lead to, if that matters.
    run_id_tracker: Option<RunIdTracker>,
}

/// Numbers the established connections of a [`ReconnectingConnection`], so that late events of an old one do not end a
/// new one.
pub(super) type Generation = u64;

/// Reason of the failure to connect to a server that is known to be replaced meanwhile.
const REPLACED_WHILE_CONNECTING: &str = "another server replaced this one while connecting";

/// Number of clones of a connection that are kept for later commands.
const MAX_IDLE_HANDLES: usize = 64;

/// A connection that works, as far as is known.
#[derive(Clone)]
pub(super) struct LiveConnection {
    raw: RawConnection,
    pub(super) generation: Generation,
    /// The server at the other end: another one after a failover.
    pub(super) server: ServerId,
    /// The steps that wait to be sent, if steps are sent together.
    pub(super) batcher: Option<Arc<Batcher>>,
    /// Closed when the connection is invalidated; the socket may still be open then. Present if another
    /// server can replace this one.
    pub(super) invalidated: Option<Receiver<()>>,
}

struct Established {
    live: LiveConnection,
    /// Whether a step was answered.
    answered: bool,
    /// Unused clones. A clone copies several reference counts; under load, cloning for each command costs
    /// more than the mutex around this list.
    idle: Vec<LiveConnection>,
    /// For the log.
    address: String,
    _close_batcher: Option<CloseOnDrop>,
    /// Dropping it notifies all callers that wait for an answer.
    _invalidated: Option<Sender<()>>,
}

impl ReconnectingConnection {
    pub(super) fn new(
        config: ConnectionConfig,
        target: Target,
        connect_timeout: Duration,
        batching: bool,
        subscriber: SharedSubscriber,
        subscription_mode: SubscriptionMode,
        run_id_tracker: Option<RunIdTracker>,
    ) -> Arc<ReconnectingConnection> {
        let shared = Shared {
            subscriber,
            subscription_mode,
            live: Mutex::new(None),
            channels: Mutex::new(BTreeSet::new()),
            lost_at: Mutex::default(),
            without_sharded_channels: AtomicU64::new(0),
            run_id_tracker,
        };
        Arc::new(ReconnectingConnection {
            config,
            target,
            connect_timeout,
            batching,
            shared: Arc::new(shared),
            connecting: Mutex::new(Connecting::new()),
        })
    }

    /// Returns a further connection to the same server, for reports to `subscriber`.
    pub(super) fn reports_connection(
        &self,
        subscriber: SharedSubscriber,
    ) -> Arc<ReconnectingConnection> {
        ReconnectingConnection::new(
            self.config.clone(),
            self.target.clone(),
            self.connect_timeout,
            false,
            subscriber,
            SubscriptionMode::Reports,
            None,
        )
    }

    /// Records that another server has replaced the earlier one. It is connected to without a pause.
    pub(super) fn report_failover(&self) {
        let mut connecting = self.connecting.lock();
        connecting.pace.reset();
        connecting.retry.notify_waiters();
        drop(connecting);
        if let Some(run_id_tracker) = &self.shared.run_id_tracker {
            run_id_tracker.report_replaced();
        }
    }

    /// Queries which server process a new connection leads to.
    async fn fetch_run_id(&self, mut live: LiveConnection) {
        let Some(run_id_tracker) = &self.shared.run_id_tracker else {
            return;
        };
        let info = redis::cmd("INFO").arg("server").take();
        let querying = self.query(&mut live, &info);
        let answer = tokio::time::timeout(self.connect_timeout, querying).await;
        let current = answer.ok().and_then(Result::ok).and_then(run_id);
        run_id_tracker.record(current);
    }

    /// Returns the current connection or makes a new one. Concurrent callers share one try to connect.
    pub(super) async fn get_or_connect(self: &Arc<Self>) -> Result<LiveConnection, ExchangeError> {
        if let Some(live) = self.shared.live() {
            return Ok(live);
        }
        let outcome = match self.join_connecting() {
            Ok(live) => return Ok(live),
            Err(outcome) => outcome,
        };
        // Without an outcome, the task ended with its runtime. The next call starts a new one.
        let interrupted = || Err(ExchangeError::not_executed("connecting was interrupted"));
        outcome.recv().await.unwrap_or_else(interrupted)
    }

    /// Takes back the result of [`get_or_connect`](ReconnectingConnection::get_or_connect) for a later command, after an
    /// answer to a step. It may be dropped instead.
    pub(super) fn recycle(&self, idle: LiveConnection) {
        let generation = idle.generation;
        let mut live = self.shared.live.lock();
        let Some(established) = live
            .as_mut()
            .filter(|established| established.live.generation == generation)
        else {
            return;
        };
        if established.idle.len() < MAX_IDLE_HANDLES {
            established.idle.push(idle);
        }
        if !std::mem::replace(&mut established.answered, true) {
            drop(live);
            self.connecting.lock().pace.reset();
        }
    }

    /// Returns whether there is a connection.
    pub(super) fn is_connected(&self) -> bool {
        self.shared.live.lock().is_some()
    }

    /// Returns a hint for the timeout error if there is not even a connection.
    pub(super) fn timeout_hint(&self) -> Option<&'static str> {
        (!self.is_connected()).then(|| self.config.timeout_hint())
    }

    /// Returns the address of the current connection, or of the one being made, if it is known and can
    /// change.
    pub(super) fn current_endpoint(&self) -> Option<Endpoint> {
        self.connecting.lock().endpoint.clone()
    }

    /// Joins the current try to connect or starts one, and returns its pending outcome as the error. Returns the
    /// connection if it was just made.
    fn join_connecting(self: &Arc<Self>) -> Result<LiveConnection, Outcome> {
        let mut connecting = self.connecting.lock();
        if let Some(live) = self.shared.live() {
            return Ok(live);
        }
        if let Some(outcome) = &connecting.outcome
            && outcome.is_pending()
        {
            return Err(outcome.clone());
        }
        connecting.generation += 1;
        let (sender, outcome) = shared_oneshot::channel();
        connecting.outcome = Some(outcome.clone());
        connecting.endpoint = None;
        let pause = connecting.pace.not_before().map(|not_before| {
            let retry = connecting.retry.clone().notified_owned();
            timeout_at(not_before, retry)
        });
        let (connection, generation) = (self.clone(), connecting.generation);
        let task = tokio::spawn(task(async move {
            if let Some(pause) = pause {
                let _ = pause.await;
            }
            let connected =
                tokio::time::timeout(connection.connect_timeout, connection.connect(generation))
                    .await;
            let connected = connected.unwrap_or_else(|_| {
                Err(ExchangeError::not_executed(format!(
                    "no connection within the connect timeout of {:?}{}",
                    connection.connect_timeout,
                    connection.config.timeout_hint()
                )))
            });
            connection.connecting.lock().finished();
            let live = connected.as_ref().ok().cloned();
            sender.send(connected);
            // After the waiting callers got the connection: no caller pays for this round trip.
            if let Some(live) = live {
                connection.fetch_run_id(live).await;
            }
        }));
        connecting.task = Some(task.abort_handle());
        Err(outcome)
    }

    async fn connect(&self, generation: Generation) -> Result<LiveConnection, ExchangeError> {
        let (addr, endpoint) = match &self.target {
            Target::Fixed(addr) => (addr.clone(), None),
            Target::ClusterNode(at, _) => (at.to_addr(), None),
            Target::CurrentMaster(resolver) => {
                let endpoint = resolver.clone().resolve().await?;
                self.connecting.lock().endpoint = Some(endpoint.clone());
                // A change from now on invalidates this connection.
                if !resolver.is_current(&endpoint) {
                    return Err(ExchangeError::not_executed(REPLACED_WHILE_CONNECTING));
                }
                (endpoint.to_addr(), Some(endpoint))
            }
        };
        let config = AsyncConnectionConfig::new()
            // Both timeouts are applied outside, around a whole call.
            .set_connection_timeout(None)
            .set_response_timeout(None)
            .set_pipeline_buffer_size(PIPELINE_CAPACITY)
            .set_push_sender(push_handler(Arc::downgrade(&self.shared), generation));
        let mut raw = self.config.connect(&addr, &config).await?;
        if let Some(endpoint) = &endpoint {
            is_master(&mut raw.connection, endpoint).await?;
        }
        if let Target::ClusterNode(at, ids) = &self.target {
            is_of_cluster(&mut raw.connection, at, ids).await?;
        }
        let channel = self.can_be_replaced().then(shared_oneshot::channel);
        let (invalidated, receiver) = channel.unzip();
        let batching = self.batching.then(|| {
            let metrics = self.shared.subscriber.metrics();
            Batcher::new(&raw.connection, metrics)
        });
        let (batcher, close_batcher) = batching.unzip();
        let live = LiveConnection {
            raw,
            generation,
            server: self.server(endpoint.as_ref()),
            batcher,
            invalidated: receiver,
        };
        let established = Established {
            live: live.clone(),
            answered: false,
            idle: Vec::new(),
            address: addr.to_string(),
            _close_batcher: close_batcher,
            _invalidated: invalidated,
        };
        let restoring = self.restore(live.raw.connection.clone(), established);
        let restored = restoring.await;
        restored.map_err(|e| ExchangeError::from_connect_error(&e))?;
        Ok(live)
    }

    /// Returns whether this connection leads to the same server as the one with this id did.
    pub(super) fn leads_to(&self, server: ServerId) -> bool {
        self.connecting.lock().server.0 == server
    }

    /// Returns the id of the server at an endpoint: a new one if the endpoint has changed.
    fn server(&self, endpoint: Option<&Endpoint>) -> ServerId {
        let (id, latest) = &mut self.connecting.lock().server;
        if *id == ServerId::default() || latest.as_ref() != endpoint {
            (*id, *latest) = (ServerId::next(), endpoint.cloned());
        }
        *id
    }

    /// Returns whether another server may replace this one. (The commands connection of a single server with
    /// replicas restores nothing either, so it is included. That costs almost nothing.)
    fn can_be_replaced(&self) -> bool {
        let restored = self.shared.subscription_mode == SubscriptionMode::Restored;
        !restored || matches!(self.target, Target::CurrentMaster(_))
    }

    /// Subscribes to all restored channels, and then makes the connection available.
    async fn restore(
        &self,
        mut connection: MultiplexedConnection,
        established: Established,
    ) -> Result<(), RedisError> {
        let mut restored: BTreeSet<String> = match self.shared.subscription_mode {
            SubscriptionMode::Restored => self.shared.channels.lock().clone(),
            SubscriptionMode::Unrestored
            | SubscriptionMode::Sharded
            | SubscriptionMode::Reports => BTreeSet::new(),
        };
        let all: Vec<&String> = restored.iter().collect();
        for channels in all.chunks(CHANNELS_PER_SUBSCRIBE) {
            resubscribe(&mut connection, channels).await?;
        }
        // Before the first use, also end subscriptions that have become unwanted meanwhile.
        loop {
            let unwanted: Vec<String> = {
                let connecting = self.connecting.lock();
                if connecting.invalidated >= established.live.generation {
                    return Err(std::io::Error::other(REPLACED_WHILE_CONNECTING).into());
                }
                let channels = self.shared.channels.lock();
                let unwanted: Vec<String> = restored.difference(&channels).cloned().collect();
                if unwanted.is_empty() {
                    self.shared.on_connected(&established.address);
                    *self.shared.live.lock() = Some(established);
                    return Ok(());
                }
                unwanted
            };
            connection.unsubscribe(&unwanted).await?;
            for channel in &unwanted {
                restored.remove(channel);
            }
        }
    }

    /// Makes every later connection subscribe to a channel, where subscriptions are restored.
    pub(super) fn subscribe_on_reconnect(&self, channel: &str) {
        if self.shared.subscription_mode == SubscriptionMode::Restored {
            self.shared.record_subscription(channel);
        }
    }

    /// Subscribes to a channel on the current connection or a new one.
    pub(super) async fn connect_and_subscribe(
        self: &Arc<Self>,
        channel: &str,
    ) -> Result<(), ExchangeError> {
        let mut live = self.get_or_connect().await?;
        self.subscribe(&mut live, channel).await?;
        self.recycle(live);
        Ok(())
    }

    /// Subscribes to a channel on this connection.
    pub(super) async fn subscribe(
        &self,
        live: &mut LiveConnection,
        channel: &str,
    ) -> Result<(), ExchangeError> {
        // Recorded before sending, so that the subscription can be ended if this is dropped half-way.
        if !self.shared.record_subscription_on(live.generation, channel) {
            return Err(connection_ended());
        }
        let subscribed = self.set_subscribed(live, true, channel).await;
        if !matches!(subscribed, Ok(()) | Err(ExchangeError::Unanswered(_))) {
            // It was refused, so there is nothing to end, and nothing to restore on later connections.
            self.shared.channels.lock().remove(channel);
        }
        subscribed
    }

    /// Ends the subscription of a channel, if there may be one, here and on the current connection.
    pub(super) async fn unsubscribe(&self, channel: &str) -> Result<(), ExchangeError> {
        if !self.shared.channels.lock().remove(channel) {
            return Ok(());
        }
        match self.shared.live() {
            Some(mut live) => self.set_subscribed(&mut live, false, channel).await,
            None => Ok(()),
        }
    }

    /// Subscribes to a channel on this connection, or ends its subscription.
    async fn set_subscribed(
        &self,
        live: &mut LiveConnection,
        subscribed: bool,
        channel: &str,
    ) -> Result<(), ExchangeError> {
        let answered = {
            let (generation, connection) = (live.generation, &mut live.raw.connection);
            let sending = pin!(async {
                if self.shared.subscription_mode != SubscriptionMode::Sharded
                    || self.lacks_sharded_channels(generation)
                {
                    return set_subscribed(connection, subscribed, channel).await;
                }
                match set_subscribed_sharded(connection, subscribed, channel).await {
                    Err(error) if is_unknown_command(&error) => {
                        let newest = &self.shared.without_sharded_channels;
                        newest.fetch_max(generation, Ordering::Relaxed);
                        set_subscribed(connection, subscribed, channel).await
                    }
                    done => done,
                }
            });
            unless_invalidated(&live.invalidated, sending).await?
        };
        answered.map_err(|error| self.classify_failure(live, &error))
    }

    /// Returns whether the server of this connection is known to have no sharded channels. An updated server has
    /// another connection.
    fn lacks_sharded_channels(&self, generation: Generation) -> bool {
        self.shared.without_sharded_channels.load(Ordering::Relaxed) == generation
    }

    /// Returns whether there is a connection to a server that is known to have no sharded channels.
    pub(super) fn is_without_sharded_channels(&self) -> bool {
        let live = self.shared.live.lock();
        let generation = live.as_ref().map(|established| established.live.generation);
        generation.is_some_and(|generation| self.lacks_sharded_channels(generation))
    }

    /// Ends all subscriptions if one of these channels belongs to another node now. A server with sharded channels does
    /// that by itself.
    pub(super) fn end_moved_subscriptions(&self, has_moved: impl Fn(&str) -> bool) {
        if self.is_without_sharded_channels()
            && self
                .shared
                .channels
                .lock()
                .iter()
                .any(|channel| has_moved(channel))
        {
            self.invalidate();
        }
    }

    /// Sends a command, and waits for its answer. An error reply is an error.
    pub(super) async fn query(
        &self,
        live: &mut LiveConnection,
        cmd: &Cmd,
    ) -> Result<Value, ExchangeError> {
        match self.query_node(live, cmd, Preamble::None).await? {
            Value::ServerError(error) => Err(ExchangeError::from_reply(&error, "")),
            answer => Ok(answer),
        }
    }

    /// Sends a command behind a preamble, and waits for its answer, which may be an error reply.
    pub(super) async fn query_node(
        &self,
        live: &mut LiveConnection,
        cmd: &Cmd,
        preamble: Preamble,
    ) -> Result<Value, ExchangeError> {
        let answered = {
            let connection = &mut live.raw.connection;
            let sending = pin!(async {
                match preamble {
                    Preamble::None => connection.send_packed_command(cmd).await,
                    Preamble::Asking => Box::pin(send_with_asking(connection, cmd)).await,
                    Preamble::Tracking => Box::pin(self.send_with_tracking(connection, cmd)).await,
                }
            });
            unless_invalidated(&live.invalidated, sending).await?
        };
        answered.map_err(|error| self.classify_failure(live, &error))
    }

    /// Sends one command so that the server reports later changes of its keys. Each time from the start, because a new
    /// connection starts without. In one write, as for ASKING.
    async fn send_with_tracking(
        &self,
        connection: &mut MultiplexedConnection,
        cmd: &Cmd,
    ) -> RedisResult<Value> {
        let mut pipeline = Pipeline::with_capacity(3);
        let client = || redis::cmd("CLIENT");
        pipeline.add_command(
            client()
                .arg("TRACKING")
                .arg(&["ON", "OPTIN", "NOLOOP"])
                .take(),
        );
        pipeline.add_command(client().arg("CACHING").arg("YES").take());
        pipeline.add_command(cmd.clone());
        let answers = connection.send_packed_commands(&pipeline, 0, 3).await;
        if let Some(run_id_tracker) = &self.shared.run_id_tracker {
            run_id_tracker.tracked(&answers);
        }
        Ok(answers?.pop().unwrap_or(Value::Nil))
    }

    /// Returns whether the server is asked to report changes of keys, on this connection.
    pub(super) fn is_tracking(&self) -> bool {
        let run_id_tracker = self.shared.run_id_tracker.as_ref();
        run_id_tracker.is_some_and(RunIdTracker::is_tracking)
    }

    /// Classifies the failure of something that was sent on this connection.
    pub(super) fn classify_failure(
        &self,
        live: &LiveConnection,
        error: &RedisError,
    ) -> ExchangeError {
        if breaks_connection(error) {
            self.shared.connection_lost(live.generation, error);
            return ExchangeError::Unanswered(Cause::new(error.to_string(), error.clone()));
        }
        ExchangeError::from_client_error(error)
    }

    /// Stops using this connection, in any state. A connection that has replaced it stays in use.
    pub(super) fn discard(&self, live: &LiveConnection) {
        drop(self.shared.detach(live.generation));
    }

    /// Stops using the connection, in any state, including a pending one. Everything that waits for it, or
    /// for an answer on it, fails.
    pub(super) fn invalidate(&self) {
        let mut connecting = self.connecting.lock();
        // The task may be too far to be aborted.
        connecting.invalidated = connecting.generation;
        connecting.endpoint = None;
        if let Some(task) = connecting.task.take() {
            task.abort();
        }
        drop(connecting);
        let generation = self.shared.live().map(|live| live.generation);
        if let Some(generation) = generation {
            drop(self.shared.detach(generation));
        }
    }
}

/// The commands that are sent directly before another one, and affect it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Preamble {
    None,
    /// The node does not own the slot yet, but the slot's owner has redirected to it (ASK).
    Asking,
    /// The server is asked to report it if another client changes the keys of the command.
    Tracking,
}

/// The connection was invalidated, or broke, before the answer arrived.
pub(super) fn connection_ended() -> ExchangeError {
    ExchangeError::Unanswered("the connection ended before the answer arrived".into())
}

/// Sends one command with ASKING before it. In one write: ASKING applies only to the next command.
async fn send_with_asking(connection: &mut MultiplexedConnection, cmd: &Cmd) -> RedisResult<Value> {
    let mut pipeline = Pipeline::with_capacity(2);
    pipeline.cmd("ASKING").add_command(cmd.clone());
    let answers = connection.send_packed_commands(&pipeline, 0, 2).await?;
    Ok(answers.into_iter().next_back().unwrap_or(Value::Nil))
}

pub(super) async fn unless_invalidated<T>(
    invalidated: &Option<Receiver<()>>,
    work: Pin<&mut impl Future<Output = T>>,
) -> Result<T, ExchangeError> {
    let Some(invalidated) = invalidated else {
        return Ok(work.await);
    };
    tokio::select! {
        biased;
        done = work => Ok(done),
        // Nothing is ever sent; this returns when the sender is dropped.
        _ = invalidated.recv() => Err(connection_ended()),
    }
}

/// Checks the role of a server that sentinels call the master. It may be a former or a future master.
async fn is_master(
    connection: &mut MultiplexedConnection,
    endpoint: &Endpoint,
) -> Result<(), ExchangeError> {
    let role = connection.send_packed_command(&redis::cmd("ROLE")).await;
    let role = role.map_err(|e| ExchangeError::from_connect_error(&e))?;
    match &role {
        Value::Array(role) if as_text(role.first()) == Some("master") => Ok(()),
        Value::Array(_) => Err(ExchangeError::not_executed(format!(
            "{endpoint} is the master according to the sentinels, but is a replica"
        ))),
        Value::ServerError(error) => Err(ExchangeError::from_reply(error, "")),
        other => Err(ExchangeError::Permanent(Error::UnsupportedServer {
            reason: format!("its reply to ROLE contains no role: {other:?}"),
        })),
    }
}

/// Checks the id of a node of a cluster. A user without the right to query it cannot notice that the address was reused.
async fn is_of_cluster(
    connection: &mut MultiplexedConnection,
    at: &Endpoint,
    ids: &Mutex<NodeIds>,
) -> Result<(), ExchangeError> {
    let query = redis::cmd("CLUSTER").arg("MYID").take();
    let id = connection.send_packed_command(&query).await;
    let id = id.map_err(|e| ExchangeError::from_connect_error(&e))?;
    match as_text(Some(&id)) {
        Some(id) if !ids.lock().accepts_node(at, id, Instant::now()) => {
            let reason = format!("{at} is now the address of a node of another cluster");
            Err(ExchangeError::not_executed(reason))
        }
        _ => Ok(()),
    }
}

impl Connecting {
    fn new() -> Connecting {
        Connecting {
            generation: Generation::default(),
            outcome: None,
            task: None,
            invalidated: Generation::default(),
            endpoint: None,
            server: Default::default(),
            pace: Pace::up_to(LONGEST_PAUSE),
            retry: Arc::default(),
        }
    }

    /// Handles the end of a try to connect. It is no success before a step was answered.
    fn finished(&mut self) {
        // The waiting callers have it. Keeping it here would keep an invalidated connection open.
        self.outcome = None;
        self.pace.failed(Instant::now());
    }
}

impl Shared {
    fn live(&self) -> Option<LiveConnection> {
        let mut live = self.live.lock();
        let established = live.as_mut()?;
        let idle = established.idle.pop();
        Some(idle.unwrap_or_else(|| established.live.clone()))
    }

    fn is_live(&self, generation: Generation) -> bool {
        let live = self.live.lock();
        live.as_ref()
            .is_some_and(|established| established.live.generation == generation)
    }

    /// Records that a channel is about to be subscribed to.
    fn record_subscription(&self, channel: &str) {
        let mut channels = self.channels.lock();
        if !channels.contains(channel) {
            channels.insert(channel.to_owned());
        }
    }

    /// The same for this connection only, unless subscriptions are restored. Returns false if the connection,
    /// with its subscriptions, has ended meanwhile.
    fn record_subscription_on(&self, generation: Generation, channel: &str) -> bool {
        if self.subscription_mode == SubscriptionMode::Restored {
            return true;
        }
        let live = self.live.lock();
        let is_current = live
            .as_ref()
            .is_some_and(|established| established.live.generation == generation);
        if is_current {
            self.record_subscription(channel);
        }
        is_current
    }

    /// Handles a subscription that the server has ended by itself.
    fn on_server_unsubscribe(&self, channel: &str) {
        if self.subscription_mode == SubscriptionMode::Sharded
            && self.channels.lock().remove(channel)
        {
            self.subscriber.on_unsubscribed(channel);
        }
    }

    /// Handles the end of all subscriptions with their connection.
    fn end_all_channels(&self) {
        let ended = std::mem::take(&mut *self.channels.lock());
        ended
            .iter()
            .for_each(|channel| self.subscriber.on_unsubscribed(channel));
    }

    /// Handles the end of a connection in use: all waiters for its messages must check the store again.
    /// Returns the connection; dropping it ends a task.
    fn detach(&self, generation: Generation) -> Option<Established> {
        let dead = self
            .live
            .lock()
            .take_if(|established| established.live.generation == generation);
        if dead.is_some() {
            match self.subscription_mode {
                SubscriptionMode::Restored | SubscriptionMode::Reports => {
                    self.subscriber.on_disconnect();
                }
                SubscriptionMode::Unrestored | SubscriptionMode::Sharded => self.end_all_channels(),
            }
        }
        dead
    }

    /// The same for a connection that the network or the server ended. Logged once, not for each later
    /// failure to connect.
    fn connection_lost(&self, generation: Generation, reason: &dyn std::fmt::Display) {
        if let Some(dead) = self.detach(generation)
            && self.subscription_mode != SubscriptionMode::Reports
        {
            let mut lost = self.lost_at.lock();
            *lost = Some(Instant::now());
            tracing::warn!(address = dead.address, %reason, "the connection to the store was lost");
        }
    }

    /// Records that there is a connection, and logs it if one was lost before.
    fn on_connected(&self, address: &str) {
        let mut lost = self.lost_at.lock();
        if let Some(lost) = lost.take() {
            let elapsed_ms = lost.elapsed().as_millis();
            tracing::info!(
                address,
                elapsed_ms,
                "the connection to the store was restored"
            );
            self.subscriber.metrics().reconnected();
        }
    }
}

/// The connection to a forgotten node ends with its last user.
impl Drop for Shared {
    fn drop(&mut self) {
        if self.subscription_mode != SubscriptionMode::Restored {
            self.end_all_channels();
        }
    }
}

/// Reports a connection as broken when its task ends, for any reason. That includes the end of its
/// runtime, which the client library does not report.
struct ConnectionEndGuard {
    shared: Weak<Shared>,
    generation: Generation,
}

impl Drop for ConnectionEndGuard {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.upgrade()
            && shared.detach(self.generation).is_some()
        {
            // Not a warning: at the end of a program it ends with its runtime.
            tracing::debug!("a connection to the store ended with its task");
        }
    }
}

/// Returns the handler of the server's push messages.
fn push_handler(
    shared: Weak<Shared>,
    generation: Generation,
) -> impl Fn(PushInfo) -> Result<(), redis::aio::SendError> + Send + Sync + 'static {
    let end_guard = ConnectionEndGuard { shared, generation };
    move |push| {
        let Some(shared) = end_guard.shared.upgrade() else {
            return Err(redis::aio::SendError);
        };
        let channel = as_text(push.data.first());
        match (push.kind, channel) {
            (PushKind::Message | PushKind::SMessage, Some(channel)) => {
                // The server of a former connection may have been replaced since. Its messages wake waiters, but
                // grant nothing.
                let message = as_text(push.data.get(1)).filter(|_| shared.is_live(generation));
                let message = message.and_then(|text| text.parse().ok());
                shared.subscriber.on_message(channel, message.unwrap_or(0));
            }
            (PushKind::SUnsubscribe, Some(channel)) => shared.on_server_unsubscribe(channel),
            // Recorded again, in the server's order: the end of an earlier subscription may have been
            // received after this one was sent.
            (PushKind::SSubscribe, Some(channel)) => {
                shared.record_subscription_on(generation, channel);
            }
            (PushKind::Invalidate, _) => {
                let keys = match push.data.first() {
                    Some(Value::Array(keys)) => Some(keys.as_slice()),
                    _ => None,
                };
                match (&shared.run_id_tracker, keys) {
                    (Some(run_id_tracker), keys) => run_id_tracker.report_changed(keys),
                    (None, Some(keys)) => {
                        let keys = keys.iter().filter_map(|key| as_text(Some(key)));
                        keys.for_each(|key| shared.subscriber.on_changed(Some(key)));
                    }
                    (None, None) => shared.subscriber.on_changed(None),
                }
            }
            (PushKind::Disconnection, _) => shared.connection_lost(generation, &"it was closed"),
            _ => {}
        }
        Ok(())
    }
}
