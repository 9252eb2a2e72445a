//! Sentinels: find the current master and notice failovers.
//!
//! A sentinel may be down, slow, cut off or wrong. So:
//!
//! 1. All sentinels are queried, and the address that most of them name counts.
//! 2. The server that they name must confirm that it is a master ([`super::connection`] queries its role).
//! 3. The sentinels publish failovers. A message, a broken connection or a missing answer is only a reason
//!    to repeat the query.
//! 4. A connection that leads to another server than the master is invalidated.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::Notify;

use super::connection::{MasterResolver, Preamble, ReconnectingConnection, Target};
use super::connection_config::ConnectionConfig;
use super::endpoint::Endpoint;
use super::exchange_error::ExchangeError;
use super::pubsub::{SubscriptionMode, text_field};
use super::refresh_task::{Checks, MIN_QUERY_TIME, RefreshTask, answer_within};
use crate::error::Error;
use crate::join::{Boxed, join_until};
use crate::lease::MAX_LEASE;
use crate::store::{SharedSubscriber, Subscriber};
use crate::sync::Mutex;

/// Published when another server has become the master.
const SWITCH_MASTER_CHANNEL: &str = "+switch-master";

/// Time limit for one sentinel. A failover is followed even if some sentinels hang.
const QUERY_TIMEOUT: Duration = Duration::from_secs(1);

/// Interval at which the client tries to reconnect to sentinels without a connection.
const RECONNECT_INTERVAL: Duration = Duration::from_secs(3);

pub(super) struct Sentinels {
    master: String,
    sentinels: Vec<(Endpoint, Arc<ReconnectingConnection>)>,
    /// The connections that must lead to the master.
    master_connections: Mutex<Vec<Weak<ReconnectingConnection>>>,
    /// The master at the last check.
    latest_master: Mutex<Option<Endpoint>>,
    refresh_task: RefreshTask,
}

/// One sentinel's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
struct SentinelReply {
    endpoint: Endpoint,
    /// Increases with every failover.
    epoch: u64,
}

impl Sentinels {
    pub(super) fn new(
        sentinels: &[Endpoint],
        config: &ConnectionConfig,
        master: String,
        connect_timeout: Duration,
    ) -> Arc<Sentinels> {
        let refresh_task = RefreshTask::default();
        let subscriber: SharedSubscriber = refresh_task.signals.changed.clone();
        let connection = |endpoint: &Endpoint| {
            let connection = ReconnectingConnection::new(
                config.clone(),
                Target::Fixed(endpoint.to_addr()),
                connect_timeout.min(QUERY_TIMEOUT),
                false,
                subscriber.clone(),
                SubscriptionMode::Restored,
                None,
            );
            connection.subscribe_on_reconnect(SWITCH_MASTER_CHANNEL);
            (endpoint.clone(), connection)
        };
        Arc::new(Sentinels {
            master,
            sentinels: sentinels.iter().map(connection).collect(),
            master_connections: Mutex::default(),
            latest_master: Mutex::default(),
            refresh_task,
        })
    }

    /// Registers a connection, which is invalidated when it leads to a server that is no longer the master.
    pub(super) fn track(&self, connection: &Arc<ReconnectingConnection>) {
        let connection = Arc::downgrade(connection);
        let mut connections = self.master_connections.lock();
        connections.retain(|other| other.strong_count() > 0);
        connections.push(connection);
    }

    /// Handles a sign of a failover.
    pub(super) fn request_refresh(self: &Arc<Self>) {
        self.ensure_refresh_task();
        self.refresh_task.signals.failed.notify_one();
    }

    /// Watches for changes from now on, for as long as the runtime lives.
    fn ensure_refresh_task(self: &Arc<Self>) {
        let refresh = |checks| refresh_loop(Arc::downgrade(self), checks);
        self.refresh_task.ensure_running(refresh);
    }

    /// Returns the master that most sentinels name.
    async fn query_master(&self) -> Result<Endpoint, ExchangeError> {
        let queries = self.sentinels.iter().map(|(at, connection)| async move {
            let query = self.query_sentinel(at, connection);
            let answer = answer_within(QUERY_TIMEOUT, connection, query).await;
            answer.map_err(|failure| (at, failure))
        });
        let enough = |answers: &[Option<Result<Option<SentinelReply>, _>>]| {
            let votes = most_voted(replies(answers)).map_or(0, |(_, votes)| votes);
            votes * 2 > answers.len()
        };
        let answers = join_until(queries, enough, MIN_QUERY_TIME).await;
        if let Some((endpoint, _)) = most_voted(replies(&answers)) {
            return Ok(endpoint);
        }
        let mut reasons = Vec::new();
        for answer in answers.into_iter().flatten() {
            reasons.push(match answer {
                // Wrong credentials stay wrong.
                Err((_, failure @ ExchangeError::Permanent(_))) => return Err(failure),
                Err((at, failure)) => format!("{at}: {}", failure.reason()),
                Ok(Some(SentinelReply { endpoint, .. })) => {
                    format!("one sentinel reports {endpoint}")
                }
                Ok(None) => format!("no sentinel knows a master called {:?}", self.master),
            });
        }
        reasons.dedup();
        Err(ExchangeError::not_executed(reasons.join("; ")))
    }

    /// Queries one sentinel. `None`: it does not know that master.
    async fn query_sentinel(
        &self,
        at: &Endpoint,
        connection: &Arc<ReconnectingConnection>,
    ) -> Result<Option<SentinelReply>, ExchangeError> {
        let mut live = connection.get_or_connect().await?;
        let query = |kind| redis::cmd("SENTINEL").arg(kind).arg(&self.master).take();
        let address = query("GET-MASTER-ADDR-BY-NAME");
        let address = connection.query(&mut live, &address).await;
        let address = address.map_err(|failure| classify_failure(at, failure))?;
        let Some((host, port)) = redis::from_redis_value::<Option<(String, u16)>>(address)
            .map_err(|e| ExchangeError::from_client_error(&e.into()))?
        else {
            return Ok(None);
        };
        // Only for the epoch: the address in this reply is the old one until a failover is complete.
        let master = query("MASTER");
        let master = connection
            .query_node(&mut live, &master, Preamble::None)
            .await?;
        let epoch = text_field(&master, "config-epoch").and_then(|epoch| epoch.parse().ok());
        Ok(Some(SentinelReply {
            endpoint: at.with_host_and_port(&host, port),
            epoch: epoch.unwrap_or_default(),
        }))
    }

    /// Invalidates the connections that do not lead to the master. After a failover, the watchdog checks all holds.
    /// Returns whether there was a failover.
    async fn refresh(&self) -> bool {
        let Ok(master) = self.query_master().await else {
            return false;
        };
        let before = self.latest_master.lock().replace(master.clone());
        let failed_over = before.is_some_and(|before| before != master);
        let master_connections = self.master_connections.lock();
        for connection in master_connections.iter().filter_map(Weak::upgrade) {
            let endpoint = connection.current_endpoint();
            if endpoint.is_some_and(|endpoint| endpoint != master) {
                tracing::info!(%master, name = self.master, "following a failover");
                connection.invalidate();
            }
            if failed_over {
                connection.report_failover();
            }
        }
        failed_over
    }
}

impl MasterResolver for Sentinels {
    fn resolve(self: Arc<Self>) -> Boxed<'static, Result<Endpoint, ExchangeError>> {
        Box::pin(async move {
            let master = self.query_master().await?;
            self.ensure_refresh_task();
            Ok(master)
        })
    }
}

/// Repeats the query when there is a reason to. Also restores the connections to the sentinels, on which they
/// publish such reasons.
async fn refresh_loop(sentinels: Weak<Sentinels>, mut checks: Checks) {
    let mut interval = Duration::ZERO;
    loop {
        checks.next(interval).await;
        let Some(sentinels) = sentinels.upgrade() else {
            return;
        };
        let found = sentinels.refresh().await;
        let mut connections = sentinels.sentinels.iter().map(|(_, connection)| connection);
        interval = match connections.all(|connection| connection.is_connected()) {
            true => MAX_LEASE,
            false => RECONNECT_INTERVAL,
        };
        drop(sentinels);
        checks.pause(found).await;
    }
}

/// Everything that the sentinels publish is a reason to repeat the query.
impl Subscriber for Notify {
    fn on_message(&self, _: &str, _: i64) {
        self.notify_one();
    }

    fn on_disconnect(&self) {
        self.notify_one();
    }

    fn on_unsubscribed(&self, _: &str) {
        self.notify_one();
    }
}

fn replies<E>(
    answers: &[Option<Result<Option<SentinelReply>, E>>],
) -> impl Iterator<Item = &SentinelReply> {
    answers.iter().flatten().flatten().flatten()
}

/// Returns the address that most sentinels name, and the number of these sentinels. Of two addresses with equally
/// many, the one with the later failover counts, because some sentinels learn of a failover before others. Of three
/// or more, none counts: one is neither the old nor the new master, and it is unknown which.
fn most_voted<'a>(replies: impl Iterator<Item = &'a SentinelReply>) -> Option<(Endpoint, usize)> {
    let mut votes: BTreeMap<&Endpoint, (usize, u64)> = BTreeMap::new();
    for SentinelReply { endpoint, epoch } in replies {
        let (count, latest) = votes.entry(endpoint).or_default();
        *count += 1;
        *latest = (*latest).max(*epoch);
    }
    let most = votes.values().map(|(count, _)| *count).max()?;
    votes.retain(|_, (count, _)| *count == most);
    if votes.len() > 2 {
        return None;
    }
    let latest = votes.into_iter().max_by_key(|(_, (_, epoch))| *epoch);
    latest.map(|(endpoint, _)| (endpoint.clone(), most))
}

/// Classifies the failure of a query: a server that does not know the command is not a sentinel.
fn classify_failure(at: &Endpoint, failure: ExchangeError) -> ExchangeError {
    match failure {
        ExchangeError::Permanent(Error::Refused { reason })
            if reason.starts_with("ERR unknown command") =>
        {
            ExchangeError::Permanent(Error::UnsupportedServer {
                reason: format!("{at} is not a sentinel"),
            })
        }
        failure => failure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(port: u16, epoch: u64) -> SentinelReply {
        SentinelReply {
            endpoint: Endpoint::new("h", port),
            epoch,
        }
    }

    #[test]
    fn wrong_sentinel_is_outvoted() {
        let answers = [reply(1, 7), reply(2, 3), reply(2, 3)];
        assert_eq!(most_voted(answers.iter()), Some((Endpoint::new("h", 2), 2)));
        let undecided = [reply(1, 3), reply(2, 4)];
        assert_eq!(
            most_voted(undecided.iter()),
            Some((Endpoint::new("h", 2), 1))
        );
        assert_eq!(most_voted([].iter()), None);
        // A failover that only one of two knows, and a wrong sentinel.
        let undecided = [reply(1, 3), reply(2, 4), reply(3, 7)];
        assert_eq!(most_voted(undecided.iter()), None);
    }
}
