//! One connection to one server.
//!
//! 1. It is made when it is needed, by a task that all callers wait for. So a caller that gives up does not
//!    restart it for the others.
//! 2. After a failure the next attempt starts after a random, growing pause.
//! 3. On a new connection, subscriptions are restored before anything else is sent (only with
//!    [`Listening::Restored`]; otherwise they end with their connection).
//! 4. A connection counts as broken when sending fails or when its task ends, for any reason. Waiters for
//!    its messages are woken then, because messages may have been missed. The next caller reconnects.
//! 5. If another server can replace this one, its connection can be *given up*: every caller that waits for
//!    an answer on it gets an error at once.
//!
//! Uses the client library's multiplexed connection, but not its connection manager: that keeps the error
//! of a refused reconnection (a wrong password for a moment, too many clients) for good.

use std::collections::BTreeSet;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{
    AsyncConnectionConfig, Cmd, Pipeline, PushInfo, PushKind, RedisError, RedisResult, Value,
};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until};

use super::access::Endpoint;
use super::dial::{Dial, Dialled};
use super::facts::run_id;
use super::fault::Fault;
use super::listening::{BEGUN_AT_ONCE, Listening, begin_again, breaks, text};
use super::told::{self, Listener, Teller};
use super::turns::ATTEMPTS;
use crate::backoff::Backoff;
use crate::error::Error;
use crate::store::{Doubts, NodeId, ServerId, SharedEar};
use crate::surroundings::task;

/// Commands that may queue inside the client library. An attempt with its subscription is two commands;
/// renewals and releases still have room beside [`ATTEMPTS`].
const PIPELINE: usize = 4 * ATTEMPTS;

/// Pauses before connecting is retried: short enough to find a restarted server quickly, long enough that a
/// thousand clients do not keep it from starting. Randomized, so that clients do not retry together.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

pub(super) struct Link {
    whereabouts: Whereabouts,
    connect_timeout: Duration,
    shared: Arc<Shared>,
    opening: Mutex<Opening>,
    /// Tracks which server process the connections lead to, if that matters.
    witness: Option<Witness>,
}

/// Notices when a connection leads to a different server process than the one before it: after a restart or
/// a failover. The holds there may then be lost.
pub(super) struct Witness {
    node: NodeId,
    doubts: Arc<Doubts>,
    /// Run id at the latest connection. The inner `None` means that the server did not report it.
    run_id: Mutex<Option<Option<String>>>,
}

impl Witness {
    pub(super) fn new(node: NodeId, doubts: Arc<Doubts>) -> Witness {
        Witness {
            node,
            doubts,
            run_id: Mutex::default(),
        }
    }

    /// Records a connection to this process. If the server does not report a run id, each connection may
    /// lead to a different process.
    fn connected(&self, run_id: Option<String>) {
        let mut latest = self.run_id.lock().unwrap_or_else(PoisonError::into_inner);
        let same = match latest.as_ref() {
            None => true,
            Some(before) => run_id.is_some() && *before == run_id,
        };
        *latest = Some(run_id);
        drop(latest);
        if !same {
            self.raise();
        }
    }

    fn raise(&self) {
        self.doubts.raise(self.node);
    }
}

/// Where the server of a link is.
pub(super) enum Whereabouts {
    /// At one fixed address.
    Fixed(Dial),
    /// At an address that a guide resolves for each connection.
    Guided(Arc<dyn Guide>),
}

/// Resolves the address of the current master, which may change.
pub(super) trait Guide: Send + Sync {
    /// Returns the current address.
    fn find(self: Arc<Self>) -> Finding;
    /// Hint appended to timeout errors if the server does not answer.
    fn silence(&self) -> &'static str;
}

pub(super) type Finding = Pin<Box<dyn Future<Output = Result<(Dial, Endpoint), Fault>> + Send>>;

impl Whereabouts {
    /// Hint appended to timeout errors if the server does not answer.
    fn silence(&self) -> &'static str {
        match self {
            Whereabouts::Fixed(dial) => dial.silence(),
            Whereabouts::Guided(guide) => guide.silence(),
        }
    }
}

/// The current attempt to connect. It runs in a task of its own: a caller may stop waiting without
/// restarting it for the others, and all callers get its outcome.
#[derive(Default)]
struct Opening {
    generation: Generation,
    outcome: Option<Outcome>,
    task: Option<AbortHandle>,
    /// The latest generation that must not be used, even if its attempt succeeds.
    given_up: Generation,
    /// The resolved address, if it can change.
    endpoint: Option<Endpoint>,
    /// The server of the latest connection, and its endpoint, if that can change.
    server: (ServerId, Option<Endpoint>),
    /// Number of consecutive failures, and time of the last one.
    failures: u32,
    failed: Option<Instant>,
}

type Outcome = Listener<Result<Live, Fault>>;

struct Shared {
    ear: SharedEar,
    listening: Listening,
    live: Mutex<Option<Established>>,
    /// The subscribed channels; where subscriptions are restored, the channels to restore.
    wanted: Mutex<BTreeSet<String>>,
    /// When a connection was lost and that was logged, until there is a new one.
    lost: Mutex<Option<Instant>>,
}

/// Numbers the connections of a link, so that late events of an old one do not end a new one.
pub(super) type Generation = u64;

/// Number of clones of a connection that are kept for later commands.
const IDLE: usize = 64;

/// A connection that works, as far as is known.
#[derive(Clone)]
pub(super) struct Live {
    dialled: Dialled,
    generation: Generation,
    server: ServerId,
    /// Closed when the connection is given up, which may still be open then. Present if another server can
    /// replace this one.
    given_up: Option<Listener<()>>,
}

struct Established {
    live: Live,
    /// Unused clones. A clone copies several reference counts; under load, cloning for each command costs
    /// more than the mutex around this list.
    idle: Vec<Live>,
    /// For the log.
    address: String,
    /// The resolved address, if it can change.
    endpoint: Option<Endpoint>,
    /// Dropping it notifies the listeners.
    _given_up: Option<Teller<()>>,
}

impl Link {
    pub(super) fn new(
        whereabouts: Whereabouts,
        connect_timeout: Duration,
        ear: SharedEar,
        listening: Listening,
        witness: Option<Witness>,
    ) -> Arc<Link> {
        let shared = Shared {
            ear,
            listening,
            live: Mutex::new(None),
            wanted: Mutex::new(BTreeSet::new()),
            lost: Mutex::default(),
        };
        Arc::new(Link {
            whereabouts,
            connect_timeout,
            shared: Arc::new(shared),
            opening: Mutex::default(),
            witness,
        })
    }

    /// Records that another server has replaced the earlier one.
    pub(super) fn doubt(&self) {
        if let Some(witness) = &self.witness {
            witness.raise();
        }
    }

    /// Asks which server process a new connection leads to.
    async fn identify(&self, mut live: Live) {
        let Some(witness) = &self.witness else { return };
        let info = redis::cmd("INFO").arg("server").take();
        let asking = self.ask(&mut live, &info);
        let answer = tokio::time::timeout(self.connect_timeout, asking).await;
        let told = answer.ok().and_then(Result::ok).and_then(run_id);
        witness.connected(told);
    }

    /// Returns the current connection or makes a new one. Concurrent callers share one attempt to connect.
    pub(super) async fn live(self: &Arc<Self>) -> Result<Live, Fault> {
        if let Some(live) = self.shared.live() {
            return Ok(live);
        }
        let outcome = match self.opening() {
            Ok(live) => return Ok(live),
            Err(outcome) => outcome,
        };
        // Without an outcome, the task ended with its runtime. The next call starts a new one.
        let interrupted = || Err(Fault::NotSent("connecting was interrupted".into()));
        outcome.heard().await.unwrap_or_else(interrupted)
    }

    /// Takes back the result of [`live`](Link::live) for a later command. It may be dropped instead.
    pub(super) fn keep(&self, idle: Live) {
        self.shared.keep(idle);
    }

    /// Returns whether there is a connection.
    pub(super) fn is_connected(&self) -> bool {
        self.shared.lock_live().is_some()
    }

    /// Returns a hint for the timeout error if there is not even a connection.
    pub(super) fn silence(&self) -> Option<&'static str> {
        (!self.is_connected()).then(|| self.whereabouts.silence())
    }

    /// Returns the address of the current connection, or of the one being made, if it is known and can
    /// change.
    pub(super) fn leads_to(&self) -> Option<Endpoint> {
        let opening = self.lock_opening().endpoint.clone();
        let live = self.shared.lock_live();
        match &*live {
            Some(live) => live.endpoint.clone(),
            None => opening,
        }
    }

    /// Returns the current attempt to connect or starts one; or returns the connection if it was just made.
    fn opening(self: &Arc<Self>) -> Result<Live, Outcome> {
        let mut opening = self.lock_opening();
        if let Some(live) = self.shared.live() {
            return Ok(live);
        }
        let under_way = opening.outcome.as_ref().filter(|outcome| outcome.is_open());
        if let Some(outcome) = under_way {
            return Err(outcome.clone());
        }
        opening.generation += 1;
        let (tell, outcome) = told::channel();
        opening.outcome = Some(outcome.clone());
        opening.endpoint = None;
        let not_before = opening.not_before();
        let (link, generation) = (self.clone(), opening.generation);
        let task = tokio::spawn(task(async move {
            if let Some(not_before) = not_before {
                sleep_until(not_before).await;
            }
            let opened = tokio::time::timeout(link.connect_timeout, link.open(generation)).await;
            let opened = opened.unwrap_or_else(|_| {
                Err(Fault::NotSent(format!(
                    "no connection within the connect timeout of {:?}{}",
                    link.connect_timeout,
                    link.whereabouts.silence()
                )))
            });
            link.lock_opening().ended(opened.is_ok());
            let live = opened.as_ref().ok().cloned();
            tell.tell(opened);
            // After the waiting callers got the connection: no caller pays for this round trip.
            if let Some(live) = live {
                link.identify(live).await;
            }
        }));
        opening.task = Some(task.abort_handle());
        Err(outcome)
    }

    fn lock_opening(&self) -> MutexGuard<'_, Opening> {
        self.opening.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn open(&self, generation: Generation) -> Result<Live, Fault> {
        let (dial, endpoint) = match &self.whereabouts {
            Whereabouts::Fixed(dial) => (dial.clone(), None),
            Whereabouts::Guided(guide) => {
                let (dial, endpoint) = guide.clone().find().await?;
                self.lock_opening().endpoint = Some(endpoint.clone());
                (dial, Some(endpoint))
            }
        };
        let config = AsyncConnectionConfig::new()
            // Both timeouts are applied outside, around a whole call.
            .set_connection_timeout(None)
            .set_response_timeout(None)
            .set_pipeline_buffer_size(PIPELINE)
            .set_push_sender(pushes(Arc::downgrade(&self.shared), generation));
        let mut dialled = dial.connect(&config).await?;
        if let Some(endpoint) = &endpoint {
            is_master(&mut dialled.connection, endpoint).await?;
        }
        let (given_up, receiver) = match self.can_be_replaced() {
            true => Some(told::channel()).unzip(),
            false => (None, None),
        };
        let live = Live {
            dialled,
            generation,
            server: self.server(endpoint.as_ref()),
            given_up: receiver,
        };
        let established = Established {
            live: live.clone(),
            idle: Vec::new(),
            address: dial.address(),
            endpoint,
            _given_up: given_up,
        };
        let restoring = self.restore(live.dialled.connection.clone(), established);
        restoring.await.map_err(|e| Fault::connecting(&e))?;
        Ok(live)
    }

    /// Returns the id of the server at an endpoint: a new one if the endpoint has changed.
    fn server(&self, endpoint: Option<&Endpoint>) -> ServerId {
        let (id, latest) = &mut self.lock_opening().server;
        if *id == ServerId::default() || latest.as_ref() != endpoint {
            (*id, *latest) = (ServerId::next(), endpoint.cloned());
        }
        *id
    }

    /// Returns whether another server may replace this one. (The commands link of a single server with
    /// replicas restores nothing either, so it is included. That costs almost nothing.)
    fn can_be_replaced(&self) -> bool {
        let restored = self.shared.listening == Listening::Restored;
        !restored || matches!(self.whereabouts, Whereabouts::Guided(_))
    }

    /// Subscribes to all wanted channels, and then makes the connection available.
    async fn restore(
        &self,
        mut connection: MultiplexedConnection,
        established: Established,
    ) -> Result<(), RedisError> {
        let mut restored: BTreeSet<String> = match self.shared.listening {
            Listening::Restored => self.shared.wanted().clone(),
            Listening::Unrestored | Listening::Sharded => BTreeSet::new(),
        };
        let all: Vec<&String> = restored.iter().collect();
        for channels in all.chunks(BEGUN_AT_ONCE) {
            begin_again(&mut connection, channels).await?;
        }
        // Before the first use, also end subscriptions that have become unwanted meanwhile.
        loop {
            let unwanted: Vec<String> = {
                let opening = self.lock_opening();
                if opening.given_up >= established.live.generation {
                    return Err(std::io::Error::other("abandoned while connecting").into());
                }
                let wanted = self.shared.wanted();
                let unwanted: Vec<String> = restored.difference(&wanted).cloned().collect();
                if unwanted.is_empty() {
                    self.shared.is_back(&established.address);
                    *self.shared.lock_live() = Some(established);
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

    /// Records that a channel is about to be subscribed to. Where subscriptions are restored, every later
    /// connection subscribes to it.
    pub(super) fn want(&self, channel: &str) {
        if self.shared.listening == Listening::Restored {
            self.shared.want(channel);
        }
    }

    /// Subscribes to a channel on the current connection or a new one.
    pub(super) async fn listen(self: &Arc<Self>, channel: &str) -> Result<(), Fault> {
        let mut live = self.live().await?;
        self.subscribe(&mut live, channel).await
    }

    /// Subscribes to a channel on this connection.
    pub(super) async fn subscribe(&self, live: &mut Live, channel: &str) -> Result<(), Fault> {
        // Recorded before sending, so that the subscription can be ended if this is dropped half-way.
        if !self.shared.is_wanted_on(live.generation, channel) {
            return Err(GivenUp.into());
        }
        let subscribing = live.change(self.shared.listening, true, channel);
        let subscribed = match subscribing.await {
            Ok(subscribed) => subscribed,
            Err(GivenUp) => return Err(GivenUp.into()),
        };
        let Err(error) = subscribed else {
            return Ok(());
        };
        let fault = self.failed(live, &error);
        if !matches!(fault, Fault::Unanswered(_)) {
            // It was refused, so there is nothing to end, and nothing to restore on later connections.
            self.shared.wanted().remove(channel);
        }
        Err(fault)
    }

    /// Ends the subscription of a channel, if there may be one, here and on the current connection.
    pub(super) async fn unwant(&self, channel: &str) -> Result<(), Fault> {
        if !self.shared.wanted().remove(channel) {
            return Ok(());
        }
        let Some(mut live) = self.shared.live() else {
            return Ok(());
        };
        match live.change(self.shared.listening, false, channel).await {
            Ok(Ok(())) | Err(GivenUp) => Ok(()),
            Ok(Err(error)) => Err(self.failed(&live, &error)),
        }
    }

    /// Sends a command, and waits for its answer.
    pub(super) async fn ask(&self, live: &mut Live, cmd: &Cmd) -> Result<Value, Fault> {
        self.ask_node(live, cmd, false).await
    }

    /// Like `ask`. `importing`: the node does not own the slot yet, but the slot's owner has redirected to
    /// it (ASK).
    pub(super) async fn ask_node(
        &self,
        live: &mut Live,
        cmd: &Cmd,
        importing: bool,
    ) -> Result<Value, Fault> {
        let answered = {
            let connection = &mut live.dialled.connection;
            let sending = pin!(async {
                match importing {
                    false => connection.send_packed_command(cmd).await,
                    true => Box::pin(ask_importing(connection, cmd)).await,
                }
            });
            unless_given_up(&live.given_up, sending).await
        };
        match answered {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(error)) => Err(self.failed(live, &error)),
            Err(GivenUp) => Err(GivenUp.into()),
        }
    }

    /// Classifies the failure of something that was sent on this connection.
    fn failed(&self, live: &Live, error: &RedisError) -> Fault {
        if breaks(error) {
            self.shared.lost(live.generation, error);
            return Fault::Unanswered(error.to_string());
        }
        Fault::refused(error)
    }

    /// Stops using this connection, in any state. A connection that has replaced it stays in use.
    pub(super) fn leave(&self, live: &Live) {
        drop(self.shared.broken(live.generation));
    }

    /// Stops using the connection, in any state, including a pending one. Everything that waits for it, or
    /// for an answer on it, fails.
    pub(super) fn give_up(&self) {
        let mut opening = self.lock_opening();
        // The task may be too far to be aborted.
        opening.given_up = opening.generation;
        opening.endpoint = None;
        if let Some(task) = opening.task.take() {
            task.abort();
        }
        drop(opening);
        let generation = self.shared.live().map(|live| live.generation);
        if let Some(generation) = generation {
            drop(self.shared.broken(generation));
        }
    }
}

/// The connection was given up before the answer arrived.
struct GivenUp;

impl From<GivenUp> for Fault {
    fn from(_: GivenUp) -> Fault {
        Fault::Unanswered("the connection was abandoned for another server".into())
    }
}

/// Sends one command with ASKING before it. In one write: ASKING applies only to the next command.
async fn ask_importing(connection: &mut MultiplexedConnection, cmd: &Cmd) -> RedisResult<Value> {
    let mut pipeline = Pipeline::with_capacity(2);
    pipeline.cmd("ASKING").add_command(cmd.clone());
    let answers = connection.send_packed_commands(&pipeline, 0, 2).await?;
    Ok(answers.into_iter().next_back().unwrap_or(Value::Nil))
}

async fn unless_given_up<T>(
    given_up: &Option<Listener<()>>,
    work: Pin<&mut impl Future<Output = T>>,
) -> Result<T, GivenUp> {
    let Some(given_up) = given_up else {
        return Ok(work.await);
    };
    tokio::select! {
        biased;
        done = work => Ok(done),
        // Nothing is ever sent; this returns when the other end is dropped.
        _ = given_up.heard() => Err(GivenUp),
    }
}

impl Live {
    /// Returns the generation of the connection.
    pub(super) fn generation(&self) -> Generation {
        self.generation
    }

    /// Returns the server at the other end: another one after a failover.
    pub(super) fn server(&self) -> ServerId {
        self.server
    }

    /// Subscribes to a channel, or ends its subscription.
    async fn change(
        &mut self,
        listening: Listening,
        begin: bool,
        channel: &str,
    ) -> Result<Result<(), RedisError>, GivenUp> {
        let work = pin!(listening.change(&mut self.dialled.connection, begin, channel));
        unless_given_up(&self.given_up, work).await
    }
}

/// Checks the role of a server that sentinels call the master. It may be a former or a future master.
async fn is_master(
    connection: &mut MultiplexedConnection,
    endpoint: &Endpoint,
) -> Result<(), Fault> {
    let role = connection.send_packed_command(&redis::cmd("ROLE")).await;
    let role = role.map_err(|e| Fault::connecting(&e))?;
    match &role {
        Value::Array(role) if text(role.first()) == Some("master") => Ok(()),
        Value::Array(_) => Err(Fault::NotSent(format!(
            "{endpoint} is the master according to the sentinels, but is a replica"
        ))),
        Value::ServerError(error) => Err(Fault::answered(error, "")),
        other => Err(Fault::Final(Error::UnsupportedServer {
            reason: format!("its reply to ROLE contains no role: {other:?}"),
        })),
    }
}

impl Opening {
    /// Returns when connecting may be retried after a failure.
    fn not_before(&self) -> Option<Instant> {
        let pauses = Backoff::exponential(FIRST_PAUSE, 2.0, LONGEST_PAUSE);
        Some(self.failed? + pauses.pause(self.failures.saturating_sub(1)))
    }

    fn ended(&mut self, well: bool) {
        // The waiting callers have it. Keeping it here would keep a connection open that was given up.
        self.outcome = None;
        (self.failures, self.failed) = match well {
            true => (0, None),
            false => (self.failures.saturating_add(1), Some(Instant::now())),
        };
    }
}

impl Shared {
    fn lock_live(&self) -> MutexGuard<'_, Option<Established>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn live(&self) -> Option<Live> {
        let mut live = self.lock_live();
        let established = live.as_mut()?;
        let idle = established.idle.pop();
        Some(idle.unwrap_or_else(|| established.live.clone()))
    }

    fn keep(&self, idle: Live) {
        if let Some(established) = &mut *self.lock_live()
            && established.live.generation == idle.generation
            && established.idle.len() < IDLE
        {
            established.idle.push(idle);
        }
    }

    fn wanted(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn want(&self, channel: &str) {
        let mut wanted = self.wanted();
        if !wanted.contains(channel) {
            wanted.insert(channel.to_owned());
        }
    }

    /// Records that a channel is about to be subscribed to on this connection. Returns false if the
    /// connection, with its subscriptions, has ended meanwhile.
    fn is_wanted_on(&self, generation: Generation, channel: &str) -> bool {
        if self.listening == Listening::Restored {
            return true;
        }
        let live = self.lock_live();
        let lives = live
            .as_ref()
            .is_some_and(|live| live.live.generation == generation);
        if lives {
            self.want(channel);
        }
        lives
    }

    /// Handles a subscription that the server has ended by itself.
    fn ended(&self, channel: &str) {
        if self.listening == Listening::Sharded && self.wanted().remove(channel) {
            self.ear.ended(channel);
        }
    }

    /// Handles the end of all subscriptions with their connection.
    fn all_ended(&self) {
        let ended = std::mem::take(&mut *self.wanted());
        ended.iter().for_each(|channel| self.ear.ended(channel));
    }

    /// Handles the end of a connection in use: all waiters for its messages must check the store again.
    /// Returns the connection; dropping it ends a task.
    fn broken(&self, generation: Generation) -> Option<Established> {
        let dead = self
            .lock_live()
            .take_if(|established| established.live.generation == generation);
        if dead.is_some() {
            match self.listening {
                Listening::Restored => self.ear.interrupted(),
                Listening::Unrestored | Listening::Sharded => self.all_ended(),
            }
        }
        dead
    }

    /// The same for a connection that the network or the server ended. Logged once, not for each later
    /// failure to connect.
    fn lost(&self, generation: Generation, reason: &dyn std::fmt::Display) {
        if let Some(dead) = self.broken(generation) {
            let mut lost = self.lost.lock().unwrap_or_else(PoisonError::into_inner);
            *lost = Some(Instant::now());
            tracing::warn!(address = dead.address, %reason, "the connection to the store was lost");
        }
    }

    /// Records that there is a connection, and logs it if one was lost before.
    fn is_back(&self, address: &str) {
        let mut lost = self.lost.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lost) = lost.take() {
            let elapsed_ms = lost.elapsed().as_millis();
            tracing::info!(
                address,
                elapsed_ms,
                "the connection to the store was restored"
            );
        }
    }
}

/// The link to a forgotten node ends with its last user.
impl Drop for Shared {
    fn drop(&mut self) {
        if self.listening != Listening::Restored {
            self.all_ended();
        }
    }
}

/// Reports a connection as broken when its task ends, for any reason. That includes the end of its
/// runtime, which the client library does not report.
struct Sentry {
    shared: Weak<Shared>,
    generation: Generation,
}

impl Drop for Sentry {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.upgrade()
            && shared.broken(self.generation).is_some()
        {
            // Not a warning: at the end of a program it ends with its runtime.
            tracing::debug!("a connection to the store ended with its task");
        }
    }
}

/// Returns the handler of the server's push messages.
fn pushes(
    shared: Weak<Shared>,
    generation: Generation,
) -> impl Fn(PushInfo) -> Result<(), redis::aio::SendError> + Send + Sync + 'static {
    let sentry = Sentry { shared, generation };
    move |push| {
        let Some(shared) = sentry.shared.upgrade() else {
            return Err(redis::aio::SendError);
        };
        let channel = text(push.data.first());
        match (push.kind, channel) {
            (PushKind::Message | PushKind::SMessage, Some(channel)) => shared.ear.heard(channel),
            (PushKind::SUnsubscribe, Some(channel)) => shared.ended(channel),
            // Recorded again, in the server's order: the end of an earlier subscription may have been
            // received after this one was sent.
            (PushKind::SSubscribe, Some(channel)) => {
                shared.is_wanted_on(generation, channel);
            }
            (PushKind::Disconnection, _) => shared.lost(generation, &"it was closed"),
            _ => {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns whether a connection to this process, after the earlier ones, raises doubts.
    async fn raises(witness: &Witness, run_id: Option<&str>) -> bool {
        witness.connected(run_id.map(str::to_owned));
        let raised = tokio::time::timeout(Duration::ZERO, witness.doubts.next());
        raised.await.is_ok()
    }

    #[tokio::test]
    async fn reconnection_raises_doubts_only_for_other_process() {
        let witness = Witness::new(NodeId(7), Arc::default());
        assert!(!raises(&witness, Some("a")).await, "the first connection");
        assert!(!raises(&witness, Some("a")).await, "the same process");
        assert!(raises(&witness, Some("b")).await, "another process");
        assert!(!raises(&witness, Some("b")).await, "the same again");
        assert!(raises(&witness, None).await, "it does not tell");
        assert!(raises(&witness, None).await, "it does not tell either");
        assert!(raises(&witness, Some("b")).await, "it did not tell before");
    }
}
