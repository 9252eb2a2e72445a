//! Determines the server for a key: the single server, the master that the sentinels name, or the node of a
//! cluster that owns the slot.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::cluster::Cluster;
use super::connection::{ReconnectingConnection, Target};
use super::endpoint::{Address, Endpoint};
use super::exchange_error::ExchangeError;
use super::node::{Node, NodeLimits, NodeSettings};
use super::options::{RedisSettings, ReplicaSync};
use super::pubsub::SubscriptionMode;
use super::refresh_task::MIN_QUERY_TIME;
use super::sentinel::Sentinels;
use super::server_info::ServerInfo;
use super::slot::slot;
use super::url::{Deployment, ParsedUrl};
use crate::error::{Error, Result};
use crate::join::{join_all, join_until};
use crate::name::{SPANS_SLOTS, spans_slots};
use crate::step::PublishMode;
use crate::store::{ServerId, SharedSubscriber, Suspects};

pub(super) struct Topology {
    form: Form,
    /// Address of the deployment, without anything that could be secret.
    pub(super) address: String,
    /// How scripts publish in this deployment.
    pub(super) publishing: PublishMode,
    /// Whether acquisitions wait for replicas, and use another connection than releases.
    pub(super) awaits_replicas: bool,
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
        parsed: ParsedUrl,
        settings: RedisSettings,
        subscriber: SharedSubscriber,
        suspects: Arc<Suspects>,
    ) -> Result<Topology, ExchangeError> {
        let settings = NodeSettings {
            config: parsed.config,
            redis: settings,
            subscriber,
            suspects,
            subscription_mode: SubscriptionMode::Restored,
        };
        match parsed.deployment {
            Deployment::Single(addr) => Topology::single(addr, settings).await,
            Deployment::Sentinel {
                sentinels,
                master,
                config,
            } => {
                let db = settings.config.db;
                let address = format!("{master}@{}/{db}", sorted_list(&sentinels));
                let sentinels = Sentinels::new(&sentinels, config, master);
                Topology::sentinel(address, sentinels, &settings).await
            }
            Deployment::Cluster(seeds) => Topology::cluster(seeds, settings).await,
        }
    }

    fn new(
        form: Form,
        address: String,
        publishing: PublishMode,
        settings: RedisSettings,
    ) -> Topology {
        Topology {
            awaits_replicas: settings.replica_sync != ReplicaSync::Off,
            batching: settings.batching,
            has_slots: AtomicBool::new(matches!(form, Form::Cluster(_))),
            form,
            address,
            publishing,
            unassigned_limits: Arc::default(),
        }
    }

    async fn single(addr: Address, mut settings: NodeSettings) -> Result<Topology, ExchangeError> {
        let address = format!("{addr}/{}", settings.config.db);
        let target = Target::Fixed(addr.clone());
        let sync = std::mem::replace(&mut settings.redis.replica_sync, ReplicaSync::Off);
        let mut node = Node::new(&settings, &target);
        ServerInfo::fetch(&node.commands)
            .await?
            .check_standalone()?;
        if sync.applies_to(&node.commands).await? {
            settings.redis.replica_sync = sync;
            node = Node::new(&settings, &Target::Replicated(addr));
        }
        let (form, redis) = (Form::Single(node), settings.redis);
        Ok(Topology::new(form, address, PublishMode::Global, redis))
    }

    async fn sentinel(
        address: String,
        sentinels: Arc<Sentinels>,
        settings: &NodeSettings,
    ) -> Result<Topology, ExchangeError> {
        let node = Node::new(settings, &Target::CurrentMaster(sentinels.clone()));
        node.connections()
            .for_each(|connection| sentinels.track(connection));
        ServerInfo::fetch(&node.commands)
            .await?
            .check_standalone()?;
        let (form, redis) = (Form::Sentinel(node, sentinels), settings.redis);
        Ok(Topology::new(form, address, PublishMode::Global, redis))
    }

    async fn cluster(
        seeds: Vec<Endpoint>,
        mut settings: NodeSettings,
    ) -> Result<Topology, ExchangeError> {
        let info = fetch_server_info(&seeds, &settings).await?;
        info.check_cluster_node()?;
        settings.subscription_mode = SubscriptionMode::Sharded;
        let address = match settings.config.db {
            0 => sorted_list(&seeds),
            db => format!("{}/{db}", sorted_list(&seeds)),
        };
        let redis = settings.redis;
        let cluster = Cluster::new(seeds, settings);
        if cluster.masters().await.is_empty() {
            let reason = "no node of the cluster reported its slots";
            return Err(ExchangeError::not_executed(reason));
        }
        let form = Form::Cluster(cluster);
        Ok(Topology::new(form, address, PublishMode::Sharded, redis))
    }

    /// Adds to a refusal by a replica what it means.
    pub(super) fn explain_replica(&self, refusal: String) -> String {
        match &self.form {
            Form::Single(_) => {
                let address = &self.address;
                format!("{address} leads to a replica, and must lead to a master: {refusal}")
            }
            Form::Sentinel(..) | Form::Cluster(_) => refusal,
        }
    }

    /// Returns whether each node that may hold a key counts all subscribers of its channel.
    pub(super) fn counts_subscribers(&self) -> bool {
        match self.cluster_form() {
            Some(cluster) => cluster.has_sharded_channels(),
            // Behind one address with many slots, a script may count only those of its own server.
            None => !self.has_slots(),
        }
    }

    fn cluster_form(&self) -> Option<&Arc<Cluster>> {
        match &self.form {
            Form::Cluster(cluster) => Some(cluster),
            Form::Single(_) | Form::Sentinel(..) => None,
        }
    }

    /// Returns whether all keys of a script must be in the same slot, as far as is known.
    pub(super) fn has_slots(&self) -> bool {
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
    pub(super) fn slot(&self, key: &str) -> Option<u16> {
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
    pub(super) fn known_node(&self, key: &str) -> Option<Arc<Node>> {
        match &self.form {
            Form::Single(node) | Form::Sentinel(node, _) => Some(node.clone()),
            Form::Cluster(cluster) => cluster.known_slot_owner(slot(key)),
        }
    }

    /// Returns the limits of the node that serves a key.
    pub(super) fn limits(&self, key: &str) -> Arc<NodeLimits> {
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

    /// Returns all nodes that serve keys, in a stable order.
    pub(super) async fn masters(&self) -> Vec<Arc<Node>> {
        match &self.form {
            Form::Single(node) | Form::Sentinel(node, _) => vec![node.clone()],
            Form::Cluster(cluster) => cluster.masters().await,
        }
    }

    /// Returns the same nodes, as far as they are known locally.
    pub(super) fn known_masters(&self) -> Vec<Arc<Node>> {
        match &self.form {
            Form::Single(node) | Form::Sentinel(node, _) => vec![node.clone()],
            Form::Cluster(cluster) => cluster.known_masters(),
        }
    }

    /// Returns a further connection to a node, for reports. It follows a failover like the node's own.
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
            Form::Single(node) | Form::Sentinel(node, _) => node.pubsub.unsubscribe(channel).await,
            Form::Cluster(cluster) => {
                let nodes = cluster.nodes();
                // On several nodes, if a subscription was started and not confirmed before the slot moved.
                let ended =
                    join_all(nodes.iter().map(|node| node.pubsub.unsubscribe(channel))).await;
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

/// Returns the server info of a node in the URL, which counts for all.
async fn fetch_server_info(seeds: &[Endpoint], settings: &NodeSettings) -> Result<ServerInfo> {
    let queries = seeds.iter().map(|seed| async move {
        let connection = ReconnectingConnection::new(
            settings.config.clone(),
            Target::Fixed(Address::Tcp(seed.clone())),
            settings.subscriber.clone(),
            SubscriptionMode::Unrestored,
            None,
        );
        let info = ServerInfo::fetch(&connection).await;
        info.map_err(ExchangeError::into_error)
    });
    let enough =
        |answers: &[Option<Result<ServerInfo>>]| answers.iter().flatten().any(Result::is_ok);
    let answers = join_until(queries, enough, MIN_QUERY_TIME).await;
    let best = answers
        .into_iter()
        .flatten()
        .min_by_key(|answer| match answer {
            Ok(_) => 0,
            // A permanent error is not hidden by a node that is down.
            Err(error) if !error.is_transient() => 1,
            Err(_) => 2,
        });
    best.unwrap_or_else(|| Err(Error::unavailable("no node of the cluster answered")))
}
