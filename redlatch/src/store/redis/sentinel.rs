//! Sentinels: find the current master and notice failovers.
//!
//! A sentinel may be down, slow, cut off or wrong. So:
//!
//! 1. All sentinels are queried, and the address that most of them name counts
//!    ([`super::master_view`] decides).
//! 2. The server that they name must confirm that it is a master ([`super::connection`] queries its
//!    role).
//! 3. The sentinels publish failovers. A message, a broken connection or a missing answer is only a
//!    reason to repeat the query.
//! 4. There is one view of the master, which only the answers to these queries change. A connection
//!    that leads elsewhere is invalidated when the view changes, in any state, and connects to the
//!    master of the view.
//!
//! **Invariant**: a client uses one master at a time, and at most [`REFRESH_INTERVAL`] and two
//! [`QUERY_TIMEOUT`]s after a sentinel published a failover, none of its connections leads to the
//! former master. That holds if most sentinels can be reached and know the failover (each learns of
//! it within two seconds). A client that reaches none of them stays at the former master for as
//! long as that calls itself a master; it cannot know better. Then only
//! [`ReplicaSync`](super::ReplicaSync) prevents a second holder.
//!
//! What must not happen, and what prevents it. Feared most: a former master is cut off from the
//! others, not from its clients, and still calls itself a master. One client renews its lock there
//! while another one acquires the lock on the new master.
//!
//! - *The message arrives, and the query behind it fails or is late.* A message is received only
//!   once, so no query is the last one: see [`super::master_view`].
//! - *A client uses both masters.* A new connection uses the view, too, and compares it once more
//!   after it recorded where it leads: either it finds the change, or the change finds the
//!   connection.
//! - *The client returns to the former master*, because only a sentinel that missed the failover
//!   answers. An answer with an earlier epoch does not move a connection away from a master that
//!   works.
//! - *The watch ends with the runtime of one caller*, while connections of another runtime work at the
//!   former master. Each step starts it again. Test: `sentinels_are_watched_in_every_runtime`.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, timeout, timeout_at};

use super::connection::{MasterResolver, ReconnectingConnection, Target};
use super::connection_config::ConnectionConfig;
use super::endpoint::Endpoint;
use super::exchange_error::ExchangeError;
#[cfg(doc)]
use super::master_view::REFRESH_INTERVAL;
use super::master_view::{MasterView, SentinelReply, Verdict, most_voted};
use super::pubsub::{SubscriptionMode, text_field};
use super::refresh_task::{MIN_QUERY_TIME, RefreshTask, no_answer_within};
use super::server_report::SentinelReport;
use super::wire::Cmd;
use crate::environment::check_sockets;
use crate::error::Error;
use crate::join::{Boxed, join_all, join_until};
use crate::step::{ScriptReply, unexpected_reply};
use crate::store::{SharedSubscriber, Subscriber};
use crate::sync::Mutex;

/// Published when another server has become the master.
const SWITCH_MASTER_CHANNEL: &str = "+switch-master";

/// Time limit for one sentinel. A failover is followed even if some sentinels hang.
const QUERY_TIMEOUT: Duration = Duration::from_secs(1);

pub(super) struct Sentinels {
    sentinels: Vec<(Endpoint, Arc<ReconnectingConnection>)>,
    /// The connections that must lead to the master.
    master_connections: Mutex<Vec<Weak<ReconnectingConnection>>>,
    view: Arc<SharedView>,
    /// The outcome of the latest query.
    latest: Mutex<Option<Result<Endpoint, ExchangeError>>>,
    /// Wakes connections after each query, in the order in which they began to wait.
    queried: Notify,
    refresh_task: RefreshTask,
}

/// What is known about the master. Receives what the sentinels publish.
struct SharedView {
    /// The name of the master.
    name: String,
    view: Mutex<MasterView>,
    /// Notified when the next query may have to be earlier.
    changed: Arc<Notify>,
}

/// The outcome of a query of one sentinel, `None` if it does not know the master.
type SentinelAnswer = Result<Option<SentinelReply>, ExchangeError>;

impl Sentinels {
    pub(super) fn new(
        sentinels: &[Endpoint],
        mut config: ConnectionConfig,
        master: String,
    ) -> Arc<Sentinels> {
        let view = Arc::new(SharedView {
            name: master,
            view: Mutex::new(MasterView::new(sentinels.len(), Instant::now())),
            changed: Arc::default(),
        });
        let subscriber: SharedSubscriber = view.clone();
        config.connect_timeout = config.connect_timeout.min(QUERY_TIMEOUT);
        let connection = |endpoint: &Endpoint| {
            let connection = ReconnectingConnection::new(
                config.clone(),
                Target::Sentinel(endpoint.clone()),
                subscriber.clone(),
                SubscriptionMode::Restored,
                Arc::default(),
                None,
            );
            connection.subscribe_on_reconnect(SWITCH_MASTER_CHANNEL);
            (endpoint.clone(), connection)
        };
        Arc::new(Sentinels {
            sentinels: sentinels.iter().map(connection).collect(),
            master_connections: Mutex::default(),
            view,
            latest: Mutex::new(None),
            queried: Notify::new(),
            refresh_task: RefreshTask::default(),
        })
    }

    /// Registers a connection, which is invalidated when it leads to a server that is no longer the
    /// master.
    pub(super) fn track(&self, connection: &Arc<ReconnectingConnection>) {
        let connection = Arc::downgrade(connection);
        let mut connections = self.master_connections.lock();
        connections.retain(|other| other.strong_count() > 0);
        connections.push(connection);
    }

    /// Handles a sign of a failover.
    pub(super) fn request_refresh(self: &Arc<Self>) {
        self.ensure_refresh_task();
        self.view.suspect();
    }

    /// Watches for changes from now on, unless that is done already, for as long as the runtime lives.
    pub(super) fn ensure_refresh_task(self: &Arc<Self>) {
        let refresh = || refresh_loop(Arc::downgrade(self), self.view.changed.clone());
        self.refresh_task.ensure_running(refresh);
    }

    /// Queries all sentinels. Returns when most of them name the same master, or all have answered
    /// or failed. The answers are in the order of the sentinels.
    async fn query(&self) -> Vec<Option<SentinelAnswer>> {
        let queries = self.sentinels.iter();
        let queries = queries.map(|(at, connection)| self.query_in_time(at, connection));
        let enough = |answers: &[Option<SentinelAnswer>]| {
            let votes = most_voted(replies(answers)).map_or(0, |(_, votes)| votes);
            votes * 2 > answers.len()
        };
        join_until(queries, enough, MIN_QUERY_TIME).await
    }

    /// Returns the error for answers that name no master.
    fn undecided(&self, answers: Vec<Option<SentinelAnswer>>) -> ExchangeError {
        let name = &self.view.name;
        let mut reasons = Vec::new();
        let is_refusal = |answer: &Option<SentinelAnswer>| {
            matches!(answer, Some(Err(ExchangeError::Permanent(_))))
        };
        let are_refusals = answers.iter().all(is_refusal);
        // Of a name that the sentinels have known before, it passes: they are being set up again.
        let is_unknown = |answer: &Option<SentinelAnswer>| matches!(answer, Some(Ok(None)));
        if answers.iter().all(is_unknown) && self.view.view.lock().master().is_none() {
            let reason = format!(
                "no sentinel knows a master called {name:?}; after the last `/` is the name that is in \
                 `sentinel monitor` of their configuration"
            );
            return Error::Refused { reason }.into();
        }
        for ((at, _), answer) in self.sentinels.iter().zip(answers) {
            let Some(answer) = answer else { continue };
            reasons.push(match answer {
                // What one sentinel refuses, another one may answer; but wrong credentials stay
                // wrong.
                Err(failure @ ExchangeError::Permanent(_))
                    if are_refusals
                        || !matches!(failure, ExchangeError::Permanent(Error::Refused { .. })) =>
                {
                    return failure.refused_by_sentinel(at);
                }
                Err(failure) => {
                    let (at, reason) = (at.to_string(), failure.reason());
                    match reason.starts_with(&at) {
                        true => reason,
                        false => format!("{at}: {reason}"),
                    }
                }
                Ok(Some(SentinelReply { endpoint, .. })) => {
                    format!("one sentinel reports {endpoint}")
                }
                Ok(None) => format!("{at}: it knows no master called {name:?}"),
            });
        }
        reasons.dedup();
        ExchangeError::not_executed(reasons.join("; "))
    }

    /// Queries all sentinels, and waits for each of them.
    pub(super) async fn reports(&self) -> Vec<SentinelReport> {
        let queries = self.sentinels.iter().map(|(at, connection)| async move {
            let answer = self.query_in_time(at, connection).await;
            SentinelReport {
                address: at.to_string(),
                master: answer
                    .map(|reply| Some(reply?.endpoint.to_string()))
                    .map_err(|failure| failure.refused_by_sentinel(at).into_error()),
            }
        });
        join_all(queries).await
    }

    /// Queries one sentinel, within its time limit.
    async fn query_in_time(
        &self,
        at: &Endpoint,
        connection: &Arc<ReconnectingConnection>,
    ) -> Result<Option<SentinelReply>, ExchangeError> {
        let query = self.query_sentinel(at, connection);
        let live = connection.live();
        let answer = timeout(QUERY_TIMEOUT, query).await;
        answer.unwrap_or_else(|_| {
            // The network may have lost it without telling: another one may work.
            live.inspect(|live| connection.discard(live));
            Err(no_answer_within(QUERY_TIMEOUT, connection))
        })
    }

    /// Queries one sentinel. `None`: it does not know that master.
    async fn query_sentinel(
        &self,
        at: &Endpoint,
        connection: &Arc<ReconnectingConnection>,
    ) -> Result<Option<SentinelReply>, ExchangeError> {
        let live = connection.get_or_connect().await?;
        let query = |kind| Cmd::of(&["SENTINEL", kind, &self.view.name]);
        let address = query("GET-MASTER-ADDR-BY-NAME");
        let address = live.query(&address).await;
        let is_no_sentinel = || {
            let reason = format!("{at} is not a sentinel");
            Error::UnsupportedServer { reason }.into()
        };
        let address = address.map_err(|failure| failure.if_unknown_command(is_no_sentinel))?;
        let (host, port) = match &address {
            ScriptReply::Nil => return Ok(None),
            address => host_and_port(address)
                .ok_or_else(|| ExchangeError::Permanent(unexpected_reply(address)))?,
        };
        // Only for the epoch: the address in this reply is the old one until a failover is
        // complete.
        let master = live.reply(live.wire.send(&query("MASTER"))).await?;
        let epoch = text_field(&master, "config-epoch").and_then(|epoch| epoch.parse().ok());
        Ok(Some(SentinelReply {
            endpoint: at.with_host_and_port(host, port),
            epoch: epoch.unwrap_or_default(),
        }))
    }

    /// Queries the sentinels. If the master has changed, the connections that lead elsewhere are
    /// invalidated, and the watchdog checks all holds.
    async fn refresh(&self) {
        self.view.view.lock().on_query();
        let answers = self.query().await;
        let connections: Vec<Arc<ReconnectingConnection>> = {
            let connections = self.master_connections.lock();
            connections.iter().filter_map(Weak::upgrade).collect()
        };
        let works = connections.iter().any(|one| one.is_connected());
        let replies = replies(&answers);
        let verdict = self
            .view
            .view
            .lock()
            .on_replies(replies, works, Instant::now());
        let outcome = match verdict {
            Verdict::Master(master) => Ok(master),
            Verdict::FailedOver(master) => {
                self.follow(&master, &connections);
                Ok(master)
            }
            Verdict::Undecided => Err(self.undecided(answers)),
        };
        if let Err(failure) = &outcome {
            tracing::debug!(name = self.view.name, error = ?failure, "the sentinels named no master");
        }
        *self.latest.lock() = Some(outcome);
        self.queried.notify_waiters();
    }

    /// Invalidates the connections that lead to another server than the new master.
    fn follow(&self, master: &Endpoint, connections: &[Arc<ReconnectingConnection>]) {
        for connection in connections {
            let endpoint = connection.current_endpoint();
            if endpoint.is_some_and(|endpoint| endpoint != *master) {
                tracing::info!(%master, name = self.view.name, "following a failover");
                connection.invalidate();
            }
            connection.report_failover();
        }
    }
}

impl MasterResolver for Sentinels {
    /// Returns the outcome of the latest query, or of the next one if that is due.
    fn resolve(self: Arc<Self>) -> Boxed<'static, Result<Endpoint, ExchangeError>> {
        Box::pin(async move {
            check_sockets()?;
            let queried = self.queried.notified();
            self.view.view.lock().on_needed();
            self.request_refresh();
            let next_query = self.view.view.lock().next_query();
            if next_query <= Instant::now() {
                queried.await;
            }
            let outcome = self.latest.lock().clone();
            outcome.unwrap_or_else(|| Err(ExchangeError::not_executed("no sentinel was queried")))
        })
    }

    fn is_current(&self, endpoint: &Endpoint) -> bool {
        self.view.view.lock().master() == Some(endpoint)
    }

    fn report_replica(&self) {
        self.view.view.lock().on_replica(Instant::now());
    }
}

/// Queries the sentinels whenever the view asks for it. That also restores the connections to the
/// sentinels, on which they publish failovers.
async fn refresh_loop(sentinels: Weak<Sentinels>, changed: Arc<Notify>) {
    while let Some(current) = sentinels.upgrade() {
        let next_query = current.view.view.lock().next_query();
        if next_query <= Instant::now() {
            current.refresh().await;
        } else {
            drop(current);
            let _ = timeout_at(next_query, changed.notified()).await;
        }
    }
}

impl SharedView {
    fn suspect(&self) {
        self.update(MasterView::on_suspicion);
    }

    /// Handles an event after which the next query may have to be earlier.
    fn update(&self, event: impl FnOnce(&mut MasterView, Instant)) {
        event(&mut self.view.lock(), Instant::now());
        self.changed.notify_one();
    }
}

impl Subscriber for SharedView {
    /// The message begins with the name of the master that was replaced. Sentinels may watch hundreds.
    fn on_message(&self, _: &str, message: &str) {
        let name = message.split(' ').next().unwrap_or_default();
        if name.is_empty() || name == self.name {
            self.update(MasterView::on_message);
        }
    }

    fn on_disconnect(&self) {
        self.update(MasterView::on_disconnect);
    }

    fn on_unsubscribed(&self, _: &str) {
        self.suspect();
    }
}

fn replies(answers: &[Option<SentinelAnswer>]) -> impl Iterator<Item = &SentinelReply> {
    answers.iter().flatten().flatten().flatten()
}

/// `[host, port]`, both as text.
fn host_and_port(address: &ScriptReply) -> Option<(&str, u16)> {
    match address.elements()? {
        [host, port] => Some((host.as_text()?, port.as_text()?.parse().ok()?)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A client must not wait for a master whose name is wrong, as in an outage. Of a name that was right, sentinels that are set
    /// up again may not know it for a while.
    #[test]
    fn name_that_no_sentinel_has_ever_known_is_refused() {
        let at = [1, 2].map(|port| Endpoint::new("h", port));
        let sentinels = Sentinels::new(&at, ConnectionConfig::plain(), "main".into());
        let fails = |answers: [Option<SentinelAnswer>; 2]| {
            let failure = sentinels.undecided(answers.into());
            (failure.is_permanent(), failure.reason())
        };
        let is_wrong = |(is_permanent, reason): (bool, String)| {
            assert!(reason.contains("\"main\""), "{reason}");
            is_permanent
        };
        assert!(is_wrong(fails([Some(Ok(None)), Some(Ok(None))])));
        let (is_permanent, reason) = fails([None, Some(Ok(None))]);
        assert!(!is_permanent);
        assert_eq!(reason, "h:2: it knows no master called \"main\"");
        let reply = SentinelReply {
            endpoint: Endpoint::new("h", 3),
            epoch: 0,
        };
        let mut view = sentinels.view.view.lock();
        view.on_replies(std::iter::once(&reply), false, Instant::now());
        drop(view);
        assert!(!is_wrong(fails([Some(Ok(None)), Some(Ok(None))])));
    }

    /// All masters of a sentinel have one channel.
    #[tokio::test(start_paused = true)]
    async fn only_a_message_about_its_own_master_is_a_reason_to_query() {
        let view = SharedView {
            name: "main".into(),
            view: Mutex::new(MasterView::new(3, Instant::now())),
            changed: Arc::default(),
        };
        // The last pause of a series is the longest.
        for _ in 0..10 {
            let mut view = view.view.lock();
            let _ = view.on_replies(std::iter::empty(), true, Instant::now());
        }
        let next_query = || view.view.lock().next_query();
        let planned = next_query();
        tokio::time::advance(Duration::from_secs(1)).await;
        for other in ["other h 1 h 2", "main-2 h 1 h 2"] {
            view.on_message(SWITCH_MASTER_CHANNEL, other);
            assert_eq!(next_query(), planned, "{other}");
        }
        view.on_message(SWITCH_MASTER_CHANNEL, "main h 1 h 2");
        assert_eq!(next_query(), Instant::now());
    }
}
