//! Redis and Valkey: runs steps as scripts on the server that serves their keys.
//!
//! 1. `Topology` finds the node of the step's first key: the single server, the master that the sentinels
//!    name, or the owner of the slot in a cluster.
//! 2. An attempt to acquire waits for a turn at that node (`turns`). Renewals, releases and inspections do
//!    not queue.
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

use self::fault::{Fault, Retry};
use self::given::Given;
use self::link::{Link, Live};
use self::node::Node;
pub(crate) use self::replicas::Confirmation;
pub use self::replicas::ReplicaSync;
use self::replicas::Replicas;
pub(crate) use self::topology::Settings;
use self::topology::Topology;
pub(crate) use self::turns::{Turn, Turns};
use super::{Answer, Cursor, Delivery, Doubts, NodeId, Route, Sent, ServerId, SharedEar, Sought};
use crate::Boxed;
use crate::error::{Error, Result};
use crate::step::{Args, Step, refused};

mod access;
mod cluster;
mod dial;
mod facts;
mod fault;
pub(crate) mod given;
mod link;
mod listening;
mod lookout;
mod node;
mod replicas;
mod sentinel;
mod slot;
#[cfg(feature = "tls")]
mod tls;
mod told;
mod topology;
mod turns;
mod url;

/// Keys that SCAN inspects per round trip.
const SCANNED_AT_ONCE: usize = 500;

/// Limit of consecutive redirections in a cluster.
const REDIRECTIONS: usize = 8;

pub(crate) struct Redis {
    topology: Topology,
    doubts: Arc<Doubts>,
    response_timeout: Duration,
}

/// One command with everything needed to send it and to read its reply.
struct Exchange<'a> {
    cmd: Cmd,
    /// Builds the command to send if the server does not know the script.
    in_full: Option<&'a (dyn Fn() -> Cmd + Sync)>,
    /// The key that determines the node, and is named in errors about it.
    key: &'a str,
    /// The node, if not the key determines it.
    node: Option<&'a Arc<Node>>,
    /// The channel to subscribe to first.
    channel: Option<&'a str>,
    /// Records that the command was sent.
    sent: Option<&'a Sent>,
    delivery: Delivery,
    /// Whether the script may access more keys than are declared.
    undeclared: bool,
}

/// Reply of a server.
struct Heard {
    answer: Value,
    /// When the answered command was sent.
    sent: Instant,
    confirmation: Confirmation,
    server: ServerId,
}

impl Redis {
    /// Connects, and checks that the servers are supported.
    pub(crate) async fn connect(
        url: &str,
        given: &Given,
        settings: Settings,
        ear: SharedEar,
    ) -> Result<Redis> {
        let response_timeout = settings.response_timeout;
        // Not repeated: a program that starts up should get the error at once. If no connection can
        // be made, the connect timeout reports that.
        let limit = settings.connect_timeout.saturating_add(response_timeout);
        let doubts = Arc::<Doubts>::default();
        let target = url::target(url, given)?;
        let connecting = Topology::connect(target, settings, ear, doubts.clone());
        let topology = timeout(limit, connecting).await;
        let topology = topology.map_err(|_| Error::ResponseTimeout { after: limit })??;
        Ok(Redis {
            topology,
            doubts,
            response_timeout,
        })
    }

    pub(crate) fn address(&self) -> String {
        self.topology.name()
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
        sent: &Sent,
    ) -> Result<Answer<S::Reply>> {
        let in_full = || self.in_full(step);
        let exchange = self.exchange(step, &in_full, delivery, channel, sent)?;
        let (heard, repeated) = self.persist(&exchange).await?;
        heard.read(step, repeated)
    }

    pub(crate) async fn run_once<S: Step>(
        &self,
        step: &S,
        within: Duration,
    ) -> Result<Answer<S::Reply>> {
        let in_full = || self.in_full(step);
        let sent = Sent::default();
        let exchange = self.exchange(step, &in_full, Delivery::IMMEDIATE, None, &sent)?;
        let limit = within.min(self.response_timeout);
        self.once(&exchange, limit).await?.read(step, false)
    }

    pub(crate) async fn run_unrepeated<S: Step>(
        &self,
        step: &S,
        what: &'static str,
        delivery: Delivery,
        answered_within: Duration,
        sent: &Sent,
    ) -> Result<Answer<S::Reply>> {
        check_runtime()?;
        let in_full = || self.in_full(step);
        let exchange = self.exchange(step, &in_full, delivery, None, sent)?;
        let unknown = |reason| Error::OutcomeUnknown { step: what, reason };
        let mut retry = Retry::until(self.response_timeout);
        let patience = answered_within.max(self.response_timeout);
        loop {
            let mut sending = pin!(self.send(&exchange));
            let answered = match sent
                .in_time(retry.begun, self.response_timeout, sending.as_mut())
                .await
            {
                Some(answered) => answered,
                None => {
                    self.topology.suspect();
                    if !sent.get() {
                        return Err(retry.given_up(self.silence(&exchange), sent));
                    }
                    let from = sent.counts_from().max(Some(retry.begun));
                    let answered_by = from.unwrap_or(retry.begun) + patience;
                    match timeout_at(answered_by, sending).await {
                        Ok(answered) => answered,
                        Err(_) => return Err(unknown(format!("no answer within {patience:?}"))),
                    }
                }
            };
            match answered {
                Ok(heard) => {
                    sent.answered();
                    return heard.read(step, false);
                }
                Err(Fault::Unanswered(reason)) => return Err(unknown(reason)),
                Err(fault) => {
                    sent.clear();
                    retry.after(fault, sent).await?;
                    if retry.left().is_zero() {
                        return Err(retry.given_up(None, sent));
                    }
                }
            }
        }
    }

    pub(crate) fn doubts(&self) -> Arc<Doubts> {
        self.doubts.clone()
    }

    pub(crate) fn node(&self, key: &str) -> Option<NodeId> {
        self.topology.known_node(key)
    }

    pub(crate) async fn settling_turn(&self, key: &str) -> Option<OwnedSemaphorePermit> {
        let limits = self.topology.limits(key);
        limits.settlings.clone().acquire_owned().await.ok()
    }

    /// Returns the error for a request for this key that got no news for this long.
    pub(crate) fn no_answer(&self, key: &str, after: Duration) -> Error {
        fault::no_answer(after, self.topology.silence(key))
    }

    pub(crate) fn response_timeout(&self) -> Duration {
        self.response_timeout
    }

    pub(crate) async fn unsubscribe(&self, channel: &str) -> Result<()> {
        match timeout(self.response_timeout, self.topology.unsubscribe(channel)).await {
            Ok(done) => done.map_err(Fault::into_error),
            Err(_) => Err(Error::ResponseTimeout {
                after: self.response_timeout,
            }),
        }
    }

    /// Returns one page of keys. Visits one node after the other.
    pub(crate) async fn scan(
        &self,
        pattern: &str,
        sought: Sought,
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
        scan.arg("COUNT").arg(SCANNED_AT_ONCE);
        scan.arg("TYPE").arg(match sought {
            Sought::Hashes => "hash",
            Sought::Strings => "string",
        });
        let exchange = Exchange {
            node: Some(node),
            ..Exchange::plain(scan)
        };
        let (heard, _) = self.persist(&exchange).await?;
        let (next, keys): (u64, Vec<Vec<u8>>) =
            redis::from_redis_value(heard.answer).map_err(|e| Error::Refused {
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

    /// Repeats the exchange until there is an answer or the response timeout has passed. Also returns
    /// whether the answer may be to a repetition.
    async fn persist(&self, exchange: &Exchange<'_>) -> Result<(Heard, bool)> {
        check_runtime()?;
        let own = Sent::default();
        let sent = exchange.sent.unwrap_or(&own);
        let mut retry = Retry::until(self.response_timeout);
        let begun = retry.begun;
        let answered = {
            let trying = pin!(async {
                loop {
                    match self.send(exchange).await {
                        Ok(answer) => return Ok(answer),
                        Err(fault) => retry.after(fault, sent).await?,
                    }
                }
            });
            sent.in_time(begun, self.response_timeout, trying).await
        };
        match answered {
            Some(heard) => {
                // An error that a retry does not change is an answer, too.
                sent.answered();
                heard.map(|heard| (heard, retry.repeated))
            }
            None => {
                self.topology.suspect();
                Err(retry.given_up(self.silence(exchange), sent))
            }
        }
    }

    async fn once(&self, exchange: &Exchange<'_>, limit: Duration) -> Result<Heard> {
        check_runtime()?;
        match timeout(limit, pin!(self.send(exchange))).await {
            Ok(answer) => answer.map_err(Fault::into_error),
            Err(_) => {
                self.topology.suspect();
                Err(Error::ResponseTimeout { after: limit })
            }
        }
    }

    /// Returns a hint for the timeout error if there is not even a connection.
    fn silence(&self, exchange: &Exchange<'_>) -> Option<&'static str> {
        match exchange.node {
            Some(node) => node.silence(),
            None => self.topology.silence(exchange.key),
        }
    }

    /// Makes one exchange, following redirections of the cluster.
    async fn send(&self, exchange: &Exchange<'_>) -> Result<Heard, Fault> {
        let mut found;
        let mut node = match exchange.node.or(self.topology.only_node()) {
            Some(node) => node,
            None => {
                found = self.topology.node(exchange.key).await?;
                &found
            }
        };
        let mut importing = false;
        // If an earlier try was not answered, the store may have applied it. A redirection of this try does
        // not change that.
        let sent_before = exchange.sent.is_some_and(Sent::get);
        for _ in 0..REDIRECTIONS {
            let answered = self.send_to(node, exchange, importing).await;
            if exchange.delivery.queued {
                if answered.is_ok() {
                    node.limits.turns.answered();
                }
                drop(exchange.sent.and_then(Sent::take_turn));
            }
            let fault = match answered {
                Ok(answer) => return Ok(answer),
                Err(fault) => fault,
            };
            let other = match &fault {
                Fault::Moved(to) => Box::pin(self.topology.moved(exchange.key, to)).await,
                Fault::Asked(_) if exchange.undeclared => {
                    let said = "TRYAGAIN the slot is moving, and some of its keys are on another \
                                node";
                    return Err(Fault::NotNow(said.into()));
                }
                Fault::Asked(to) => self.topology.asked(exchange.key, to),
                Fault::Deposed(_)
                | Fault::NotSent(_)
                | Fault::NotNow(_)
                | Fault::Unanswered(_)
                | Fault::Final(_) => None,
            };
            let Some(other) = other else {
                if !matches!(fault, Fault::Final(_) | Fault::NotNow(_)) {
                    self.topology.suspect();
                }
                return Err(fault);
            };
            if let Some(sent) = exchange.sent
                && !sent_before
            {
                // That node did nothing.
                sent.clear();
            }
            found = other;
            (node, importing) = (&found, matches!(fault, Fault::Asked(_)));
        }
        Err(Fault::NotSent(
            "too many redirects between the nodes of the cluster".into(),
        ))
    }

    /// Makes one exchange with this node. An attempt keeps its turn until the caller takes it back.
    async fn send_to(
        &self,
        node: &Node,
        exchange: &Exchange<'_>,
        importing: bool,
    ) -> Result<Heard, Fault> {
        let link = match exchange.delivery.route {
            Route::Commands => &node.commands,
            Route::Acquisitions | Route::AcquisitionsOf(_) => &node.attempts,
        };
        let mut turn = None;
        if exchange.delivery.queued {
            let free = node.limits.turns.free();
            turn = match free.filter(|_| unconnected(node, exchange).is_none()) {
                Some(turn) => Some(turn),
                None => self.turn(node, exchange).await?,
            };
        }
        // If an attempt is dropped without an answer, its turn passes to the task that settles it. An
        // inspection needs no settling, so its turn ends here.
        if exchange.delivery.replicate
            && let Some(sent) = exchange.sent
            && let Some(turn) = turn.take()
        {
            sent.keep_turn(turn);
        }
        let together = Arc::ptr_eq(link, &node.messages);
        // While a slot moves, its subscriptions stay at the source node, which ends them when the move is
        // complete; waiters then retry. The target node would refuse them.
        let channel = exchange.channel.filter(|_| !importing);
        if let Some(channel) = channel {
            node.messages.want(channel);
            if !together {
                Box::pin(node.messages.listen(channel)).await?;
            }
        }
        let mut live = link.live().await?;
        if let Route::AcquisitionsOf(server) = exchange.delivery.route
            && server != live.server()
        {
            let reason = "another server replaced this one and may not have the acquisition";
            return Err(Fault::Unanswered(reason.into()));
        }
        let replicas = node.replicas.as_ref();
        let replicas = replicas.filter(|_| exchange.delivery.replicate);
        if let Some(replicas) = replicas {
            Box::pin(replicas.know(link, &live)).await?;
        }
        if let Some(sent) = exchange.sent {
            sent.set();
        }
        let mut sent = Instant::now();
        let channel = channel.filter(|_| together);
        let sending = Sending {
            link,
            importing,
            replicas,
        };
        let (mut answer, mut confirmation) =
            sending.send(&mut live, &exchange.cmd, channel).await?;
        if let Value::ServerError(error) = &answer
            && error.code() == "NOSCRIPT"
            && let Some(in_full) = exchange.in_full
        {
            // A new or flushed server. EVAL loads the script for later.
            sent = Instant::now();
            (answer, confirmation) = Box::pin(sending.send(&mut live, &in_full(), None)).await?;
        }
        match answer {
            Value::ServerError(error) => Err(match Fault::answered(&error, exchange.key) {
                // With a single server there is no other node, so a retry does not help.
                Fault::Deposed(said) if self.topology.is_single() => {
                    Fault::Final(refused(exchange.key, said))
                }
                fault => {
                    if matches!(fault, Fault::Deposed(_)) {
                        link.leave(&live);
                    }
                    fault
                }
            }),
            answer => {
                let server = live.server();
                link.keep(live);
                Ok(Heard {
                    answer,
                    sent,
                    confirmation,
                    server,
                })
            }
        }
    }

    /// Waits for the turn to send an attempt to this node. Without a connection no attempt has a turn: all
    /// wait for the one attempt to connect, and fail together if that fails.
    ///
    /// Boxed: few attempts wait.
    fn turn<'a>(
        &'a self,
        node: &'a Node,
        exchange: &'a Exchange<'_>,
    ) -> Boxed<'a, Result<Option<Turn>, Fault>> {
        Box::pin(async move {
            loop {
                let turn = match (node.limits.turns.free(), exchange.sent) {
                    (Some(turn), _) => Some(turn),
                    (None, Some(sent)) => {
                        let _queued = sent.queued_at(node.limits.turns.clone());
                        node.limits.turns.next().await
                    }
                    (None, None) => node.limits.turns.next().await,
                };
                let Some(link) = unconnected(node, exchange) else {
                    return Ok(turn);
                };
                drop(turn);
                link.live().await?;
            }
        })
    }

    fn exchange<'a, S: Step>(
        &self,
        step: &'a S,
        in_full: &'a (dyn Fn() -> Cmd + Sync),
        delivery: Delivery,
        channel: Option<&'a str>,
        sent: &'a Sent,
    ) -> Result<Exchange<'a>> {
        let mut keys = step.keys();
        let key = keys.next().unwrap_or_default();
        self.topology.check_together(key, keys)?;
        Ok(Exchange {
            in_full: Some(in_full),
            key,
            channel,
            sent: Some(sent),
            delivery,
            undeclared: step.script().has_undeclared_keys(),
            ..Exchange::plain(self.by_sha(step))
        })
    }

    fn by_sha<S: Step>(&self, step: &S) -> Cmd {
        let script = step.script().sha(self.topology.publishing());
        command(step, "EVALSHA", script)
    }

    fn in_full<S: Step>(&self, step: &S) -> Cmd {
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

/// Returns a link that an attempt needs and that has no connection yet.
fn unconnected<'a>(node: &'a Node, exchange: &Exchange<'_>) -> Option<&'a Arc<Link>> {
    let messages = exchange.channel.map(|_| &node.messages);
    let mut links = std::iter::once(&node.attempts).chain(messages);
    links.find(|link| !link.is_connected())
}

/// How commands are sent on one connection.
struct Sending<'a> {
    link: &'a Arc<Link>,
    importing: bool,
    /// The replicas that must confirm the command.
    replicas: Option<&'a Arc<Replicas>>,
}

impl Sending<'_> {
    /// Sends a command, behind a subscription and followed by WAIT for the replicas, in one round trip.
    async fn send(
        &self,
        live: &mut Live,
        cmd: &Cmd,
        channel: Option<&str>,
    ) -> Result<(Value, Confirmation), Fault> {
        if channel.is_none() && self.replicas.is_none() {
            let answer = self.link.ask_node(live, cmd, self.importing).await?;
            return Ok((answer, Confirmation::NOT_NEEDED));
        }
        // Boxed, as are other rare paths, so that common futures stay small.
        Box::pin(self.send_together(live, cmd, channel)).await
    }

    async fn send_together(
        &self,
        live: &mut Live,
        cmd: &Cmd,
        channel: Option<&str>,
    ) -> Result<(Value, Confirmation), Fault> {
        let link = self.link;
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
                        Some(channel) => link.subscribe(&mut before, channel).await,
                        None => Ok(()),
                    }
                },
                link.ask_node(live, cmd, self.importing),
                async {
                    match self.replicas {
                        Some(replicas) => replicas.confirm(link, &after),
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

impl Heard {
    fn read<S: Step>(self, step: &S, repeated: bool) -> Result<Answer<S::Reply>> {
        Ok(Answer {
            reply: step.reply(self.answer)?,
            sent: self.sent,
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
            in_full: None,
            key: "",
            node: None,
            channel: None,
            sent: None,
            delivery: Delivery::IMMEDIATE,
            undeclared: false,
        }
    }
}

/// Checks for a runtime with timers: without it, timeouts would panic.
fn check_runtime() -> Result<()> {
    crate::runtime::current().map(drop)
}
