//! A connection that is opened on demand and replaced when it breaks.
//!
//! 1. It is made when it is needed, by a task that all callers wait for. So a caller that stops
//!    waiting does not restart it for the others.
//! 2. After a failure the next try to connect starts after a random, growing pause ([`Pace`]). A
//!    connection counts as a success with the first answer to a step: one that breaks right after
//!    its handshake is a failure.
//! 3. On a new connection, subscriptions are restored before anything else is sent (only with
//!    [`SubscriptionMode::Restored`]; otherwise they end with their connection).
//! 4. A connection counts as broken when its task ends, for any reason. Waiters for its messages
//!    are woken then, because messages may have been missed, and the watchdog checks the holds at
//!    its server, with growing pauses. The next caller reconnects: so a client that waits or holds
//!    something does soon.
//! 5. If another server can replace this one, its connection can be *invalidated*: every caller
//!    that waits for an answer on it gets an error at once.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::{Notify, Semaphore};
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout_at};

use super::capabilities::Capabilities;
use super::connection_config::ConnectionConfig;
use super::connector::Protocol;
use super::endpoint::{Address, Endpoint};
use super::exchange_error::{ExchangeError, is_unknown_command, not_in_a_cluster};
use super::node_ids::NodeIds;
use super::pace::Pace;
use super::pubsub::{CHANNELS_PER_SUBSCRIBE, SubscriptionMode, subscribing};
use super::run_id_tracker::{RunIdTracker, run_id};
use super::wire::{
    Cmd, Expects, Malformed, Pending, PushHandler, Room, Wire, WireError, WireGuard,
};
use crate::environment::task;
use crate::error::{Cause, Error};
use crate::join::Boxed;
use crate::step::{ErrorReply, ScriptReply};
use crate::store::shared_oneshot::{self, Receiver};
use crate::store::{ServerId, SharedSubscriber, Subscriber};
use crate::sync::Mutex;

/// Limit of the commands without an answer on a connection, besides renewals and releases. A server
/// that does not answer leaves this many in the memory of a client, however many callers try again.
const MAX_UNANSWERED: usize = 2048;

/// How long after a server was left an answer does not end the pauses before connecting.
const SLOWED_DOWN: Duration = Duration::from_secs(1);

pub(super) struct ReconnectingConnection {
    config: ConnectionConfig,
    target: Target,
    /// For commands without an answer.
    room: Arc<Semaphore>,
    connecting: Mutex<Connecting>,
    /// The other connections to the same server, which leave it with this one.
    siblings: Mutex<Vec<Weak<ReconnectingConnection>>>,
    subscriber: SharedSubscriber,
    subscription_mode: SubscriptionMode,
    capabilities: Arc<Capabilities>,
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

/// Where the server of a connection is.
#[derive(Clone)]
pub(super) enum Target {
    /// At one fixed address.
    Fixed(Address),
    /// At one fixed address, where a sentinel is expected.
    Sentinel(Endpoint),
    /// At one address, which leads to another server after a failover.
    Replicated(Address),
    /// At one fixed address, where a node of the cluster with these ids is expected.
    ClusterNode(Endpoint, Arc<Mutex<NodeIds>>),
    /// At an address that a resolver resolves for each connection.
    CurrentMaster(Arc<dyn MasterResolver>),
}

impl Target {
    /// Returns where that is, for messages, as far as is known.
    fn place(&self) -> String {
        match self {
            Target::Fixed(address) | Target::Replicated(address) => format!(" to {address}"),
            Target::Sentinel(at) | Target::ClusterNode(at, _) => format!(" to {at}"),
            Target::CurrentMaster(_) => String::new(),
        }
    }
}

/// Resolves the address of the current master, which may change.
pub(super) trait MasterResolver: Send + Sync {
    /// Returns the current address.
    fn resolve(self: Arc<Self>) -> Boxed<'static, Result<Endpoint, ExchangeError>>;

    /// Returns whether this is the current address, as far as is known.
    fn is_current(&self, endpoint: &Endpoint) -> bool;

    /// Records that the current address leads to a replica.
    fn report_replica(&self);
}

/// The current try to connect. It runs in a task of its own: a caller may stop waiting without
/// restarting it for the others, and all callers get its outcome.
#[derive(Default)]
struct Connecting {
    generation: Generation,
    outcome: Option<Outcome>,
    task: Option<AbortHandle>,
    /// The latest generation that must not be used, even if connecting succeeds.
    invalidated: Generation,
    /// The resolved address of the connection, or of the one being made, if it can change.
    endpoint: Option<Endpoint>,
    /// The server of the latest connection, and what distinguishes it from another one at the
    /// address.
    server: (ServerId, Option<String>),
    /// Connections since the latest answer to a step.
    pace: Pace,
    /// When a server was left that was a replica, or not the one that a sibling has found.
    left_at: Option<Instant>,
    /// Ends a pause.
    retry: Arc<Notify>,
}

type Outcome = Receiver<Result<LiveConnection, ExchangeError>>;

/// Numbers the established connections of a [`ReconnectingConnection`], so that late events of an
/// old one do not end a new one.
pub(super) type Generation = u64;

/// Reason of the failure to connect to a server that is known to be replaced meanwhile.
const REPLACED_WHILE_CONNECTING: &str = "another server replaced this one while connecting";

/// A connection that works, as far as is known.
#[derive(Clone)]
pub(super) struct LiveConnection {
    pub(super) wire: Arc<Wire>,
    pub(super) generation: Generation,
    /// The server at the other end: another one after a failover.
    pub(super) server: ServerId,
    /// Whether it speaks RESP3.
    pub(super) has_resp3: bool,
}

struct Established {
    live: LiveConnection,
    /// For the log.
    address: String,
    /// Ends the connection.
    _guard: WireGuard,
}

impl Established {
    fn is(&self, generation: Generation) -> bool {
        self.live.generation == generation
    }
}

impl ReconnectingConnection {
    pub(super) fn new(
        config: ConnectionConfig,
        target: Target,
        subscriber: SharedSubscriber,
        subscription_mode: SubscriptionMode,
        capabilities: Arc<Capabilities>,
        run_id_tracker: Option<RunIdTracker>,
    ) -> Arc<ReconnectingConnection> {
        Arc::new(ReconnectingConnection {
            config,
            target,
            room: Arc::new(Semaphore::new(MAX_UNANSWERED)),
            connecting: Mutex::default(),
            siblings: Mutex::default(),
            subscriber,
            subscription_mode,
            capabilities,
            live: Mutex::default(),
            channels: Mutex::default(),
            lost_at: Mutex::default(),
            without_sharded_channels: AtomicU64::new(0),
            run_id_tracker,
        })
    }

    /// Makes these connections, possibly with duplicates, leave a server together.
    pub(super) fn join(connections: &[&Arc<ReconnectingConnection>]) {
        for connection in connections {
            let others = connections
                .iter()
                .filter(|other| !Arc::ptr_eq(other, connection));
            let others = others.map(|other| Arc::downgrade(other));
            connection.siblings.lock().extend(others);
        }
    }

    /// Returns a further connection to the same server, for reports to `subscriber`.
    pub(super) fn reports_connection(
        &self,
        subscriber: SharedSubscriber,
    ) -> Arc<ReconnectingConnection> {
        let reports = ReconnectingConnection::new(
            self.config.clone(),
            self.target.clone(),
            subscriber,
            SubscriptionMode::Reports,
            self.capabilities.clone(),
            None,
        );
        let mut siblings = self.siblings.lock();
        siblings.retain(|sibling| sibling.strong_count() > 0);
        siblings.push(Arc::downgrade(&reports));
        drop(siblings);
        reports
    }

    /// Records that another server has replaced the earlier one. It is connected to without a
    /// pause.
    pub(super) fn report_failover(&self) {
        let mut connecting = self.connecting.lock();
        connecting.pace.reset();
        connecting.retry.notify_waiters();
        drop(connecting);
        if let Some(run_id_tracker) = &self.run_id_tracker {
            run_id_tracker.report_replaced();
        }
    }

    /// Records which server process a new connection leads to. Without a tracker, its sibling that has one does that: nothing
    /// else may connect that one soon, and until then the holds that the process may not have are not checked.
    async fn record_run_id(&self, live: LiveConnection) {
        let Some(run_id_tracker) = &self.run_id_tracker else {
            for sibling in self.siblings() {
                if let Some(run_id_tracker) = &sibling.run_id_tracker
                    && Box::pin(sibling.ensure_connected()).await.is_err()
                {
                    // It is not known which process has the attempts that this connection carries.
                    run_id_tracker.record(None);
                }
            }
            return;
        };
        let current = match &self.target {
            // Known from connecting.
            Target::Replicated(_) => self.connecting.lock().server.1.clone(),
            _ => {
                let querying = query_run_id(&live);
                let limit = self.config.connect_timeout;
                let answer = tokio::time::timeout(limit, querying).await;
                answer.ok().and_then(Result::ok).flatten()
            }
        };
        run_id_tracker.record(current);
        if !live.has_resp3 {
            run_id_tracker.cannot_track();
        }
    }

    /// Connects again if the current connection has ended. That may not have been noticed yet: an answer shows that it works. If it
    /// is not known to which server it leads, it may be a former one of the same name that hangs, so it is left without an answer.
    async fn ensure_connected(self: &Arc<Self>) -> Result<(), ExchangeError> {
        let live = self.get_or_connect().await?;
        let asked = live.reply(live.wire.send(&Cmd::of(&["INFO", "server"])));
        let limit = self.config.connect_timeout;
        match tokio::time::timeout(limit, asked).await {
            Ok(Err(_)) => self.discard(&live),
            Err(_) if self.identity().is_none() => _ = self.leave(&live),
            _ => return Ok(()),
        }
        self.get_or_connect().await.map(drop)
    }

    /// Returns the run id of the server process to which this has led last, and the database, if they are known.
    pub(super) fn database(&self) -> Option<(String, i64)> {
        let run_id = match &self.target {
            // Known from connecting.
            Target::Replicated(_) => self.identity(),
            _ => self.run_id_tracker.as_ref()?.run_id(),
        };
        Some((run_id?, self.config.db))
    }

    /// Returns the current connection or makes a new one. Concurrent callers share one try to
    /// connect.
    pub(super) async fn get_or_connect(self: &Arc<Self>) -> Result<LiveConnection, ExchangeError> {
        if let Some(live) = self.live() {
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

    /// Records that a step was answered on this connection.
    pub(super) fn record_answer(&self, live: &LiveConnection) {
        if live.wire.record_answer() && self.is_live(live.generation) {
            let mut connecting = self.connecting.lock();
            // A replica answers reads: each of its connections would be followed by another one at
            // once.
            let lately = |at: Instant| at.elapsed() < SLOWED_DOWN;
            if !connecting.left_at.is_some_and(lately) {
                connecting.pace.reset();
            }
        }
    }

    /// Returns whether there is a connection.
    pub(super) fn is_connected(&self) -> bool {
        self.live.lock().is_some()
    }

    /// Returns the address of the current connection.
    pub(super) fn address(&self) -> Option<String> {
        let live = self.live.lock();
        live.as_ref().map(|established| established.address.clone())
    }

    /// Returns a hint for the timeout error if there is not even a connection.
    pub(super) fn timeout_hint(&self) -> Option<&'static str> {
        (!self.is_connected()).then(|| self.config.timeout_hint())
    }

    /// Returns the address of the current connection, or of the one being made, if it is known and
    /// can change.
    pub(super) fn current_endpoint(&self) -> Option<Endpoint> {
        self.connecting.lock().endpoint.clone()
    }

    /// Joins the current try to connect or starts one, and returns its pending outcome as the
    /// error. Returns the connection if it was just made.
    fn join_connecting(self: &Arc<Self>) -> Result<LiveConnection, Outcome> {
        let mut connecting = self.connecting.lock();
        if let Some(live) = self.live() {
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
            let limit = connection.config.connect_timeout;
            let connected = tokio::time::timeout(limit, connection.connect(generation)).await;
            let connected = connected.unwrap_or_else(|_| {
                Err(ExchangeError::not_executed(format!(
                    "no connection{} within the connect timeout of {limit:?}{}",
                    connection.target.place(),
                    connection.config.timeout_hint()
                )))
            });
            connection.connecting.lock().finished();
            let live = connected.as_ref().ok().cloned();
            sender.send(connected);
            // After the waiting callers got the connection: no caller pays for this round trip.
            if let Some(live) = live {
                connection.record_run_id(live).await;
            }
        }));
        connecting.task = Some(task.abort_handle());
        Err(outcome)
    }

    async fn connect(
        self: &Arc<Self>,
        generation: Generation,
    ) -> Result<LiveConnection, ExchangeError> {
        let (address, endpoint) = match &self.target {
            Target::Fixed(address) | Target::Replicated(address) => (address.clone(), None),
            Target::Sentinel(at) | Target::ClusterNode(at, _) => (Address::Tcp(at.clone()), None),
            Target::CurrentMaster(resolver) => {
                let endpoint = resolver.clone().resolve().await?;
                self.connecting.lock().endpoint = Some(endpoint.clone());
                // A change from now on invalidates this connection.
                if !resolver.is_current(&endpoint) {
                    return Err(ExchangeError::not_executed(REPLACED_WHILE_CONNECTING));
                }
                (Address::Tcp(endpoint.clone()), Some(endpoint))
            }
        };
        let on_push = self.push_handler(generation);
        let metrics = self.subscriber.metrics();
        let mode = self.subscription_mode;
        let connecting = self.config.connect(&address, metrics, on_push, mode);
        let connected = connecting.await.map_err(|failure| match &endpoint {
            Some(endpoint) => failure.refused_by(&format!("master {endpoint}")),
            None => failure,
        });
        let (guard, protocol) = connected?;
        let mut live = LiveConnection {
            wire: guard.wire(),
            generation,
            server: ServerId::default(),
            has_resp3: protocol == Protocol::Resp3,
        };
        if !live.has_resp3 {
            if mode == SubscriptionMode::Reports {
                let reason =
                    "reports of changed keys require RESP3, which it does not support".into();
                return Err(Error::UnsupportedServer { reason }.into());
            }
            self.capabilities.record_subscribes_apart();
        }
        let identity = match &self.target {
            Target::Fixed(address) => Some(address.to_string()),
            Target::Replicated(_) => {
                let (run_id, role) = tokio::join!(query_run_id(&live), live.ask(&["ROLE"]));
                // A server that does not tell counts as a master. A replica answers steps that write nothing, too, from data that
                // may be old or, after a restart, empty.
                if role?.elements().and_then(role_of) == Some("slave") {
                    return Err(ExchangeError::not_executed(leads_to_replica(&address)));
                }
                run_id?
            }
            Target::Sentinel(at) | Target::ClusterNode(at, _) => Some(at.to_string()),
            Target::CurrentMaster(_) => endpoint.as_ref().map(Endpoint::to_string),
        };
        live.server = self.server(identity);
        if let (Target::CurrentMaster(resolver), Some(endpoint)) = (&self.target, &endpoint) {
            is_master(&live, endpoint, &**resolver).await?;
        }
        if let Target::ClusterNode(at, ids) = &self.target {
            is_of_cluster(&live, at, ids).await?;
        }
        let established = Established {
            live: live.clone(),
            address: address.to_string(),
            _guard: guard,
        };
        self.restore(established).await?;
        self.take_siblings_along();
        Ok(live)
    }

    fn push_handler(self: &Arc<Self>, generation: Generation) -> PushHandler {
        let connection = Arc::downgrade(self);
        Box::new(PushReceiver {
            connection,
            generation,
        })
    }

    /// Returns whether this connection leads to the same server as the one with this id did.
    pub(super) fn leads_to(&self, server: ServerId) -> bool {
        self.connecting.lock().server.0 == server
    }

    /// Returns the id of the server: the one of before if it is known to be the same.
    fn server(&self, identity: Option<String>) -> ServerId {
        let (id, latest) = &mut self.connecting.lock().server;
        if identity.is_none() || *latest != identity {
            (*id, *latest) = (ServerId::next(), identity);
        }
        *id
    }

    /// Subscribes to all restored channels, and then makes the connection available.
    async fn restore(&self, established: Established) -> Result<(), ExchangeError> {
        let live = established.live.clone();
        let mut restored = BTreeSet::new();
        if self.subscription_mode == SubscriptionMode::Restored {
            match self.capabilities.subscribes_apart() {
                true => self.end_all_channels(),
                false => restored.clone_from(&self.channels.lock()),
            }
        }
        let channels: Vec<&str> = restored.iter().map(String::as_str).collect();
        live.resubscribe(&channels, &*self.subscriber).await?;
        let address = established.address.clone();
        {
            let connecting = self.connecting.lock();
            if connecting.invalidated >= live.generation {
                return Err(ExchangeError::not_executed(REPLACED_WHILE_CONNECTING));
            }
            let channels = self.channels.lock();
            let unwanted = restored.difference(&channels).map(String::as_str);
            let unwanted: Vec<&str> = unwanted.collect();
            // Before the first use, also end subscriptions that have become unwanted meanwhile. A
            // channel that becomes wanted again is subscribed to behind that.
            if !unwanted.is_empty() {
                let mode = self.subscription_mode;
                drop(live.send(subscribing(false, mode, &unwanted), None));
            }
            *self.live.lock() = Some(established);
        }
        // Nobody else notices an end that came before the connection was live.
        if live.wire.has_ended() {
            self.discard(&live);
            return Err(live.ended(false));
        }
        self.on_connected(&address);
        Ok(())
    }

    /// Makes every later connection subscribe to a channel, where subscriptions are restored.
    pub(super) fn subscribe_on_reconnect(&self, channel: &str) {
        if self.subscription_mode == SubscriptionMode::Restored {
            self.record_subscription(channel);
        }
    }

    /// Subscribes to a channel on the current connection or a new one.
    pub(super) async fn connect_and_subscribe(
        self: &Arc<Self>,
        channel: &str,
    ) -> Result<(), ExchangeError> {
        let room = self.room().await;
        let live = self.get_or_connect().await?;
        self.record_subscribing(live.generation, channel)?;
        let subscribed = self.set_subscribed(&live, true, channel, room).await;
        self.subscribed(&live, channel, &subscribed);
        subscribed?;
        self.record_answer(&live);
        Ok(())
    }

    /// Handles the answer to a subscription on this connection.
    pub(super) fn subscribed(
        &self,
        live: &LiveConnection,
        channel: &str,
        answer: &Result<(), ExchangeError>,
    ) {
        use ExchangeError::{Busy, NotExecuted, Unanswered};
        let Err(failure) = answer else { return };
        // A failure that passes changes nothing: other requests may have subscribed before, and the last waiter ends the
        // subscription.
        let passes = matches!(failure, Unanswered(_) | NotExecuted(_) | Busy(_));
        if passes || self.end_without_login(live, failure) {
            return;
        }
        // The server refused it, so there is nothing to end, and nothing to restore on later connections. If it refuses for good,
        // waiters that have subscribed before repeat their requests, and get the reason.
        if self.channels.lock().remove(channel) && failure.is_permanent() {
            self.subscriber.on_unsubscribed(channel);
        }
    }

    /// Ends this connection if the failure says that its login has ended: the next one logs in again. It leads to the same
    /// server, so a step that waits on this one behind a new login must not be executed after its release on the next one.
    /// Returns whether the failure says that.
    pub(super) fn end_without_login(&self, live: &LiveConnection, failure: &ExchangeError) -> bool {
        let has_ended = matches!(
            failure,
            ExchangeError::Permanent(Error::AuthenticationFailed { .. })
        );
        if has_ended {
            self.discard(live);
        }
        has_ended
    }

    /// Ends the subscription of a channel, if there may be one, here and on the current connection.
    pub(super) async fn unsubscribe(&self, channel: &str) -> Result<(), ExchangeError> {
        if !self.channels.lock().remove(channel) {
            return Ok(());
        }
        match self.live() {
            Some(live) => self.set_subscribed(&live, false, channel, None).await,
            None => Ok(()),
        }
    }

    /// Subscribes to a channel on this connection, or ends its subscription.
    async fn set_subscribed(
        &self,
        live: &LiveConnection,
        subscribed: bool,
        channel: &str,
        room: Option<Room>,
    ) -> Result<(), ExchangeError> {
        let mode = match self.subscription_mode {
            SubscriptionMode::Sharded if self.lacks_sharded_channels(live.generation) => {
                SubscriptionMode::Unrestored
            }
            mode => mode,
        };
        let how = |mode| subscribing(subscribed, mode, &[channel]);
        let mut answer = live.answer(live.send(how(mode), room)).await?;
        if let Some(error) = &answer
            && mode == SubscriptionMode::Sharded
            && is_unknown_command(&error.to_string())
        {
            let newest = &self.without_sharded_channels;
            newest.fetch_max(live.generation, Ordering::Relaxed);
            let subscribe = how(SubscriptionMode::Unrestored);
            answer = live.answer(live.send(subscribe, None)).await?;
        }
        accepted(answer, channel)
    }

    /// Handles that the server runs no commands on this connection, because it has subscriptions:
    /// from now on they have one of their own. Their waiters ask again.
    pub(super) fn subscribe_apart(&self, live: &LiveConnection) {
        self.record_subscribes_apart();
        self.leave(live);
    }

    /// Handles that a connection with subscriptions runs no commands. The waiters ask again.
    fn record_subscribes_apart(&self) {
        self.capabilities.record_subscribes_apart();
        self.end_all_channels();
    }

    /// Returns whether the server of this connection is known to have no sharded channels. An
    /// updated server has another connection.
    fn lacks_sharded_channels(&self, generation: Generation) -> bool {
        self.without_sharded_channels.load(Ordering::Relaxed) == generation
    }

    /// Returns whether there is a connection to a server that is known to have no sharded channels.
    pub(super) fn is_without_sharded_channels(&self) -> bool {
        let live = self.live.lock();
        live.as_ref()
            .is_some_and(|established| self.lacks_sharded_channels(established.live.generation))
    }

    /// Ends all subscriptions if one of these channels belongs to another node now. A server with
    /// sharded channels does that by itself.
    pub(super) fn end_moved_subscriptions(&self, has_moved: impl Fn(&str) -> bool) {
        let has_moved = |channel: &String| has_moved(channel);
        if self.is_without_sharded_channels() && self.channels.lock().iter().any(has_moved) {
            self.invalidate();
        }
    }

    /// Sends one command so that the server reports later changes of its keys. Each time from the
    /// start, because a new connection starts without.
    pub(super) async fn query_tracked(
        &self,
        live: &LiveConnection,
        cmd: &Cmd,
        room: Option<Room>,
    ) -> Result<ScriptReply, ExchangeError> {
        let on = Cmd::of(&["CLIENT", "TRACKING", "ON", "OPTIN", "NOLOOP"]);
        let next = Cmd::of(&["CLIENT", "CACHING", "YES"]);
        let commands = [&on, &next, cmd].map(|cmd| (cmd, Expects::Reply));
        let [on, next, sent] = live.wire.send_all(commands, room);
        let asked = async { Ok([live.reply(on).await?, live.reply(next).await?]) };
        let asked: Result<_, ExchangeError> = asked.await;
        if let Some(run_id_tracker) = &self.run_id_tracker {
            run_id_tracker.tracked(asked.as_ref().ok().map(|answers| answers.as_slice()));
        }
        live.reply(sent).await
    }

    /// Waits for room for one more command. Boxed: it seldom has to wait.
    pub(super) async fn room(&self) -> Option<Room> {
        match self.room.clone().try_acquire_owned() {
            Ok(room) => Some(room),
            Err(_) => Box::pin(self.room.clone().acquire_owned()).await.ok(),
        }
    }

    /// Returns whether the server is asked to report changes of keys, on this connection.
    pub(super) fn is_tracking(&self, live: &LiveConnection) -> bool {
        let run_id_tracker = self.run_id_tracker.as_ref();
        live.has_resp3 && run_id_tracker.is_some_and(RunIdTracker::is_tracking)
    }

    /// Stops using this connection, in any state. A connection that has replaced it stays in use.
    pub(super) fn discard(&self, live: &LiveConnection) {
        drop(self.detach(live.generation));
    }

    /// Stops using this connection, because its server is a replica: the next one may lead to the
    /// master. Its siblings leave that server, too: waiters must not go on listening where no
    /// messages may arrive.
    pub(super) fn leave_replica(&self, live: &LiveConnection) {
        // A late refusal says nothing about the server of the next connection.
        if !self.leave(live) {
            return;
        }
        if let Target::CurrentMaster(resolver) = &self.target {
            resolver.report_replica();
        }
        let server = self.identity();
        self.slow_down();
        for sibling in self.siblings() {
            if sibling.identity() == server {
                sibling.slow_down();
                sibling.leave_current();
            }
        }
    }

    /// Makes the siblings leave their server after this connection was made, if this one may lead
    /// to another: that of before may be cut off, and no longer tell its waiters anything.
    fn take_siblings_along(&self) {
        let server = self.identity();
        let with_attempts = self.subscription_mode == SubscriptionMode::Restored;
        for sibling in self.siblings() {
            if sibling.identity() != server {
                self.slow_down();
                sibling.slow_down();
                sibling.leave_current();
            } else if with_attempts && sibling.subscription_mode == SubscriptionMode::Apart {
                // Not every address tells which server it leads to. So subscriptions are renewed
                // with the attempts, as if they were on one connection.
                sibling.leave_current();
            }
        }
    }

    fn siblings(&self) -> Vec<Arc<ReconnectingConnection>> {
        let siblings = self.siblings.lock();
        siblings.iter().filter_map(Weak::upgrade).collect()
    }

    /// Returns what distinguishes the server of the latest connection from another one.
    fn identity(&self) -> Option<String> {
        self.connecting.lock().server.1.clone()
    }

    /// Keeps answers from ending the pauses before connecting for a while: the next connection may
    /// lead to a replica, or to a server that is left again.
    fn slow_down(&self) {
        self.connecting.lock().left_at = Some(Instant::now());
    }

    fn leave_current(&self) {
        if let Some(live) = self.live() {
            self.leave(&live);
        }
    }

    /// Stops using this connection. What was sent on it is still answered: else its callers would
    /// not know whether this server refused that. Returns whether it was in use.
    pub(super) fn leave(&self, live: &LiveConnection) -> bool {
        let Some(dead) = self.detach(live.generation) else {
            return false;
        };
        let limit = self.config.connect_timeout;
        tokio::spawn(task(async move {
            let answered = async {
                let wire = &dead.live.wire;
                while !wire.is_idle() {
                    // Behind all that is sent by now; steps that waited to be packed come behind
                    // it.
                    wire.send(&Cmd::of(&["PING"])).await;
                }
            };
            let _ = tokio::time::timeout(limit, answered).await;
            drop(dead);
        }));
        true
    }

    /// Stops using the connection, in any state, including a pending one. Everything that waits for
    /// it, or for an answer on it, fails.
    pub(super) fn invalidate(&self) {
        let mut connecting = self.connecting.lock();
        // The task may be too far to be aborted.
        connecting.invalidated = connecting.generation;
        connecting.endpoint = None;
        if let Some(task) = connecting.task.take() {
            task.abort();
        }
        drop(connecting);
        if let Some(live) = self.live() {
            self.discard(&live);
        }
    }

    pub(super) fn live(&self) -> Option<LiveConnection> {
        let live = self.live.lock();
        live.as_ref().map(|established| established.live.clone())
    }

    pub(super) fn is_live(&self, generation: Generation) -> bool {
        let live = self.live.lock();
        live.as_ref().is_some_and(|live| live.is(generation))
    }

    fn record_subscription(&self, channel: &str) {
        let mut channels = self.channels.lock();
        if !channels.contains(channel) {
            channels.insert(channel.to_owned());
        }
    }

    /// Records that a channel is about to be subscribed to on this connection, so that the
    /// subscription can be ended if the caller goes away. (Where subscriptions are restored, that
    /// is recorded before.) Fails if the connection, with its subscriptions, has ended or was left meanwhile.
    pub(super) fn record_subscribing(
        &self,
        generation: Generation,
        channel: &str,
    ) -> Result<(), ExchangeError> {
        let live = self.live.lock();
        if live.as_ref().is_none_or(|live| !live.is(generation)) {
            let reason = "the connection has ended meanwhile";
            return Err(ExchangeError::not_executed(reason));
        }
        self.record_subscription(channel);
        Ok(())
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

    /// Handles the end of a connection in use: all waiters for its messages must check the store
    /// again. Returns the connection; dropping it ends a task.
    fn detach(&self, generation: Generation) -> Option<Established> {
        let dead = self.live.lock().take_if(|live| live.is(generation));
        if dead.is_some() {
            match self.subscription_mode {
                SubscriptionMode::Restored | SubscriptionMode::Reports => {
                    self.subscriber.on_disconnect();
                }
                SubscriptionMode::Unrestored
                | SubscriptionMode::Sharded
                | SubscriptionMode::Apart => self.end_all_channels(),
            }
        }
        dead
    }

    /// The same for a connection that the network or the server ended. Logged once, not for each
    /// later failure to connect.
    fn connection_lost(&self, generation: Generation, reason: &dyn std::fmt::Display) {
        if let Some(dead) = self.detach(generation)
            && self.subscription_mode != SubscriptionMode::Reports
        {
            *self.lost_at.lock() = Some(Instant::now());
            let address = dead.address;
            match self.target {
                // No outage: others may watch the master, and its own connections remain.
                Target::Sentinel(_) => {
                    tracing::info!(address, %reason, "the connection to a sentinel was lost");
                }
                _ => tracing::warn!(address, %reason, "the connection to the store was lost"),
            }
            self.check_holds();
        }
    }

    /// Has the holds at the server checked, after the end of a connection.
    fn check_holds(&self) {
        if let Some(run_id_tracker) = &self.run_id_tracker {
            run_id_tracker.disconnected();
        }
    }

    /// Records that there is a connection, and logs it if one was lost before.
    fn on_connected(&self, address: &str) {
        if let Some(lost) = self.lost_at.lock().take() {
            let elapsed_ms = lost.elapsed().as_millis();
            match self.target {
                Target::Sentinel(_) => {
                    tracing::info!(
                        address,
                        elapsed_ms,
                        "the connection to a sentinel was restored"
                    );
                }
                _ => tracing::info!(
                    address,
                    elapsed_ms,
                    "the connection to the store was restored"
                ),
            }
            self.subscriber.metrics().reconnected();
        }
    }
}

/// The connection was invalidated, or broke, before the answer arrived.
pub(super) fn connection_ended() -> ExchangeError {
    ExchangeError::Unanswered("the connection ended before the answer arrived".into())
}

/// Returns the error of an [`answer`](LiveConnection::answer) to a subscription that is an error reply.
pub(super) fn accepted(answer: Option<ErrorReply>, channel: &str) -> Result<(), ExchangeError> {
    answer.map_or(Ok(()), |error| {
        let refused = ExchangeError::from_reply(&error, "");
        Err(refused.naming("channel", std::iter::once(channel)))
    })
}

impl LiveConnection {
    fn send(&self, (cmd, expects): (Cmd, Expects), room: Option<Room>) -> Pending {
        let [sent] = self.wire.send_all([(&cmd, expects)], room);
        sent
    }

    /// Sends a command. `asking`: the node does not own the slot yet, but the slot's owner has
    /// redirected to it (ASK).
    pub(super) fn start(&self, cmd: &Cmd, asking: bool, room: Option<Room>) -> Pending {
        let cmd = (cmd, Expects::Reply);
        match asking {
            true => {
                let asking = (&Cmd::of(&["ASKING"]), Expects::Reply);
                let [_, sent] = self.wire.send_all([asking, cmd], room);
                sent
            }
            false => {
                let [sent] = self.wire.send_all([cmd], room);
                sent
            }
        }
    }

    /// Sends a command, and waits for its answer. An error reply is an error.
    pub(super) async fn query(&self, cmd: &Cmd) -> Result<ScriptReply, ExchangeError> {
        match self.reply(self.wire.send(cmd)).await? {
            ScriptReply::Error(error) => Err(ExchangeError::from_reply(&error, "")),
            answer => Ok(answer),
        }
    }

    /// Asks the server something before a step is sent. The answer may be an error reply, but none that passes: a server
    /// that loads its data or runs a long script says nothing about itself.
    async fn ask(&self, words: &[&str]) -> Result<ScriptReply, ExchangeError> {
        let answer = self.reply(self.wire.send(&Cmd::of(words))).await;
        match answer.map_err(ExchangeError::before_the_step)? {
            ScriptReply::Error(error) if !ExchangeError::from_reply(&error, "").is_permanent() => {
                Err(ExchangeError::not_executed(error.to_string()))
            }
            answer => Ok(answer),
        }
    }

    /// Waits for an answer that is an error, or needs no closer look.
    pub(super) async fn answer(&self, sent: Pending) -> Result<Option<ErrorReply>, ExchangeError> {
        match self.reply(sent).await? {
            ScriptReply::Error(error) => Ok(Some(error)),
            _ => Ok(None),
        }
    }

    pub(super) async fn reply(&self, sent: Pending) -> Result<ScriptReply, ExchangeError> {
        let answered = sent.await;
        let sent = answered.sent_at.is_some();
        answered.reply.ok_or_else(|| self.ended(sent))
    }

    /// Returns the error of a command on a connection that has ended.
    pub(super) fn ended(&self, sent: bool) -> ExchangeError {
        let reason = self.wire.end_reason();
        let cause = Cause::new(reason.to_string(), reason);
        match sent {
            true => ExchangeError::Unanswered(cause),
            false => ExchangeError::NotExecuted(cause),
        }
    }

    /// Restores subscriptions before the connection is used. A refusal for good affects only its channel, whose waiters ask
    /// again and get the error.
    ///
    /// The time to connect is limited, so it sends all commands before it awaits the first answer.
    async fn resubscribe(
        &self,
        channels: &[&str],
        subscriber: &dyn Subscriber,
    ) -> Result<(), ExchangeError> {
        let subscribe = |channels: &[&str]| {
            self.send(
                subscribing(true, SubscriptionMode::Restored, channels),
                None,
            )
        };
        let chunks = channels.chunks(CHANNELS_PER_SUBSCRIBE);
        let sent: Vec<_> = chunks.map(|chunk| (chunk, subscribe(chunk))).collect();
        let mut single = Vec::new();
        for (chunk, sent) in sent {
            if self.refused(sent).await?.is_some() {
                single.extend(chunk.iter().map(|channel| (channel, subscribe(&[channel]))));
            }
        }
        for (channel, sent) in single {
            if let Some(error) = self.refused(sent).await? {
                tracing::warn!(%channel, %error, "a subscription was refused");
                subscriber.on_unsubscribed(channel);
            }
        }
        Ok(())
    }

    /// Returns the error if a subscription is refused for good. Without subscriptions that are refused for now, as by a server
    /// that runs a long script, the connection is of no use.
    async fn refused(&self, sent: Pending) -> Result<Option<ErrorReply>, ExchangeError> {
        let answer = self.answer(sent).await;
        match answer.map_err(ExchangeError::before_the_step)? {
            Some(error) if !ExchangeError::from_reply(&error, "").is_permanent() => {
                Err(ExchangeError::not_executed(error.to_string()))
            }
            answer => Ok(answer),
        }
    }
}

/// Queries which server process a connection leads to. `None`: the server does not report it.
async fn query_run_id(live: &LiveConnection) -> Result<Option<String>, ExchangeError> {
    Ok(run_id(&live.ask(&["INFO", "server"]).await?))
}

/// Checks the role of a server that sentinels call the master. It may be a former or a future
/// master: then it reports that to the resolver, which queries the sentinels again.
async fn is_master(
    live: &LiveConnection,
    endpoint: &Endpoint,
    resolver: &dyn MasterResolver,
) -> Result<(), ExchangeError> {
    let role = live.ask(&["ROLE"]).await?;
    match &role {
        role if is_role_of_master(role) => Ok(()),
        ScriptReply::List(_) => {
            resolver.report_replica();
            Err(ExchangeError::not_executed(format!(
                "{endpoint} is the master according to the sentinels, but is a replica"
            )))
        }
        ScriptReply::Error(error) => Err(ExchangeError::from_reply(error, "")),
        other => Err(ExchangeError::Permanent(Error::UnsupportedServer {
            reason: format!("its reply to ROLE contains no role: {other:?}"),
        })),
    }
}

/// What is wrong with an address whose server is a replica.
pub(super) fn leads_to_replica(address: impl std::fmt::Display) -> String {
    format!("{address} leads to a replica, and must lead to a master")
}

/// Returns whether this is a master's reply to ROLE.
pub(super) fn is_role_of_master(role: &ScriptReply) -> bool {
    role.elements().and_then(role_of) == Some("master")
}

fn role_of(reply: &[ScriptReply]) -> Option<&str> {
    reply.first().and_then(ScriptReply::as_text)
}

/// Checks the id of a node of a cluster. A user without the right to query it cannot notice that
/// the address was reused.
async fn is_of_cluster(
    live: &LiveConnection,
    at: &Endpoint,
    ids: &Mutex<NodeIds>,
) -> Result<(), ExchangeError> {
    let id = live.ask(&["CLUSTER", "MYID"]).await?;
    if let ScriptReply::Error(error) = &id {
        let message = error.to_string();
        return match error.code() {
            "NOPERM" => Ok(()),
            _ if is_unknown_command(&message) => Ok(()),
            // Later another server may have a node's address for a while.
            "ERR" if ids.lock().is_empty() => Err(not_in_a_cluster()),
            // Perhaps for now: a node that loads its data may be one of another cluster.
            _ => Err(ExchangeError::not_executed(message)),
        };
    }
    match id.as_text() {
        Some(id) if !ids.lock().accepts_node(at, id, Instant::now()) => {
            let reason = format!("{at} is now the address of a node of another cluster");
            Err(ExchangeError::not_executed(reason))
        }
        _ => Ok(()),
    }
}

impl Connecting {
    /// Handles the end of a try to connect. It is no success before a step was answered.
    fn finished(&mut self) {
        // The waiting callers have it. Keeping it here would keep an invalidated connection open.
        self.outcome = None;
        self.pace.failed(Instant::now());
    }
}

/// The connection to a forgotten node ends with its last user.
impl Drop for ReconnectingConnection {
    fn drop(&mut self) {
        if self.subscription_mode != SubscriptionMode::Restored {
            self.end_all_channels();
        }
    }
}

/// Receives the messages of one connection, and its end.
struct PushReceiver {
    connection: Weak<ReconnectingConnection>,
    generation: Generation,
}

impl super::wire::OnPush for PushReceiver {
    fn on_push(&self, message: &[ScriptReply]) {
        let Some(connection) = self.connection.upgrade() else {
            return;
        };
        let generation = self.generation;
        let text = |at: usize| message.get(at).and_then(ScriptReply::as_text);
        match (text(0), text(1)) {
            (Some("message" | "smessage"), Some(channel)) => {
                // The server of a former connection may have been replaced since. Its messages wake
                // waiters, but grant nothing.
                let message = text(2).filter(|_| connection.is_live(generation));
                connection
                    .subscriber
                    .on_message(channel, message.unwrap_or_default());
            }
            // A connection that was left does not end the subscription of its successor.
            (Some("sunsubscribe"), Some(channel)) if connection.is_live(generation) => {
                connection.on_server_unsubscribe(channel);
            }
            // Recorded again, in the server's order: the end of an earlier subscription may have
            // been received after this one was sent.
            (Some("ssubscribe"), Some(channel)) => {
                let _ = connection.record_subscribing(generation, channel);
            }
            (Some("invalidate"), _) => {
                let keys = message.get(1).and_then(ScriptReply::elements);
                match (&connection.run_id_tracker, keys) {
                    (Some(run_id_tracker), keys) => run_id_tracker.report_changed(keys),
                    (None, Some(keys)) => {
                        let keys = keys.iter().filter_map(ScriptReply::as_text);
                        keys.for_each(|key| connection.subscriber.on_changed(Some(key)));
                    }
                    (None, None) => connection.subscriber.on_changed(None),
                }
            }
            _ => {}
        }
    }

    fn on_end(&self, error: &WireError) {
        let Some(connection) = self.connection.upgrade() else {
            return;
        };
        if let WireError::Malformed(Malformed {
            is_message: true, ..
        }) = error
        {
            connection.record_subscribes_apart();
        }
        match error {
            // This client has ended it. Or the runtime has ended, which is no reason for a warning:
            // it is the end of a program.
            WireError::Ended if connection.detach(self.generation).is_some() => {
                tracing::debug!("a connection to the store ended with its task");
                connection.check_holds();
            }
            WireError::Ended => {}
            error => connection.connection_lost(self.generation, error),
        }
    }
}

#[cfg(test)]
mod tests {
    use redlatch_testkit::{Proxy, Server};

    use super::super::options::ReplicaSync;
    use super::super::refusing_proxy::{RefusingProxy, attempt, pubsub_of};
    use super::*;
    use crate::Client;
    use crate::metrics::Metrics;
    use crate::store::{Delivery, Progress};
    use crate::wait::ChannelMap;

    /// Waits until the server has this number of subscribers of `c`.
    async fn until_subscribed(server: &Server, subscribers: u32) {
        until_subscribed_to(server, "c", subscribers).await;
    }

    async fn until_subscribed_to(server: &Server, channel: &str, subscribers: u32) {
        let subscribers_of = || {
            server
                .command::<(String, u32)>(&["PUBSUB", "NUMSUB", channel])
                .1
        };
        within_limit(async {
            while subscribers_of() != subscribers {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        })
        .await;
    }

    async fn within_limit(work: impl Future<Output = ()>) {
        let limit = Duration::from_secs(30);
        tokio::time::timeout(limit, work).await.unwrap();
    }

    /// A node that is loading its data may be one of another cluster.
    #[tokio::test]
    async fn node_that_does_not_tell_its_id_yet_is_not_used() {
        let server = Server::start();
        let command = ["CLUSTER", "MYID"];
        for (error, is_used) in [
            ("LOADING Redis is loading the dataset in memory", false),
            ("BUSY Redis is busy running a script.", false),
            ("ERR This instance has cluster support disabled", false),
            (
                "NOPERM this user has no permissions to run the 'cluster|myid' command",
                true,
            ),
            (
                "ERR unknown command 'CLUSTER', with args beginning with: 'MYID'",
                true,
            ),
        ] {
            let proxy = RefusingProxy::start(&server, &command, error).await;
            let client = proxy.client().await;
            let pubsub = pubsub_of(&client);
            let at = Endpoint::new("127.0.0.1", proxy.port);
            let node = ReconnectingConnection::new(
                pubsub.config.clone(),
                Target::ClusterNode(at, Arc::default()),
                pubsub.subscriber.clone(),
                SubscriptionMode::Unrestored,
                Arc::default(),
                None,
            );
            let connected = node.get_or_connect().await;
            assert_eq!(connected.is_ok(), is_used, "{error}: {:?}", connected.err());
            assert_eq!(proxy.refused(), 1);
        }
    }

    /// Permits that the former master granted must not be released to the next one.
    #[tokio::test]
    async fn server_process_behind_a_fixed_address_is_recognized() {
        let mut server = Server::start();
        let settings = Client::builder().replica_sync(ReplicaSync::AtLeast(1));
        let pubsub = pubsub_of(&settings.connect(&server.url()).await.unwrap());
        let first = pubsub.get_or_connect().await.unwrap();
        pubsub.discard(&first);
        let same = pubsub.get_or_connect().await.unwrap();
        assert!(same.server == first.server && pubsub.leads_to(first.server));
        server.kill();
        server.restart();
        pubsub.discard(&same);
        let other = pubsub.get_or_connect().await.unwrap();
        assert!(other.server != first.server && !pubsub.leads_to(first.server));
    }

    /// What was sent is refused or executed, and its caller learns which.
    #[tokio::test]
    async fn commands_in_flight_at_a_replica_are_answered() {
        let server = Server::start();
        let pubsub = pubsub_of(&Client::connect(&server.url()).await.unwrap());
        let live = pubsub.get_or_connect().await.unwrap();
        let sent = live.wire.send(&Cmd::of(&["PING"]));
        pubsub.leave_replica(&live);
        assert!(!pubsub.is_connected());
        let later = live.wire.send(&Cmd::of(&["PING"]));
        assert!(live.reply(sent).await.is_ok() && live.reply(later).await.is_ok());
        pubsub.get_or_connect().await.unwrap();
        within_limit(async {
            while !live.wire.has_ended() {
                tokio::task::yield_now().await;
            }
        })
        .await;
    }

    /// Several requests subscribe to a channel. One of them comes to a connection that has just
    /// ended.
    #[tokio::test]
    async fn subscription_that_is_not_sent_does_not_end_that_of_another_request() {
        let server = Server::start();
        let pubsub = pubsub_of(&Client::connect(&server.url()).await.unwrap());
        pubsub.subscribe_on_reconnect("c");
        pubsub.connect_and_subscribe("c").await.unwrap();
        let ended = pubsub.get_or_connect().await.unwrap();
        pubsub.discard(&ended);
        until_subscribed(&server, 0).await;
        let failed = pubsub.set_subscribed(&ended, true, "c", None).await;
        assert!(
            matches!(failed, Err(ExchangeError::NotExecuted(_))),
            "{failed:?}"
        );
        pubsub.subscribed(&ended, "c", &failed);
        pubsub.get_or_connect().await.unwrap();
        until_subscribed(&server, 1).await;
    }

    /// A new connection to a server that runs a long script has no subscriptions, so nobody gets
    /// it.
    #[tokio::test]
    async fn subscriptions_refused_for_now_are_restored_later() {
        let server = Server::start();
        let command = ["SUBSCRIBE", "c"];
        let proxy = RefusingProxy::start(&server, &command, "BUSY a script runs").await;
        proxy.refuse(None);
        let pubsub = pubsub_of(&proxy.client().await);
        pubsub.subscribe_on_reconnect("c");
        pubsub.connect_and_subscribe("c").await.unwrap();
        proxy.refuse(Some("BUSY a script runs"));
        let live = pubsub.get_or_connect().await.unwrap();
        pubsub.discard(&live);
        let failed = pubsub.get_or_connect().await;
        assert!(failed.is_err() && proxy.refused() > 0);
        proxy.refuse(None);
        pubsub.get_or_connect().await.unwrap();
        until_subscribed(&server, 1).await;
    }

    /// The user's channels have changed. Else the waiter would sleep until the lease that it knows ends.
    #[tokio::test]
    async fn waiter_learns_that_its_subscription_is_refused_later() {
        let server = Server::start();
        let command = ["SUBSCRIBE", "redisson_lock__channel:{refused}"];
        let holder = Client::connect(&server.url()).await.unwrap();
        let request = holder
            .lock("refused")
            .lock()
            .lease(Duration::from_secs(600));
        let _held = request.await.unwrap();
        for reconnects in [true, false] {
            let proxy = RefusingProxy::start(&server, &command, "").await;
            proxy.refuse(None);
            let client = proxy.client().await;
            let (lock, pubsub) = (client.lock("refused"), pubsub_of(&client));
            let waiting = tokio::spawn(async move { lock.lock().await.map(|_| ()) });
            until_subscribed_to(&server, command[1], 1).await;
            proxy.refuse(Some("NOPERM no permissions to access a channel"));
            let live = pubsub.get_or_connect().await.unwrap();
            match reconnects {
                true => pubsub.discard(&live),
                // By another request that subscribes.
                false => drop(pubsub.connect_and_subscribe(command[1]).await.unwrap_err()),
            }
            let limit = Duration::from_secs(30);
            let refused = tokio::time::timeout(limit, waiting).await.unwrap();
            let refused = refused.unwrap().unwrap_err();
            assert!(matches!(refused, Error::NotPermitted { .. }), "{refused:?}");
        }
    }

    /// The login ends. One request that subscribes learns of it, and the subscription of another one is restored.
    #[tokio::test]
    async fn subscription_is_restored_after_one_that_had_no_login() {
        let server = Server::start();
        let proxy = RefusingProxy::start(&server, &["SUBSCRIBE", "c"], "").await;
        proxy.refuse(None);
        let pubsub = pubsub_of(&proxy.client().await);
        pubsub.subscribe_on_reconnect("c");
        pubsub.connect_and_subscribe("c").await.unwrap();
        proxy.refuse(Some("NOAUTH Authentication required."));
        pubsub.connect_and_subscribe("c").await.unwrap_err();
        until_subscribed(&server, 0).await;
        proxy.refuse(None);
        pubsub.get_or_connect().await.unwrap();
        until_subscribed(&server, 1).await;
    }

    /// Behind one name, a server that is busy may be a replica, or another one.
    #[tokio::test]
    async fn server_that_does_not_tell_its_role_or_run_id_yet_is_not_used() {
        let server = Server::start();
        for (error, is_used) in [
            ("BUSY Redis is busy running a script.", false),
            ("LOADING Redis is loading the dataset in memory", false),
            ("NOPERM this user has no permissions", true),
            ("ERR unknown command", true),
        ] {
            for command in [&["ROLE"][..], &["INFO", "server"]] {
                let proxy = RefusingProxy::start(&server, command, error).await;
                proxy.refuse(None);
                let pubsub = pubsub_of(&proxy.client().await);
                let address = Address::Tcp(Endpoint::new("127.0.0.1", proxy.port));
                proxy.refuse(Some(error));
                let connection = ReconnectingConnection::new(
                    pubsub.config.clone(),
                    Target::Replicated(address),
                    pubsub.subscriber.clone(),
                    SubscriptionMode::Unrestored,
                    Arc::default(),
                    None,
                );
                let connected = connection.get_or_connect().await;
                assert_eq!(connected.is_ok(), is_used, "{error}: {:?}", connected.err());
                assert!(proxy.refused() > 0);
            }
        }
    }

    /// Reports a replica as the master, and counts how often a connection finds that out.
    struct WrongResolver {
        endpoint: Endpoint,
        told: AtomicU64,
    }

    impl MasterResolver for WrongResolver {
        fn resolve(self: Arc<Self>) -> Boxed<'static, Result<Endpoint, ExchangeError>> {
            Box::pin(std::future::ready(Ok(self.endpoint.clone())))
        }

        fn is_current(&self, _: &Endpoint) -> bool {
            true
        }

        fn report_replica(&self) {
            self.told.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Else the sentinels are asked seconds later, if their message was lost.
    #[tokio::test]
    async fn connection_that_finds_a_replica_in_place_of_the_master_reports_it() {
        let (server, replica) = (Server::start(), Server::start());
        let port = server.port().to_string();
        let _: String = replica.command(&["REPLICAOF", "127.0.0.1", &port]);
        let resolver = Arc::new(WrongResolver {
            endpoint: Endpoint::new("127.0.0.1", replica.port()),
            told: AtomicU64::new(0),
        });
        let client = Client::connect(&server.url()).await.unwrap();
        let attempts = pubsub_of(&client);
        let connection = ReconnectingConnection::new(
            attempts.config.clone(),
            Target::CurrentMaster(resolver.clone()),
            attempts.subscriber.clone(),
            SubscriptionMode::Unrestored,
            Arc::default(),
            None,
        );
        let refused = connection.get_or_connect().await.err().unwrap();
        assert!(
            format!("{refused:?}").contains("is a replica"),
            "{refused:?}"
        );
        assert_eq!(resolver.told.load(Ordering::Relaxed), 1);
    }

    /// The answer to an acquisition comes when the client uses another connection, which may lead to another server.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn master_that_was_left_confirms_nothing() {
        let (server, replica) = (Server::start(), Server::start());
        let port = server.port().to_string();
        let _: String = server.command(&["CONFIG", "SET", "repl-diskless-sync-delay", "0"]);
        let _: String = replica.command(&["REPLICAOF", "127.0.0.1", &port]);
        let limit = Duration::from_secs(30);
        let settings = Client::builder()
            .replica_sync(ReplicaSync::AtLeast(1))
            .replica_timeout(limit)
            .response_timeout(limit);
        let client = settings.connect(&server.url()).await.unwrap();
        let attempts = pubsub_of(&client);
        let live = attempts.get_or_connect().await.unwrap();
        // The server knows the script from now on.
        drop(client.lock("first").lock().await.unwrap());
        client.flush().await;
        let before = server.calls("evalsha:");
        server.freeze();
        let lock = client.lock("left");
        let acquiring = tokio::spawn(async move { lock.try_lock().await });
        while live.wire.is_idle() {
            tokio::task::yield_now().await;
        }
        assert!(attempts.leave(&live));
        server.thaw();
        let refused = acquiring.await.unwrap().unwrap_err();
        assert!(matches!(refused, Error::Unavailable { .. }), "{refused:?}");
        assert!(server.calls("evalsha:") > before, "it was executed");
        client.flush().await;
        assert!(!client.lock("left").is_locked().await.unwrap());
    }

    /// Else each would leave a subscription to end, and that command needs no room.
    #[tokio::test]
    async fn request_that_gets_no_room_records_no_subscription() {
        let server = Server::start();
        let client = Client::connect(&server.url()).await.unwrap();
        let pubsub = pubsub_of(&client);
        pubsub.get_or_connect().await.unwrap();
        let all = u32::try_from(MAX_UNANSWERED).unwrap();
        let all = pubsub.room.clone().try_acquire_many_owned(all).unwrap();
        let (delivery, progress) = (Delivery::QUEUED_INSPECTION, Progress::default());
        let request = || attempt(&client, "c", delivery, &progress);
        let limit = Duration::from_millis(50);
        assert!(tokio::time::timeout(limit, request()).await.is_err());
        assert!(pubsub.channels.lock().is_empty());
        drop(all);
        request().await.unwrap();
        assert_eq!(pubsub.channels.lock().len(), 1);
    }

    /// Of a replica, or of a server that runs nothing beside subscriptions. Its successor may lead
    /// elsewhere.
    #[tokio::test]
    async fn late_refusal_does_not_end_the_next_connection() {
        let server = Server::start();
        let client = Client::connect(&server.url()).await.unwrap();
        let connection = pubsub_of(&client);
        let former = connection.get_or_connect().await.unwrap();
        connection.discard(&former);
        let next = connection.get_or_connect().await.unwrap();
        connection.leave_replica(&former);
        connection.subscribe_apart(&former);
        let current = connection.get_or_connect().await.unwrap();
        assert_eq!(current.generation, next.generation);
        connection.leave_replica(&next);
        let current = connection.get_or_connect().await.unwrap();
        assert_ne!(current.generation, next.generation);
    }

    /// Feared: the next connection has restored the subscriptions without this one, whose request is answered by the server
    /// that was left. Its waiter sleeps then.
    #[tokio::test]
    async fn subscription_of_a_connection_that_was_left_is_not_sent() {
        let server = Server::start();
        let client = Client::connect(&server.url()).await.unwrap();
        let pubsub = pubsub_of(&client);
        let former = pubsub.get_or_connect().await.unwrap();
        pubsub.leave(&former);
        let next = pubsub.get_or_connect().await.unwrap();
        assert!(pubsub.record_subscribing(former.generation, "c").is_err());
        pubsub.record_subscribing(next.generation, "c").unwrap();
    }

    /// One answer after the other would take longer than a connection may.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn refused_channel_does_not_delay_the_others_by_a_round_trip_each() {
        let server = Server::start();
        let _: () = server.command(&["ACL", "SETUSER", "default", "resetchannels", "&c*"]);
        let proxy = Proxy::to(server.port());
        let settings = Client::builder().connect_timeout(Duration::from_secs(3));
        let pubsub = pubsub_of(&settings.connect(&proxy.url()).await.unwrap());
        pubsub.discard(&pubsub.get_or_connect().await.unwrap());
        for channel in (0..300).map(|n| format!("c{n}")).chain(["x".to_owned()]) {
            pubsub.subscribe_on_reconnect(&channel);
        }
        proxy.delay(Duration::from_millis(10));
        pubsub.get_or_connect().await.unwrap();
        let subscribed: Vec<String> = server.command(&["PUBSUB", "CHANNELS"]);
        assert_eq!(subscribed.len(), 300);
    }

    #[tokio::test]
    async fn subscriptions_that_become_unwanted_while_connecting_are_ended() {
        let (server, config) = (Server::start(), ConnectionConfig::plain());
        let address = Address::Tcp(Endpoint::new("127.0.0.1", server.port()));
        let connection = ReconnectingConnection::new(
            config.clone(),
            Target::Fixed(address.clone()),
            Arc::new(ChannelMap::default()),
            SubscriptionMode::Restored,
            Arc::default(),
            None,
        );
        for channel in ["kept", "ended", "wanted again"] {
            connection.subscribe_on_reconnect(channel);
        }
        let on_push = connection.push_handler(1);
        let mode = SubscriptionMode::Restored;
        let connecting = config.connect(&address, Metrics::default(), on_push, mode);
        let (guard, _) = connecting.await.unwrap();
        let established = Established {
            live: LiveConnection {
                wire: guard.wire(),
                generation: 1,
                server: ServerId::next(),
                has_resp3: true,
            },
            address: address.to_string(),
            _guard: guard,
        };
        let (restored, ..) = tokio::join!(
            connection.restore(established),
            connection.unsubscribe("ended"),
            connection.unsubscribe("wanted again"),
        );
        restored.unwrap();
        connection.subscribe_on_reconnect("wanted again");
        let subscribed = connection.connect_and_subscribe("wanted again").await;
        subscribed.unwrap();
        let mut channels = server.command::<Vec<String>>(&["PUBSUB", "CHANNELS"]);
        channels.sort_unstable();
        assert_eq!(channels, ["kept", "wanted again"]);
    }
}
