//! An exchange: one command and its answer, sent to the node of a key, redirected, and repeated
//! until its deadline.

use std::borrow::Cow;
use std::cell::RefCell;
use std::ops::{Deref, DerefMut};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::{Instant, timeout, timeout_at};
use tracing::Instrument as _;

use super::connection::{LiveConnection, ReconnectingConnection, accepted, is_role_of_master};
use super::exchange_error::{ExchangeError, Retry, is_cross_slot, is_only_for_subscriptions};
use super::node::{Node, NodeLimits};
use super::pubsub::{SubscriptionMode, subscribing};
use super::replicas::Replicas;
use super::topology::Topology;
use super::wire::{Cmd, Expects, Pending, Room};
use crate::error::{Cause, Error, Result};
use crate::join::Boxed;
use crate::step::{Batchable, ErrorReply, Script, ScriptReply, Step};
use crate::store::{Answer, AttemptPermit, Confirmation, Delivery, NodeId, Progress, Route};

/// Limit of consecutive redirections in a cluster.
const MAX_REDIRECTIONS: usize = 8;

/// One command, and how to send it.
pub(in crate::store) struct CommandRequest<'a> {
    topology: &'a Topology,
    cmd: PooledCmd,
    /// The script that the command runs by its SHA, if any.
    script: Option<&'static Script>,
    /// How steps with this script are sent together, if they can be.
    batchable: Option<&'static Batchable>,
    /// The key that determines the node and is named in errors.
    key: &'a str,
    /// All keys of the step.
    keys: &'a [Cow<'a, str>],
    /// The node, if it is not determined by the key.
    pub(super) node: Option<&'a Arc<Node>>,
    /// The channel to subscribe to first.
    channel: Option<&'a str>,
    /// Records that the command was sent.
    progress: &'a Progress,
    /// Whether all keys of the command are known to be in one slot.
    by_slot: bool,
    pub(super) delivery: Delivery,
}

/// The answer to a command, before it is decoded.
pub(in crate::store) type RawAnswer = Answer<ScriptReply>;

impl<'a> CommandRequest<'a> {
    pub(super) fn new(
        topology: &'a Topology,
        cmd: PooledCmd,
        progress: &'a Progress,
    ) -> CommandRequest<'a> {
        CommandRequest {
            topology,
            cmd,
            script: None,
            batchable: None,
            key: "",
            keys: &[],
            node: None,
            channel: None,
            progress,
            by_slot: topology.has_slots(),
            delivery: Delivery::IMMEDIATE,
        }
    }

    /// Returns the request that runs a step by the SHA of its script.
    pub(in crate::store) fn for_step<R: Send>(
        topology: &'a Topology,
        step: &'a Step<'_, R>,
        channel: Option<&'a str>,
        delivery: Delivery,
        progress: &'a Progress,
    ) -> Result<CommandRequest<'a>> {
        let (script, keys) = (step.script(), step.keys());
        // Before the check, so that it is not known of a step that passed it without.
        let by_slot = topology.has_slots();
        let key = keys.first().map_or("", |key| key);
        topology.check_same_slot(key, keys.iter().skip(1).map(|key| &**key))?;
        let mut cmd = PooledCmd::new("EVALSHA");
        cmd.text(script.sha(topology.publishing));
        cmd.keys(keys);
        cmd.args(step.args());
        let batchable = script.for_batch(keys.len(), step.args().len());
        Ok(CommandRequest {
            script: Some(script),
            batchable: batchable.filter(|_| topology.packs_steps()),
            key,
            keys,
            channel,
            delivery,
            by_slot,
            ..CommandRequest::new(topology, cmd, progress)
        })
    }

    /// Returns the command with the source of its script instead of the SHA.
    fn with_source(&self, script: &Script) -> Cmd {
        self.cmd
            .with_source(&script.source_for(self.topology.publishing))
    }

    /// Repeats the exchange until there is an answer or the response timeout has passed.
    ///
    /// Boxed, so that all futures that send steps are small: most of their time they wait for
    /// something else.
    pub(super) fn send_with_retries(
        self,
        response_timeout: Duration,
    ) -> Boxed<'a, Result<RawAnswer>> {
        Box::pin(async move {
            self.topology.check_callable()?;
            let progress = self.progress;
            let mut retry = Retry::with_timeout(response_timeout);
            let started = retry.started;
            let answered = {
                let trying = pin!(async {
                    loop {
                        match self.send().await {
                            Ok(answer) => return Ok(answer),
                            Err(failure) => {
                                let limits = self.limits();
                                retry.pause_after(failure, &limits.outage, progress).await?;
                            }
                        }
                    }
                });
                progress
                    .with_timeout(started, response_timeout, trying)
                    .await
            };
            match answered {
                Some(reply) => {
                    // An error that a retry does not change is an answer, too.
                    progress.record_answer();
                    reply
                }
                None => {
                    self.topology.request_refresh();
                    Err(retry.deadline_error(self.timeout_hint(), progress))
                }
            }
        })
    }

    /// Makes exchanges until one may have had an effect, or the response timeout has passed. `what`
    /// names the step in the error for a missing answer, for which this waits `answered_within`.
    pub(in crate::store) async fn send_at_most_once(
        &self,
        what: &'static str,
        response_timeout: Duration,
        answered_within: Duration,
    ) -> Result<RawAnswer> {
        self.topology.check_callable()?;
        let progress = self.progress;
        let unknown = |Cause { reason, source }| Error::OutcomeUnknown {
            step: what,
            reason,
            source,
        };
        let mut retry = Retry::with_timeout(response_timeout);
        let answer_timeout = answered_within.max(response_timeout);
        loop {
            let mut sending = pin!(self.send());
            let answered = match progress
                .with_timeout(retry.started, response_timeout, sending.as_mut())
                .await
            {
                Some(answered) => answered,
                None => {
                    self.topology.request_refresh();
                    if !progress.was_sent() {
                        return Err(retry.deadline_error(self.timeout_hint(), progress));
                    }
                    let from = progress.timeout_start().unwrap_or(retry.started);
                    let answered_by = from.max(retry.started) + answer_timeout;
                    let late = |_| unknown(format!("no answer within {answer_timeout:?}").into());
                    timeout_at(answered_by, sending).await.map_err(late)?
                }
            };
            match answered {
                Ok(answer) => {
                    progress.record_answer();
                    return Ok(answer);
                }
                Err(ExchangeError::Unanswered(cause)) => return Err(unknown(cause)),
                Err(failure) => {
                    progress.mark_unsent();
                    let limits = self.limits();
                    retry.pause_after(failure, &limits.outage, progress).await?;
                    if retry.remaining().is_zero() {
                        return Err(retry.deadline_error(None, progress));
                    }
                }
            }
        }
    }

    pub(in crate::store) async fn send_once(&self, limit: Duration) -> Result<RawAnswer> {
        self.topology.check_callable()?;
        match timeout(limit, pin!(self.send())).await {
            Ok(answer) => answer.map_err(ExchangeError::into_error),
            Err(_) => {
                self.topology.request_refresh();
                Err(Error::ResponseTimeout { after: limit })
            }
        }
    }

    /// Returns a hint for the timeout error if there is not even a connection.
    fn timeout_hint(&self) -> Option<&'static str> {
        match self.node {
            Some(node) => node.timeout_hint(),
            None => self.topology.timeout_hint(self.key),
        }
    }

    /// Returns the limits of the node, as far as it is known locally.
    fn limits(&self) -> Arc<NodeLimits> {
        match self.node {
            Some(node) => node.limits.clone(),
            None => self.topology.limits(self.key),
        }
    }

    /// Makes one exchange, following redirections of the cluster.
    pub(super) async fn send(&self) -> Result<RawAnswer, ExchangeError> {
        let mut resolved;
        let mut route = self.delivery.route;
        self.topology.ensure_watched();
        let mut node = match self.node.or(self.topology.only_node()) {
            Some(node) => node,
            None => {
                resolved = match route {
                    // Another node may not have the acquisition. Only this one knows whether its
                    // slot has moved away.
                    Route::AcquisitionsOf(server) => {
                        self.topology.node_of(server).ok_or_else(replaced)?
                    }
                    _ => self.topology.node(self.key).await?,
                };
                &resolved
            }
        };
        let mut importing = false;
        let mut asked: SmallVec<[NodeId; 4]> = SmallVec::new();
        // If an earlier try was not answered, the store may have applied it. A refusal of this try
        // does not change that.
        let was_sent_before = self.progress.was_sent();
        for _ in 0..MAX_REDIRECTIONS {
            let answered = self.send_to(node, route, importing).await;
            if self.delivery.queued {
                if answered.is_ok() {
                    node.limits.attempt_limiter.record_answer();
                }
                drop(self.progress.take_permit());
            }
            let failure = match answered {
                Ok(mut answer) => {
                    node.limits.outage.record_answer();
                    if let Some(confirmation) = &mut answer.confirmation {
                        confirmation.node = Some(node.clone());
                    }
                    return Ok(answer);
                }
                Err(failure) => failure,
            };
            if !was_sent_before && failure.had_no_effect() {
                // Nothing has to be settled: that would add load to an outage.
                self.progress.mark_unsent();
            }
            let other = match &failure {
                ExchangeError::Moved(to) => {
                    if let Route::AcquisitionsOf(_) = self.delivery.route {
                        Box::pin(check_moved_by_master(node)).await?;
                    }
                    Box::pin(self.topology.handle_moved(self.key, to)).await
                }
                ExchangeError::Ask(_) if self.script.is_some_and(Script::has_undeclared_keys) => {
                    let message = "TRYAGAIN the slot is moving, and some of its keys are on another \
                                node";
                    return Err(ExchangeError::Busy(message.into()));
                }
                ExchangeError::Ask(to) => self.topology.handle_ask(self.key, to),
                _ => None,
            };
            let Some(other) = other else {
                if !failure.is_permanent() && !matches!(failure, ExchangeError::Busy(_)) {
                    self.topology.request_refresh();
                }
                return Err(failure);
            };
            asked.push(node.id);
            if asked.contains(&other.id) {
                self.topology.request_refresh();
                return Err(ExchangeError::not_executed(
                    "the nodes of the cluster redirect to each other",
                ));
            }
            if let Route::AcquisitionsOf(_) = route {
                // It has moved there with its slot.
                route = Route::Acquisitions;
            }
            resolved = other;
            (node, importing) = (&resolved, matches!(failure, ExchangeError::Ask(_)));
        }
        Err(ExchangeError::not_executed(
            "too many redirects between the nodes of the cluster",
        ))
    }

    /// Makes one exchange with this node, in a span if that is enabled. Its fields follow the
    /// conventions of OpenTelemetry for database clients.
    async fn send_to(
        &self,
        node: &Node,
        route: Route,
        importing: bool,
    ) -> Result<RawAnswer, ExchangeError> {
        let span = tracing::trace_span!(
            "exchange",
            otel.kind = "client",
            otel.name = self.cmd.name(),
            db.system.name = "redis",
            db.operation.name = self.cmd.name(),
            db.operation.parameter.key = self.key,
            error.type = tracing::field::Empty,
        );
        if span.is_disabled() {
            return self.exchange_with(node, route, importing).await;
        }
        let exchange = self.exchange_with(node, route, importing);
        let answered = Box::pin(exchange.instrument(span.clone())).await;
        if let Err(error) = &answered {
            span.record("error.type", error.kind());
        }
        answered
    }

    /// Makes one exchange with this node. An attempt keeps its permit until the caller takes it
    /// back.
    async fn exchange_with(
        &self,
        node: &Node,
        route: Route,
        importing: bool,
    ) -> Result<RawAnswer, ExchangeError> {
        let connection = match route {
            Route::Commands => &node.commands,
            Route::Acquisitions | Route::AcquisitionsOf(_) => &node.attempts,
        };
        let mut permit = None;
        if self.delivery.queued {
            let available = node.limits.attempt_limiter.try_acquire();
            permit = match available.filter(|_| self.missing_connection(node).is_none()) {
                Some(permit) => Some(permit),
                None => self.acquire_attempt_permit(node).await?,
            };
        }
        // If an attempt is dropped without an answer, its permit passes to the task that settles
        // it. An inspection needs no settling, so its permit is released when this returns.
        if self.delivery.replicate
            && let Some(permit) = permit.take()
        {
            self.progress.keep_permit(permit);
        }
        // While a slot moves, its subscriptions stay at the source node, which ends them when the
        // move is complete; waiters then retry. The target node would refuse them.
        let channel = self.channel.filter(|_| !importing);
        // Before anything is recorded: what waits for room leaves no subscription to end.
        let room = match self.delivery.waits_for_room {
            true => connection.room().await,
            false => None,
        };
        if route == Route::Acquisitions {
            node.check_has_slots()?;
        }
        // A new connection may show that subscriptions need one of their own.
        let mut live = connection.get_or_connect().await?;
        let pubsub = node.pubsub();
        let same_connection = Arc::ptr_eq(connection, pubsub);
        if let Some(channel) = channel {
            pubsub.subscribe_on_reconnect(channel);
            if !same_connection {
                Box::pin(pubsub.connect_and_subscribe(channel)).await?;
                // That may have shown that another server is at the address now.
                live = connection.get_or_connect().await?;
            }
        }
        if let Route::AcquisitionsOf(server) = route
            && server != live.server
        {
            return Err(replaced());
        }
        let channel = channel.filter(|_| same_connection);
        let replicas = node.replicas.as_ref();
        let sender = Sender {
            request: self,
            connection,
            live: &live,
            importing,
            tracked: !importing && self.delivery.tracked && connection.is_tracking(&live),
            replicas: replicas.filter(|_| self.delivery.replicate),
        };
        let sending = sender.send(&self.cmd, self.batchable, channel, room);
        let (mut answer, mut sent_at, mut confirmation) = sending.await?;
        if let ScriptReply::Error(error) = &answer
            && error.code() == "NOSCRIPT"
            && let Some(script) = self.script
        {
            // A new or flushed server. EVAL loads the script for later.
            let eval = self.with_source(script);
            (answer, sent_at, confirmation) =
                Box::pin(sender.send(&eval, None, None, None)).await?;
        }
        match answer {
            ScriptReply::Error(error) => Err(self.refused(&error, connection, &live)),
            reply => {
                connection.record_answer(&live);
                Ok(Answer {
                    reply,
                    sent_at,
                    confirmation,
                    server: live.server,
                })
            }
        }
    }

    /// Handles an error reply.
    fn refused(
        &self,
        error: &ErrorReply,
        connection: &ReconnectingConnection,
        live: &LiveConnection,
    ) -> ExchangeError {
        if is_only_for_subscriptions(&error.to_string()) {
            connection.subscribe_apart(live);
            return ExchangeError::not_executed(error.to_string());
        }
        match ExchangeError::from_reply(error, self.key) {
            // After a failover, the next connection leads to the new master.
            ExchangeError::NotMaster(message) => {
                connection.leave_replica(live);
                ExchangeError::NotMaster(self.topology.explain_replica(message))
            }
            // The step must be divided, so its caller has to repeat it.
            ExchangeError::Permanent(_) if is_cross_slot(error) && !self.by_slot => {
                self.topology.use_slots();
                ExchangeError::CrossSlot(error.to_string())
            }
            failure => {
                connection.end_without_login(live, &failure);
                failure.naming("keys", self.keys.iter().map(|key| &**key))
            }
        }
    }

    /// Returns a connection that an attempt needs and that is not established yet.
    fn missing_connection<'n>(&self, node: &'n Node) -> Option<&'n Arc<ReconnectingConnection>> {
        let pubsub = self.channel.map(|_| node.pubsub());
        let mut connections = std::iter::once(&node.attempts).chain(pubsub);
        connections.find(|connection| !connection.is_connected())
    }

    /// Waits for the permit to send an attempt to this node. Without a connection no attempt has a
    /// permit: all wait for one try to connect, and fail together if that fails.
    ///
    /// Boxed: few attempts wait.
    fn acquire_attempt_permit<'b>(
        &'b self,
        node: &'b Node,
    ) -> Boxed<'b, Result<Option<AttemptPermit>, ExchangeError>> {
        Box::pin(async move {
            loop {
                let limiter = &node.limits.attempt_limiter;
                let permit = match limiter.try_acquire() {
                    Some(permit) => Some(permit),
                    None => {
                        let _queued = self.progress.wait_for_permit(limiter.clone());
                        limiter.acquire().await
                    }
                };
                node.check_has_slots()?;
                let Some(connection) = self.missing_connection(node) else {
                    return Ok(permit);
                };
                drop(permit);
                connection.get_or_connect().await?;
            }
        })
    }
}

/// A command whose buffers are used again by a later one.
pub(super) struct PooledCmd(Cmd);

thread_local! {
    /// Commands that were dropped on this thread.
    static SPARE_COMMANDS: RefCell<Vec<Cmd>> = const { RefCell::new(Vec::new()) };
}

/// Limit of spare commands per thread.
const MAX_SPARE_COMMANDS: usize = 64;

/// A command with longer arguments is not used again, so that its buffer is freed.
const MAX_SPARE_BYTES: usize = 4096;

impl PooledCmd {
    pub(super) fn new(name: &str) -> PooledCmd {
        // An error means that this thread is ending.
        let spare = SPARE_COMMANDS.try_with(|spare| spare.borrow_mut().pop());
        // Enough for a step on one object with a long name; only steps on several let the buffer
        // grow.
        let spare = spare.ok().flatten();
        let mut cmd = spare.unwrap_or_else(|| Cmd::with_capacity(512));
        cmd.text(name);
        PooledCmd(cmd)
    }
}

impl Drop for PooledCmd {
    fn drop(&mut self) {
        if self.0.len() > MAX_SPARE_BYTES {
            return;
        }
        self.0.clear();
        let cmd = std::mem::take(&mut self.0);
        // An error means that this thread is ending.
        let _ = SPARE_COMMANDS.try_with(|spare| {
            let mut spare = spare.borrow_mut();
            if spare.len() < MAX_SPARE_COMMANDS {
                spare.push(cmd);
            }
        });
    }
}

impl Deref for PooledCmd {
    type Target = Cmd;

    fn deref(&self) -> &Cmd {
        &self.0
    }
}

impl DerefMut for PooledCmd {
    fn deref_mut(&mut self) -> &mut Cmd {
        &mut self.0
    }
}

/// How commands are sent on one connection.
struct Sender<'a> {
    request: &'a CommandRequest<'a>,
    connection: &'a Arc<ReconnectingConnection>,
    live: &'a LiveConnection,
    /// Whether the node imports the slot (ASK).
    importing: bool,
    /// Whether the server is asked to report later changes of the keys.
    tracked: bool,
    /// The replicas that must confirm the command.
    replicas: Option<&'a Arc<Replicas>>,
}

/// The answer to a command, when the command was sent, and the confirmation of the replicas.
type Sent = (ScriptReply, Instant, Option<Box<Confirmation>>);

impl Sender<'_> {
    /// Sends a command, behind a subscription and followed by WAIT for the replicas, in one round
    /// trip; or together with others.
    async fn send(
        &self,
        cmd: &Cmd,
        batchable: Option<&'static Batchable>,
        channel: Option<&str>,
        mut room: Option<Room>,
    ) -> Result<Sent, ExchangeError> {
        let Sender { live, request, .. } = *self;
        let was_sent_before = request.progress.was_sent();
        request.progress.mark_sent();
        let mut sent_at = Instant::now();
        if channel.is_some() || self.replicas.is_some() {
            // Boxed, as are other rare paths, so that common futures stay small.
            let (answer, confirmation) = Box::pin(self.send_pipelined(cmd, channel, room)).await?;
            return Ok((answer, sent_at, confirmation));
        }
        if let Some(script) = batchable
            && !self.importing
            && !self.tracked
        {
            let mut step = CancelOnDrop {
                sent: live.wire.send_step(cmd, script, room.take()),
                was_sent_before,
                progress: request.progress,
            };
            let answered = (&mut step.sent).await;
            let sent = answered.sent_at.is_some();
            let reply = answered.reply.ok_or_else(|| live.ended(sent))?;
            let is_refused = |code| matches!(code, "NOSCRIPT" | "NOPERM");
            match &reply {
                // The server does not know the script, the user must not access the key of another
                // step in it, or that key is in another slot.
                ScriptReply::Error(error) if answered.refused && is_refused(error.code()) => {
                    sent_at = Instant::now();
                }
                ScriptReply::Error(error) if answered.refused && is_cross_slot(error) => {
                    request.topology.use_slots();
                    sent_at = Instant::now();
                }
                _ => return Ok((reply, answered.sent_at.unwrap_or(sent_at), None)),
            }
        }
        let answer = match self.tracked {
            true => Box::pin(self.connection.query_tracked(live, cmd, room)).await,
            false => live.reply(live.start(cmd, self.importing, room)).await,
        };
        Ok((answer?, sent_at, None))
    }

    async fn send_pipelined(
        &self,
        cmd: &Cmd,
        channel: Option<&str>,
        room: Option<Room>,
    ) -> Result<(ScriptReply, Option<Box<Confirmation>>), ExchangeError> {
        let Sender {
            connection, live, ..
        } = *self;
        // One connection keeps order: the step runs after the subscription has started, and WAIT
        // comes behind the step.
        let (subscribing, step) = match channel {
            Some(channel) => {
                connection.record_subscribing(live.generation, channel)?;
                let (subscribe, confirmed) =
                    subscribing(true, SubscriptionMode::Restored, &[channel]);
                let both = [(&subscribe, confirmed), (cmd, Expects::Reply)];
                let [subscribing, step] = live.wire.send_all(both, room);
                (Some((channel, subscribing)), step)
            }
            None => (None, live.start(cmd, self.importing, room)),
        };
        let confirmation = self
            .replicas
            .map(|replicas| replicas.confirm(connection, live));
        let mut subscribed = Ok(());
        if let Some((channel, subscribing)) = subscribing {
            let answer = live.answer(subscribing).await;
            subscribed = answer.and_then(|answer| accepted(answer, channel));
            connection.subscribed(live, channel, &subscribed);
        }
        let answer = live.reply(step).await;
        if let Err(failure) = subscribed {
            // The step was not refused with it: it may have been executed.
            let may_be_executed = failure.had_no_effect()
                && answer
                    .as_ref()
                    .err()
                    .is_none_or(|answer| !answer.had_no_effect());
            return Err(match may_be_executed {
                true => ExchangeError::Unanswered(failure.reason().into()),
                false => failure,
            });
        }
        Ok((answer?, confirmation))
    }
}

impl RawAnswer {
    pub(in crate::store) fn decode<R: Send>(self, step: &Step<'_, R>) -> Result<Answer<R>> {
        Ok(Answer {
            reply: step.decode(self.reply)?,
            sent_at: self.sent_at,
            confirmation: self.confirmation,
            server: self.server,
        })
    }
}

/// The error of a step that only one server may run.
fn replaced() -> ExchangeError {
    let reason = "another server replaced this one and may not have the acquisition";
    ExchangeError::Unanswered(reason.into())
}

/// Checks that a node has redirected because the slot has moved away with its keys: then it is
/// still a master. A replica that took over may not have all keys.
async fn check_moved_by_master(node: &Node) -> Result<(), ExchangeError> {
    let checked = async {
        let live = node.attempts.get_or_connect().await?;
        live.query(&Cmd::of(&["ROLE"])).await
    };
    let role = checked.await.map_err(ExchangeError::before_the_step)?;
    match is_role_of_master(&role) {
        true => Ok(()),
        false => Err(replaced()),
    }
}

/// A step that may wait for its script. If its caller drops it before it is sent, it was not sent.
struct CancelOnDrop<'a> {
    sent: Pending,
    progress: &'a Progress,
    was_sent_before: bool,
}

impl Drop for CancelOnDrop<'_> {
    fn drop(&mut self) {
        if self.sent.cancel() && !self.was_sent_before {
            self.progress.mark_unsent();
        }
    }
}

#[cfg(test)]
mod tests {
    use redlatch_testkit::Server;

    use super::super::refusing_proxy::{RefusingProxy, attempt, redis_of};
    use super::*;
    use crate::Client;

    /// Returns a client whose login has ended on an open connection.
    async fn client_without_login() -> (Server, Client, LiveConnection) {
        let server = Server::start();
        let () = server.command(&["ACL", "SETUSER", "w", "on", ">p", "~*", "&*", "+@all"]);
        let url = server.url().replace("redis://", "redis://w:p@");
        let client = Client::connect(&url).await.unwrap();
        let node = redis_of(&client).topology.only_node().unwrap();
        let live = node.attempts.get_or_connect().await.unwrap();
        let () = server.command(&["CONFIG", "SET", "requirepass", "other"]);
        live.query(&Cmd::of(&["RESET"])).await.unwrap();
        (server, client, live)
    }

    /// A proxy or a managed server may end a login, and leave the connection open.
    #[tokio::test]
    async fn login_that_has_ended_is_repeated_on_a_new_connection() {
        let (_server, client, _live) = client_without_login().await;
        let refused = client.lock("a").try_lock().await.unwrap_err();
        assert!(
            matches!(refused, Error::AuthenticationFailed { .. }),
            "{refused:?}"
        );
        assert!(client.lock("a").try_lock().await.unwrap().is_some());
    }

    /// Feared most: such a step is executed after a release of its owner on the next connection.
    #[tokio::test]
    async fn no_step_waits_where_the_login_has_ended() {
        let (_server, client, live) = client_without_login().await;
        let [login, step] = [Cmd::of(&["AUTH", "w", "p"]), Cmd::of(&["BLPOP", "b", "0"])];
        let lock = client.lock("a");
        let refused = async {
            let refused = lock.try_lock().await;
            assert!(matches!(refused, Err(Error::AuthenticationFailed { .. })));
            assert!(live.wire.has_ended());
        };
        let (.., step) = tokio::join!(refused, live.query(&login), live.query(&step));
        let error = step.unwrap_err();
        assert!(matches!(error, ExchangeError::Unanswered(_)), "{error:?}");
    }

    /// In a cluster, a node that hangs is replaced. It must not be connected to again for those that wait for their permits.
    #[tokio::test]
    async fn attempts_that_wait_for_permits_leave_a_node_with_it() {
        let server = Server::start_with(&["--cluster-enabled", "yes"]);
        let () = server.command(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
        let url = server.url().replace("redis://", "redis+cluster://");
        let client = Client::connect(&url).await.unwrap();
        drop(client.lock("a").lock().await.unwrap());
        client.flush().await;
        let node = redis_of(&client).topology.known_node("a").unwrap();
        let limiter = &node.limits.attempt_limiter;
        let permits: Vec<_> = std::iter::from_fn(|| limiter.try_acquire()).collect();
        let progress = Progress::default();
        let channel = "redisson_lock__channel:{a}";
        let mut waiting = pin!(attempt(&client, channel, Delivery::ACQUISITION, &progress));
        tokio::select! {
            biased;
            _ = waiting.as_mut() => panic!("there is no permit"),
            () = std::future::ready(()) => {}
        }
        node.invalidate();
        drop(permits);
        let error = waiting.await.err().unwrap();
        assert!(matches!(error, ExchangeError::NotExecuted(_)), "{error:?}");
        assert!(!progress.was_sent() && !node.attempts.is_connected());
        // What an unanswered attempt may have left there is settled there.
        let route = Route::AcquisitionsOf(node.attempts.get_or_connect().await.unwrap().server);
        let settling = attempt(&client, channel, Delivery::on(route), &progress).await;
        assert!(settling.is_ok());
    }

    /// In a cluster, subscriptions have a connection of their own.
    #[tokio::test]
    async fn login_that_has_ended_is_repeated_for_subscriptions() {
        let server = Server::start_with(&["--cluster-enabled", "yes"]);
        let () = server.command(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
        let () = server.command(&["ACL", "SETUSER", "w", "on", ">p", "~*", "&*", "+@all"]);
        let url = server.url().replace("redis://", "redis+cluster://w:p@");
        let [holder, client] = [Client::connect(&url).await, Client::connect(&url).await];
        let (held, client) = (holder.unwrap().lock("a").lock().await, client.unwrap());
        let lock = client.lock("a");
        let node = redis_of(&client).topology.known_node("a").unwrap();
        let live = node.pubsub().get_or_connect().await.unwrap();
        let () = server.command(&["CONFIG", "SET", "requirepass", "other"]);
        live.query(&Cmd::of(&["RESET"])).await.unwrap();
        let refused = lock.lock().await.unwrap_err();
        assert!(
            matches!(refused, Error::AuthenticationFailed { .. }),
            "{refused:?}"
        );
        let waiting = tokio::spawn(async move { lock.lock().await.map(drop) });
        let channels = client.session.waiting.channels.clone();
        while !channels.is_subscribed("redisson_lock__channel:{a}") && !waiting.is_finished() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        held.unwrap().unlock().await.unwrap();
        waiting.await.unwrap().unwrap();
    }

    /// The subscription is refused for now, and the step behind it is executed.
    #[tokio::test]
    async fn step_behind_a_refused_subscription_may_be_executed() {
        let server = Server::start();
        let command = ["SUBSCRIBE", "channel"];
        let proxy = RefusingProxy::start(&server, &command, "BUSY a script runs").await;
        let client = proxy.client().await;
        let _other = client.lock("other").lock().await.unwrap();
        let (delivery, progress) = (Delivery::on(Route::Acquisitions), Progress::default());
        let error = attempt(&client, "channel", delivery, &progress).await;
        let error = error.err().unwrap();
        assert!(matches!(error, ExchangeError::Unanswered(_)), "{error:?}");
        assert!(progress.was_sent());
        assert_eq!(server.command::<u32>(&["EXISTS", "a"]), 1);
    }
}
