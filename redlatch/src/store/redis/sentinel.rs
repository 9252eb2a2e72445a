//! Sentinels: find the current master and notice failovers.
//!
//! A sentinel may be down, slow, cut off or wrong. So:
//!
//! 1. All sentinels are queried, and the answer of most of them counts.
//! 2. The server that they name must confirm that it is a master ([`super::connection`] queries its role).
//! 3. The sentinels publish failovers. A message, a broken connection or a missing answer is only a reason
//!    to repeat the query.
//! 4. A connection that leads to another server than the master is invalidated.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Weak};
use std::time::Duration;

use redis::{ServerError, Value};
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

use super::connection::{MasterResolver, ReconnectingConnection, ResolveFuture, Target};
use super::connection_config::ConnectionConfig;
use super::connector::Connector;
use super::endpoint::Endpoint;
use super::exchange_error::ExchangeError;
use super::pubsub::SubscriptionMode;
use super::refresh_task::{MIN_QUERY_TIME, MIN_REFRESH_INTERVAL, RefreshTask, answer_within};
use crate::error::{Error, Result};
use crate::join::join_until;
use crate::lease::MAX_LEASE;
use crate::store::{SharedSubscriber, Subscriber};
use crate::sync::Mutex;

/// Published when another server has become the master.
const SWITCH_MASTER_CHANNEL: &str = "+switch-master";

/// Time limit for one sentinel. A failover is followed even if some sentinels hang.
const QUERY_TIMEOUT: Duration = Duration::from_secs(1);

/// How soon the client reconnects to a sentinel whose connection broke.
const RECONNECT_INTERVAL: Duration = Duration::from_secs(3);

pub(super) struct Sentinels {
    master: String,
    /// How to connect to the data servers.
    data_config: ConnectionConfig,
    sentinels: Vec<(Endpoint, Arc<ReconnectingConnection>)>,
    refresh_signal: Arc<RefreshSignal>,
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

/// Receives what the sentinels publish.
#[derive(Default)]
struct RefreshSignal(Notify);

impl Sentinels {
    pub(super) fn new(
        sentinels: &[Endpoint],
        config: &ConnectionConfig,
        master: String,
        data_config: ConnectionConfig,
        connect_timeout: Duration,
    ) -> Result<Arc<Sentinels>> {
        let refresh_signal = Arc::new(RefreshSignal::default());
        let subscriber: SharedSubscriber = refresh_signal.clone();
        let limit = connect_timeout.min(QUERY_TIMEOUT);
        let connection = |endpoint: &Endpoint| {
            let connector = config
                .connector_for(endpoint)
                .map_err(ExchangeError::into_error)?;
            let target = Target::Fixed(connector);
            let connection = ReconnectingConnection::new(
                target,
                limit,
                subscriber.clone(),
                SubscriptionMode::Restored,
                None,
            );
            connection.subscribe_on_reconnect(SWITCH_MASTER_CHANNEL);
            Ok((endpoint.clone(), connection))
        };
        Ok(Arc::new(Sentinels {
            master,
            data_config,
            sentinels: sentinels.iter().map(connection).collect::<Result<_>>()?,
            refresh_signal,
            master_connections: Mutex::default(),
            latest_master: Mutex::default(),
            refresh_task: RefreshTask::default(),
        }))
    }

    /// Registers a connection, which is invalidated when it leads to a server that is no longer the master.
    pub(super) fn track(&self, connection: &Arc<ReconnectingConnection>) {
        let connection = Arc::downgrade(connection);
        self.master_connections.lock().push(connection);
    }

    /// Returns the master's name, the sentinels and the database, for messages.
    pub(super) fn address(&self) -> String {
        let mut all: Vec<String> = self
            .sentinels
            .iter()
            .map(|(at, _)| at.to_string())
            .collect();
        all.sort_unstable();
        format!(
            "{}@{}/{}",
            self.master,
            all.join(","),
            self.data_config.db()
        )
    }

    /// Handles a sign of a failover.
    pub(super) fn request_refresh(self: &Arc<Self>) {
        self.ensure_refresh_task();
        self.refresh_signal.0.notify_one();
    }

    /// Watches for changes from now on, for as long as the runtime lives.
    fn ensure_refresh_task(self: &Arc<Self>) {
        self.refresh_task
            .ensure_running(|| refresh_loop(Arc::downgrade(self), self.refresh_signal.clone()));
    }

    /// Returns how to reach the master that most sentinels name.
    async fn master(self: &Arc<Self>) -> Result<(Connector, Endpoint), ExchangeError> {
        let endpoint = self.query_master().await?;
        let connector = self.data_config.connector_for(&endpoint)?;
        self.ensure_refresh_task();
        Ok((connector, endpoint))
    }

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
        let address = redis::cmd("SENTINEL")
            .arg("GET-MASTER-ADDR-BY-NAME")
            .arg(&self.master)
            .take();
        // Only for the epoch: the address in this reply is the old one until a failover is complete.
        let master_info = redis::cmd("SENTINEL")
            .arg("MASTER")
            .arg(&self.master)
            .take();
        let address = connection.query(&mut live, &address).await?;
        if let Value::ServerError(error) = &address {
            return Err(classify_error(at, error));
        }
        let Some((host, port)) = redis::from_redis_value::<Option<(String, u16)>>(address)
            .map_err(|e| ExchangeError::from_client_error(&e.into()))?
        else {
            return Ok(None);
        };
        let master_info = connection.query(&mut live, &master_info).await?;
        Ok(Some(SentinelReply {
            endpoint: at.with_host_and_port(&host, port),
            epoch: config_epoch(master_info),
        }))
    }

    /// Invalidates the connections that do not lead to the master.
    async fn refresh(&self) {
        let Ok(master) = self.query_master().await else {
            return;
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
    }
}

impl MasterResolver for Sentinels {
    fn resolve(self: Arc<Self>) -> ResolveFuture {
        Box::pin(async move { self.master().await })
    }

    fn timeout_hint(&self) -> &'static str {
        self.data_config.timeout_hint()
    }
}

/// Repeats the query when there is a reason to. Also restores the connections to the sentinels, on which they
/// publish such reasons.
async fn refresh_loop(sentinels: Weak<Sentinels>, refresh_signal: Arc<RefreshSignal>) {
    refresh_signal.0.notify_one();
    let mut interval = MAX_LEASE;
    loop {
        let _ = timeout(interval, refresh_signal.0.notified()).await;
        let Some(sentinels) = sentinels.upgrade() else {
            return;
        };
        sentinels.refresh().await;
        let mut connections = sentinels.sentinels.iter().map(|(_, connection)| connection);
        interval = match connections.all(|connection| connection.is_connected()) {
            true => MAX_LEASE,
            false => RECONNECT_INTERVAL,
        };
        drop(sentinels);
        sleep(MIN_REFRESH_INTERVAL).await;
    }
}

impl Subscriber for RefreshSignal {
    fn on_message(&self, _: &str) {
        self.0.notify_one();
    }

    fn on_disconnect(&self) {
        self.0.notify_one();
    }

    fn on_unsubscribed(&self, _: &str) {
        self.0.notify_one();
    }
}

fn replies<E>(
    answers: &[Option<Result<Option<SentinelReply>, E>>],
) -> impl Iterator<Item = &SentinelReply> {
    answers.iter().flatten().flatten().flatten()
}

/// Returns the address that most sentinels name, and their number. Of two addresses with equally many, the
/// one with the later failover counts, because a failover reaches some sentinels before others. Of three or
/// more, one is neither the old nor the new master, and it is unknown which.
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

/// Classifies the error reply of a sentinel.
fn classify_error(at: &Endpoint, error: &ServerError) -> ExchangeError {
    let unknown = |details: &str| details.starts_with("unknown command");
    match error.details().is_some_and(unknown) {
        true => ExchangeError::Permanent(Error::UnsupportedServer {
            reason: format!("{at} is not a sentinel"),
        }),
        false => ExchangeError::from_reply(error, ""),
    }
}

/// Extracts the epoch from the reply to `SENTINEL MASTER`.
fn config_epoch(master_info: Value) -> u64 {
    let master_info: HashMap<String, String> =
        redis::from_redis_value(master_info).unwrap_or_default();
    let epoch = master_info.get("config-epoch").map(|epoch| epoch.parse());
    epoch.and_then(Result::ok).unwrap_or_default()
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
