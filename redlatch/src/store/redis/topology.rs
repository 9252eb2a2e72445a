//! Determines the server for a key: the single server, the master that the sentinels name, or the
//! node of a cluster that owns the slot.
//!
//! A step names its keys, and no layer above the store chooses a node. Those layers know only that
//! keys with different `slot` values cannot be in one step (renewals, listings and multi-locks are
//! split), and which keys are on the same node (for limits and sweeps).
//!
//! A sign of a change (an error, a missing answer, a message of a sentinel) only triggers a new
//! query. It changes nothing by itself, except MOVED for its slot. A connection to a server that is
//! no longer responsible is *invalidated*: callers that wait for an answer there get an error at
//! once, and retry.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::cluster::Cluster;
use super::connection::{ReconnectingConnection, Target, leads_to_replica};
use super::endpoint::Endpoint;
use super::exchange_error::ExchangeError;
use super::node::{Node, NodeLimits, NodeSettings};
use super::options::ReplicaSync;
use super::sentinel::Sentinels;
use super::server_report::SentinelReport;
use super::slot::slot;
use super::url::Deployment;
use crate::environment::Creator;
use crate::error::{Error, Result};
use crate::join::join_all;
use crate::name::{SPANS_SLOTS, spans_slots};
use crate::step::PublishMode;
use crate::store::{ServerId, SharedSubscriber};

pub(in crate::store) struct Topology {
    form: Form,
    creator: Creator,
    /// Address of the deployment, without anything that could be secret.
    pub(in crate::store) address: String,
    /// How scripts publish in this deployment.
    pub(super) publishing: PublishMode,
    /// Whether acquisitions wait for replicas, and use another connection than releases.
    pub(in crate::store) awaits_replicas: bool,
    /// Whether steps that wait to be sent are sent together, if that is possible.
    batching: bool,
    /// Whether keys have slots: in a cluster, and where a server has refused keys of several.
    has_slots: AtomicBool,
    /// Limits for slots without a known owner.
    unassigned_limits: Arc<NodeLimits>,
}

enum Form {
    Single(Arc<Node>),
    Sentinel(Arc<Node>, Arc<Sentinels>),
    Cluster(Arc<Cluster>),
}

impl Topology {
    /// Connects, and checks that the servers are supported.
    pub(super) async fn connect(
        deployment: Deployment,
        mut settings: NodeSettings,
    ) -> Result<Topology, ExchangeError> {
        let sync = settings.redis.replica_sync;
        if let Deployment::Single(_) = deployment {
            settings.redis.replica_sync = ReplicaSync::Off;
        }
        let topology = Topology::new(deployment.clone(), settings.clone());
        match &topology.form {
            Form::Single(node) => {
                node.commands.get_or_connect().await?;
                if sync.applies_to(&node.commands).await? {
                    settings.redis.replica_sync = sync;
                    return Ok(Topology::new(deployment, settings));
                }
            }
            Form::Sentinel(node, _) => drop(node.commands.get_or_connect().await?),
            Form::Cluster(_) => drop(topology.masters().await?),
        }
        Ok(topology)
    }

    /// Creates a topology without a connection: each is made when it is needed.
    pub(super) fn new(deployment: Deployment, settings: NodeSettings) -> Topology {
        let (redis, db) = (settings.redis, settings.config.db);
        let awaits_replicas = redis.replica_sync != ReplicaSync::Off;
        let (form, address) = match deployment {
            Deployment::Single(at) => {
                let address = format!("{at}/{db}");
                let target = match awaits_replicas {
                    true => Target::Replicated(at),
                    false => Target::Fixed(at),
                };
                (Form::Single(Node::new(&settings, &target)), address)
            }
            Deployment::Sentinel {
                sentinels,
                master,
                config,
            } => {
                let address = format!("{master}@{}/{db}", sorted_list(&sentinels));
                let sentinels = Sentinels::new(&sentinels, config, master);
                let node = Node::new(&settings, &Target::CurrentMaster(sentinels.clone()));
                node.connections()
                    .for_each(|connection| sentinels.track(connection));
                (Form::Sentinel(node, sentinels), address)
            }
            Deployment::Cluster(seeds) => {
                let address = match db {
                    0 => sorted_list(&seeds),
                    db => format!("{}/{db}", sorted_list(&seeds)),
                };
                (Form::Cluster(Cluster::new(seeds, settings)), address)
            }
        };
        let is_cluster = matches!(form, Form::Cluster(_));
        Topology {
            publishing: match is_cluster {
                true => PublishMode::Sharded,
                false => PublishMode::Global,
            },
            awaits_replicas,
            batching: redis.batching,
            has_slots: AtomicBool::new(is_cluster),
            form,
            creator: Creator::this_process(),
            address,
            unassigned_limits: Arc::default(),
        }
    }

    /// Checks that commands can be sent here: in a runtime with timers, without which timeouts would panic, and by the process
    /// to which the connections belong.
    pub(super) fn check_callable(&self) -> Result<()> {
        self.creator.check()?;
        crate::runtime::current().map(drop)
    }

    /// Adds to a refusal by a replica what it means.
    pub(super) fn explain_replica(&self, refusal: String) -> String {
        match &self.form {
            Form::Single(_) => {
                format!("{}: {refusal}", leads_to_replica(&self.address))
            }
            Form::Sentinel(..) | Form::Cluster(_) => refusal,
        }
    }

    /// Returns whether each node that may hold a key counts all subscribers of its channel.
    pub(in crate::store) fn counts_subscribers(&self) -> bool {
        match self.cluster_form() {
            Some(cluster) => cluster.has_sharded_channels(),
            // Behind one address with many slots, a script may count only those of its own server.
            None => !self.has_slots(),
        }
    }

    /// Returns whether the nodes publish in the slot of a channel.
    pub(in crate::store) fn is_cluster(&self) -> bool {
        self.publishing == PublishMode::Sharded
    }

    fn cluster_form(&self) -> Option<&Arc<Cluster>> {
        match &self.form {
            Form::Cluster(cluster) => Some(cluster),
            Form::Single(_) | Form::Sentinel(..) => None,
        }
    }

    /// Returns whether all keys of a script must be in the same slot, as far as is known.
    pub(in crate::store) fn has_slots(&self) -> bool {
        self.has_slots.load(Ordering::Relaxed)
    }

    /// Records that the server has refused keys of several slots.
    pub(super) fn use_slots(&self) {
        if !self.has_slots.swap(true, Ordering::Relaxed) {
            let address = &self.address;
            tracing::info!(
                address,
                "keys have slots, as in a cluster; used slot by slot"
            );
        }
    }

    /// Returns whether steps that wait to be sent are sent together. In a cluster a step of another
    /// slot, or of one that moves, would be refused with all others in its script.
    pub(super) fn packs_steps(&self) -> bool {
        self.batching && !self.has_slots()
    }

    /// Returns the slot of a key. All keys of a script must be in the same slot.
    pub(in crate::store) fn slot(&self, key: &str) -> Option<u16> {
        self.has_slots().then(|| slot(key))
    }

    /// Checks that these keys can be used in one script.
    pub(super) fn check_same_slot<'a>(
        &self,
        key: &str,
        mut others: impl Iterator<Item = &'a str>,
    ) -> Result<()> {
        let Some(slot) = self.slot(key) else {
            return Ok(());
        };
        if !spans_slots(key) && others.all(|other| self.slot(other) == Some(slot)) {
            return Ok(());
        }
        Err(Error::InvalidName {
            name: key.chars().take(64).collect(),
            reason: SPANS_SLOTS,
        })
    }

    /// Watches the sentinels from now on, if their watch has ended with the runtime of another caller. A cluster does the same
    /// when it looks for a node.
    pub(super) fn ensure_watched(&self) {
        if let Form::Sentinel(_, sentinels) = &self.form {
            sentinels.ensure_refresh_task();
        }
    }

    /// Returns the node that serves all keys, if there is one.
    pub(super) fn only_node(&self) -> Option<&Arc<Node>> {
        match &self.form {
            Form::Single(node) | Form::Sentinel(node, _) => Some(node),
            Form::Cluster(_) => None,
        }
    }

    /// Returns the node that serves a key.
    pub(super) async fn node(&self, key: &str) -> Result<Arc<Node>, ExchangeError> {
        match &self.form {
            Form::Single(node) | Form::Sentinel(node, _) => Ok(node.clone()),
            Form::Cluster(cluster) => cluster.slot_owner(slot(key)).await,
        }
    }

    /// Returns the node that serves a key, as far as is known locally.
    pub(in crate::store) fn known_node(&self, key: &str) -> Option<Arc<Node>> {
        match &self.form {
            Form::Single(node) | Form::Sentinel(node, _) => Some(node.clone()),
            Form::Cluster(cluster) => cluster.known_slot_owner(slot(key)),
        }
    }

    /// Returns the limits of the node that serves a key.
    pub(in crate::store) fn limits(&self, key: &str) -> Arc<NodeLimits> {
        match self.known_node(key) {
            Some(node) => node.limits.clone(),
            None => self.unassigned_limits.clone(),
        }
    }

    /// Returns a hint for the timeout error if there is not even a connection to the node of a key.
    pub(super) fn timeout_hint(&self, key: &str) -> Option<&'static str> {
        let node = self.known_node(key);
        node.map_or(Some(""), |node| node.timeout_hint())
    }

    /// Returns all nodes that serve keys, one at least, in a stable order.
    pub(super) async fn masters(&self) -> Result<Vec<Arc<Node>>, ExchangeError> {
        match &self.form {
            Form::Single(node) | Form::Sentinel(node, _) => Ok(vec![node.clone()]),
            Form::Cluster(cluster) => match cluster.masters().await? {
                none if none.is_empty() => {
                    Err(cluster.without_owner("no node of the cluster reported its slots"))
                }
                masters => Ok(masters),
            },
        }
    }

    /// Returns the same nodes, as far as they are known locally.
    pub(super) fn known_masters(&self) -> Vec<Arc<Node>> {
        match &self.form {
            Form::Single(node) | Form::Sentinel(node, _) => vec![node.clone()],
            Form::Cluster(cluster) => cluster.known_masters(),
        }
    }

    /// Asks each sentinel, if there are any, which master it names.
    pub(super) async fn sentinel_reports(&self) -> Vec<SentinelReport> {
        match &self.form {
            Form::Sentinel(_, sentinels) => sentinels.reports().await,
            Form::Single(_) | Form::Cluster(_) => Vec::new(),
        }
    }

    /// Returns a further connection to a node, for reports. It follows a failover like the node's
    /// own.
    pub(super) fn reports_connection(
        &self,
        node: &Node,
        subscriber: SharedSubscriber,
    ) -> Arc<ReconnectingConnection> {
        let connection = node.commands.reports_connection(subscriber);
        if let Form::Sentinel(_, sentinels) = &self.form {
            sentinels.track(&connection);
        }
        connection
    }

    /// Returns the node of a cluster with this server, also if it has lost all slots since.
    pub(super) fn node_of(&self, server: ServerId) -> Option<Arc<Node>> {
        let cluster = self.cluster_form()?;
        let mut nodes = cluster.nodes().into_iter().chain(cluster.departed_nodes());
        nodes.find(|node| node.attempts.leads_to(server))
    }

    /// Returns the node that a node has redirected to (MOVED).
    pub(super) async fn handle_moved(&self, key: &str, to: &str) -> Option<Arc<Node>> {
        self.cluster_form()?.handle_moved(slot(key), to).await
    }

    /// The same for one command only (ASK).
    pub(super) fn handle_ask(&self, key: &str, to: &str) -> Option<Arc<Node>> {
        self.cluster_form()?.handle_ask(slot(key), to)
    }

    /// Handles a sign that another server must be used.
    pub(super) fn request_refresh(&self) {
        match &self.form {
            Form::Single(_) => {}
            Form::Sentinel(_, sentinels) => sentinels.request_refresh(),
            Form::Cluster(cluster) => cluster.request_refresh(),
        }
    }

    /// Ends a subscription, wherever it is.
    pub(super) async fn unsubscribe(&self, channel: &str) -> Result<(), ExchangeError> {
        match &self.form {
            Form::Single(node) | Form::Sentinel(node, _) => {
                node.pubsub().unsubscribe(channel).await
            }
            Form::Cluster(cluster) => {
                let nodes = cluster.nodes();
                // On several nodes, if a subscription was started and not confirmed before the slot
                // moved.
                let ended =
                    join_all(nodes.iter().map(|node| node.pubsub().unsubscribe(channel))).await;
                ended.into_iter().collect()
            }
        }
    }
}

/// Returns these addresses, for messages.
fn sorted_list(endpoints: &[Endpoint]) -> String {
    let mut all: Vec<String> = endpoints.iter().map(Endpoint::to_string).collect();
    all.sort_unstable();
    all.join(",")
}
