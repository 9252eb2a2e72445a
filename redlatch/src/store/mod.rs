//! The store, which runs steps: on a server or in process.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;

pub(crate) use self::answer::{Answer, Confirmation, KeptNode};
pub(crate) use self::attempt_limiter::AttemptPermit;
pub(crate) use self::changes::Changes;
pub(crate) use self::delivery::{Delivery, Route};
pub(crate) use self::nodes::{NodeId, ServerId, Suspects};
pub(crate) use self::progress::{ContactSource, LastContact, Progress};
use self::redis::{CommandRequest, Topology};
pub use self::redis::{Credentials, PublicUrl, ReplicaSync, SentinelReport, ServerReport};
pub(crate) use self::redis::{Provider, Reporters};
pub(crate) use self::scan::{Cursor, ScanType};
pub(crate) use self::subscriber::{SharedSubscriber, Subscriber};
use crate::error::{Error, Result};
use crate::step::Step;

mod answer;
mod attempt_limiter;
mod changes;
mod delivery;
pub(crate) mod embedded;
mod nodes;
mod progress;
pub(crate) mod redis;
mod scan;
mod shared_oneshot;
mod subscriber;

/// The store of one client. Not a trait: a trait cannot express what a store must promise (order,
/// atomic steps, pushed messages).
pub(crate) enum Store {
    Redis(redis::Redis),
    Embedded(embedded::EmbeddedConnection),
}

impl Store {
    /// Returns the topology. The embedded store has none.
    fn topology(&self) -> Option<&Topology> {
        match self {
            Store::Redis(redis) => Some(&redis.topology),
            Store::Embedded(_) => None,
        }
    }

    /// Identifies the store by the address in its URL: equal for all clients with the same address.
    pub(crate) fn address(&self) -> String {
        match self {
            Store::Redis(redis) => redis.topology.address.clone(),
            Store::Embedded(embedded) => embedded.address(),
        }
    }

    /// Returns whether both stores have a key in the same database, as far as is known: one server may have several addresses.
    pub(crate) fn shares_key(&self, other: &Store, key: &str) -> bool {
        let database = |store: &Store| store.topology()?.known_node(key)?.database();
        self.address() == other.address()
            || database(self).is_some_and(|one| database(other) == Some(one))
    }

    /// Returns the slot of a key, if the store has slots as far as is known: all keys of a step
    /// must then be in one slot.
    pub(crate) fn slot(&self, key: &str) -> Option<u16> {
        self.topology()?.slot(key)
    }

    /// Returns the slot that a key has or would have in a cluster. The embedded store has none.
    pub(crate) fn order(&self, key: &str) -> Option<u16> {
        self.topology().map(|_| redis::slot(key))
    }

    /// Returns whether keys have slots, as far as is known.
    pub(crate) fn has_slots(&self) -> bool {
        self.topology().is_some_and(Topology::has_slots)
    }

    /// Returns whether the store is a cluster, whose nodes publish in the slot of a channel.
    pub(crate) fn is_cluster(&self) -> bool {
        self.topology().is_some_and(Topology::is_cluster)
    }

    /// Runs a step. If the connection breaks, repeats it on the next one until the response
    /// timeout.
    ///
    /// Subscribes to `channel` first, if there is one, in the same round trip. So all messages
    /// published after the step arrive.
    #[expect(
        clippy::manual_async_fn,
        reason = "an `async fn` stores its arguments twice"
    )]
    pub(crate) fn run<'a, R: Send>(
        &'a self,
        step: &'a Step<'_, R>,
        channel: Option<&'a str>,
        delivery: Delivery,
        progress: &'a Progress,
    ) -> impl Future<Output = Result<Answer<R>>> + Send + 'a {
        async move {
            match self {
                Store::Redis(redis) => {
                    let answer = redis.run(step, channel, delivery, progress)?.await?;
                    answer.decode(step)
                }
                Store::Embedded(embedded) => {
                    let subscriber = &embedded.subscriber;
                    let ends = channel.map(|channel| subscriber.subscription_ends(channel));
                    channel.inspect(|channel| embedded.subscribe(channel));
                    let answer = embedded.run(step, progress)?;
                    #[cfg(test)]
                    embedded.answer_arrives().await;
                    if let (Some(channel), Some(ends)) = (channel, ends) {
                        subscriber.on_subscribed(channel, ends);
                    }
                    Ok(answer)
                }
            }
        }
    }

    /// Runs a step that may be repeated and after which nothing has to be settled: a read, or an
    /// idempotent write.
    pub(crate) async fn run_idempotent<R: Send>(&self, step: &Step<'_, R>) -> Result<R> {
        let (delivery, progress) = (Delivery::REQUEST, Progress::default());
        Ok(self.run(step, None, delivery, &progress).await?.reply)
    }

    /// The same for a step that a hold or a waiter depends on.
    pub(crate) async fn run_urgent<R: Send>(&self, step: &Step<'_, R>) -> Result<R> {
        let (delivery, progress) = (Delivery::IMMEDIATE, Progress::default());
        Ok(self.run(step, None, delivery, &progress).await?.reply)
    }

    /// Runs a step once. If the connection breaks, that is an error.
    pub(crate) async fn run_once<R: Send>(
        &self,
        step: &Step<'_, R>,
        delivery: Delivery,
        within: Duration,
    ) -> Result<Answer<R>> {
        match self {
            Store::Redis(redis) => {
                let (topology, progress) = (&redis.topology, Progress::default());
                let request = CommandRequest::for_step(topology, step, None, delivery, &progress)?;
                let limit = within.min(redis.response_timeout);
                request.send_once(limit).await?.decode(step)
            }
            Store::Embedded(embedded) => embedded.run(step, &Progress::default()),
        }
    }

    /// Runs a step that must not be applied twice. It is repeated only while it is known to have
    /// had no effect. Without an answer, the error is [`Error::OutcomeUnknown`], which names
    /// `what`.
    ///
    /// A step that was not sent by the response timeout is dropped. The wait for its answer lasts
    /// until `answered_within`, if that is longer.
    ///
    /// [`Error::OutcomeUnknown`]: crate::Error::OutcomeUnknown
    pub(crate) async fn run_at_most_once<R: Send>(
        &self,
        step: &Step<'_, R>,
        what: &'static str,
        delivery: Delivery,
        answered_within: Duration,
        progress: &Progress,
    ) -> Result<Answer<R>> {
        match self {
            Store::Redis(redis) => {
                let (topology, timeout) = (&redis.topology, redis.response_timeout);
                let request = CommandRequest::for_step(topology, step, None, delivery, progress)?;
                let sending = request.send_at_most_once(what, timeout, answered_within);
                sending.await?.decode(step)
            }
            Store::Embedded(embedded) => embedded.run(step, progress),
        }
    }

    /// Returns whether a script can count all subscribers of a channel. Nodes of a cluster without
    /// sharded channels count only their own.
    pub(crate) fn counts_subscribers(&self) -> bool {
        self.topology().is_none_or(Topology::counts_subscribers)
    }

    /// Returns whether acquisitions wait for replicas. If not, all steps about a key use one
    /// connection.
    pub(crate) fn awaits_replicas(&self) -> bool {
        self.topology()
            .is_some_and(|topology| topology.awaits_replicas)
    }

    /// Returns the node that serves a key, as far as is known locally. Work for different nodes is
    /// limited and batched separately, so a node that does not answer does not delay work for the
    /// others.
    pub(crate) fn node(&self, key: &str) -> Option<NodeId> {
        self.topology()?.known_node(key).map(|node| node.id)
    }

    /// Returns what servers may have lost. The embedded store loses nothing.
    pub(crate) fn suspects(&self) -> Arc<Suspects> {
        match self {
            Store::Redis(redis) => redis.suspects.clone(),
            Store::Embedded(_) => Arc::new(Suspects::new(false)),
        }
    }

    /// Waits for a permit to settle a hold in the background, at the node of a key.
    pub(crate) async fn settling_permit(&self, key: &str) -> Option<OwnedSemaphorePermit> {
        let limits = self.topology()?.limits(key);
        limits.settle_permits.clone().acquire_owned().await.ok()
    }

    /// Returns the error for a request for this key that had no contact with the store for this
    /// long.
    pub(crate) fn timeout_error(&self, key: &str, after: Duration) -> Error {
        match self {
            Store::Redis(redis) => redis.timeout_error(key, after),
            Store::Embedded(_) => Error::ResponseTimeout { after },
        }
    }

    /// Returns the time limit for an answer, if there is one.
    pub(crate) fn response_timeout(&self) -> Option<Duration> {
        match self {
            Store::Redis(redis) => Some(redis.response_timeout),
            Store::Embedded(embedded) => embedded.response_timeout(),
        }
    }

    /// Ends a subscription. It is not restored, even after an error.
    pub(crate) async fn unsubscribe(&self, channel: &str) -> Result<()> {
        match self {
            Store::Redis(redis) => redis.unsubscribe(channel).await,
            Store::Embedded(embedded) => {
                embedded.unsubscribe(channel);
                Ok(())
            }
        }
    }

    /// Returns one page of the keys that match a glob pattern, and the start of the next page, if
    /// there is one. A key may occur twice, as with SCAN.
    pub(crate) async fn scan(
        &self,
        pattern: &str,
        scan_type: ScanType,
        cursor: Cursor,
    ) -> Result<(Vec<String>, Option<Cursor>)> {
        match self {
            Store::Redis(redis) => redis.scan(pattern, scan_type, cursor).await,
            Store::Embedded(embedded) => Ok(match scan_type {
                ScanType::Hashes | ScanType::Lists => (embedded.keys(pattern)?, None),
                // The hashes contain all keys: there are few.
                ScanType::Strings => (Vec::new(), None),
            }),
        }
    }

    /// Waits for an answer of each server that may hold a key.
    pub(crate) async fn ping(&self) -> Result<()> {
        match self {
            Store::Redis(redis) => redis.ping().await,
            Store::Embedded(embedded) => embedded.ping(),
        }
    }

    /// Returns what the servers say about themselves.
    pub(crate) async fn server_reports(&self) -> Result<Vec<ServerReport>> {
        match self {
            Store::Redis(redis) => redis.server_reports().await,
            Store::Embedded(_) => Ok(Vec::new()),
        }
    }

    /// Returns what the sentinels say, if there are any.
    pub(crate) async fn sentinel_reports(&self) -> Result<Vec<SentinelReport>> {
        match self {
            Store::Redis(redis) => redis.sentinel_reports().await,
            Store::Embedded(_) => Ok(Vec::new()),
        }
    }

    /// Returns whether there is a connection, as far as is known.
    pub(crate) fn is_connected(&self) -> bool {
        match self {
            Store::Redis(redis) => redis.is_connected(),
            Store::Embedded(embedded) => embedded.ping().is_ok(),
        }
    }

    /// Makes the store report changed keys to `changes` from now on, for as long as `changes` and
    /// `reporters` exist. Also starts the reports again after they have ended.
    pub(crate) async fn start_reports(
        &self,
        changes: &Arc<Changes>,
        reporters: &Reporters,
    ) -> Result<()> {
        match self {
            Store::Redis(redis) => redis.start_reports(changes, reporters).await,
            Store::Embedded(embedded) => embedded.start_reports(changes),
        }
    }

    /// Returns whether a server that has become a master does not report changes yet.
    pub(crate) fn lacks_reporters(&self, reporters: &Reporters) -> bool {
        match self {
            Store::Redis(redis) => redis.lacks_reporters(reporters),
            Store::Embedded(_) => false,
        }
    }
}
