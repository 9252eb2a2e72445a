//! One server that holds data, and the connections to it:
//!
//! - `commands`: renewals, releases, and all that is in neither of the others.
//! - `attempts`: acquisitions, and the releases that settle unanswered ones, behind them. The same
//!   connection, unless acquisitions wait for replicas: WAIT blocks its connection.
//! - `subscriptions`: only where subscriptions cannot share the connection of the attempts, as in a
//!   cluster (sharded channels) and with RESP2.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Semaphore;

use super::capabilities::Capabilities;
use super::connection::{ReconnectingConnection, Target};
use super::connection_config::ConnectionConfig;
use super::exchange_error::ExchangeError;
use super::options::{RedisSettings, ReplicaSync};
use super::pace::Outage;
use super::pubsub::SubscriptionMode;
use super::replicas::Replicas;
use super::run_id_tracker::RunIdTracker;
use crate::store::attempt_limiter::AttemptLimiter;
use crate::store::{NodeId, SharedSubscriber, Suspects};

/// What all nodes of a deployment share.
#[derive(Clone)]
pub(super) struct NodeSettings {
    pub(super) config: ConnectionConfig,
    pub(super) redis: RedisSettings,
    pub(super) subscriber: SharedSubscriber,
    pub(super) suspects: Arc<Suspects>,
}

/// Limit of background releases in flight at one node. If thousands of attempts are dropped at
/// once, renewals must not wait behind their releases.
const MAX_SETTLES_IN_FLIGHT: usize = 64;

/// Limits of the work in flight at one node. Every node has its own, so that a node that does not
/// answer uses up no permits of the others.
pub(in crate::store) struct NodeLimits {
    pub(super) attempt_limiter: Arc<AttemptLimiter>,
    pub(in crate::store) settle_permits: Arc<Semaphore>,
    pub(super) outage: Outage,
}

impl Default for NodeLimits {
    fn default() -> NodeLimits {
        NodeLimits {
            attempt_limiter: AttemptLimiter::new(),
            settle_permits: Arc::new(Semaphore::new(MAX_SETTLES_IN_FLIGHT)),
            outage: Outage::default(),
        }
    }
}

/// One server that holds data.
pub(in crate::store) struct Node {
    /// Unique in this process.
    pub(in crate::store) id: NodeId,
    pub(super) limits: Arc<NodeLimits>,
    /// For renewals, releases and inspections.
    pub(super) commands: Arc<ReconnectingConnection>,
    /// For attempts: the same connection, unless replicas are waited for.
    pub(super) attempts: Arc<ReconnectingConnection>,
    /// For subscriptions, where they need a connection of their own.
    subscriptions: Arc<ReconnectingConnection>,
    pub(super) capabilities: Arc<Capabilities>,
    sharded: bool,
    /// Whether it has lost all its slots. If it gets some again, that is a new node.
    has_left: AtomicBool,
    /// Present if acquisitions wait for replicas.
    pub(super) replicas: Option<Arc<Replicas>>,
}

impl Node {
    pub(super) fn new(settings: &NodeSettings, target: &Target) -> Arc<Node> {
        let id = NodeId::next();
        let capabilities = Arc::new(Capabilities::default());
        // Only the connection that carries the commands tracks which server process it leads to.
        let connection = |subscription_mode, carries_commands: bool| {
            let metrics = settings.subscriber.metrics();
            let (suspects, known) = (settings.suspects.clone(), capabilities.clone());
            let run_id_tracker = || RunIdTracker::new(id, suspects, metrics, known);
            ReconnectingConnection::new(
                settings.config.clone(),
                target.clone(),
                settings.subscriber.clone(),
                subscription_mode,
                capabilities.clone(),
                carries_commands.then(run_id_tracker),
            )
        };
        let sharded = matches!(target, Target::ClusterNode(..));
        let awaits_replicas = settings.redis.replica_sync != ReplicaSync::Off;
        let (with_attempts, apart) = match sharded {
            true => (SubscriptionMode::Unrestored, SubscriptionMode::Sharded),
            false => (SubscriptionMode::Restored, SubscriptionMode::Apart),
        };
        let subscriptions = connection(apart, false);
        let attempts = connection(with_attempts, !awaits_replicas);
        let commands = match awaits_replicas {
            true => connection(SubscriptionMode::Unrestored, true),
            false => attempts.clone(),
        };
        ReconnectingConnection::join(&[&commands, &attempts, &subscriptions]);
        Arc::new(Node {
            id,
            limits: Arc::default(),
            commands,
            attempts,
            subscriptions,
            replicas: awaits_replicas.then(|| Replicas::new(settings.redis, capabilities.clone())),
            capabilities,
            sharded,
            has_left: AtomicBool::new(false),
        })
    }

    /// Returns the connection for subscriptions: that of the attempts, so that an attempt can
    /// follow its subscription directly, unless channels are sharded (see
    /// [`SubscriptionMode::Sharded`]) or the server does not permit that.
    pub(super) fn pubsub(&self) -> &Arc<ReconnectingConnection> {
        match self.sharded || self.capabilities.subscribes_apart() {
            true => &self.subscriptions,
            false => &self.attempts,
        }
    }

    /// Returns the run id of the server process to which the connections have led last, and the database, if they are known.
    pub(in crate::store) fn database(&self) -> Option<(String, i64)> {
        let attempts = self.attempts.database();
        attempts.or_else(|| self.commands.database())
    }

    /// Returns all connections, possibly with duplicates.
    pub(super) fn connections(&self) -> impl Iterator<Item = &Arc<ReconnectingConnection>> {
        [&self.commands, &self.attempts, &self.subscriptions].into_iter()
    }

    /// Returns a hint for the timeout error if there is not even a connection.
    pub(super) fn timeout_hint(&self) -> Option<&'static str> {
        // Connections that are established have `None`, the smallest value.
        self.connections()
            .map(|connection| connection.timeout_hint())
            .min()
            .flatten()
    }

    /// Fails if the node has lost its slots: what waited to be sent there must not connect to it again.
    pub(super) fn check_has_slots(&self) -> Result<(), ExchangeError> {
        match self.has_left.load(Ordering::Acquire) {
            true => Err(ExchangeError::not_executed("the node has lost its slots")),
            false => Ok(()),
        }
    }

    /// Invalidates all connections, because this node has lost its slots and must not be used any more.
    pub(super) fn invalidate(&self) {
        self.has_left.store(true, Ordering::Release);
        self.connections()
            .for_each(|connection| connection.invalidate());
    }
}
