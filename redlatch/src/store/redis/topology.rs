//! Determines the server for a key: the single server, the master that the sentinels name, or the node of a
//! cluster that owns the slot.

use std::sync::Arc;
use std::time::Duration;

use redis::ConnectionAddr;

use super::cluster::Cluster;
use super::connection::{ReconnectingConnection, Target};
use super::connection_config::ConnectionConfig;
use super::endpoint::Endpoint;
use super::exchange_error::ExchangeError;
use super::node::{Node, NodeLimits, NodeSettings};
use super::pubsub::SubscriptionMode;
use super::refresh_task::MIN_QUERY_TIME;
use super::replicas::{ReplicaRequirement, ReplicaSync};
use super::sentinel::Sentinels;
use super::server_info::ServerInfo;
use super::slot::slot;
use super::url::{Deployment, ParsedUrl};
use crate::error::{Error, Result};
use crate::join::{join_all, join_until};
use crate::name::{SPANS_SLOTS, spans_slots};
use crate::step::PublishMode;
use crate::store::{NodeId, SharedSubscriber, SuspectNodes};

/// Settings of a client's connections.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RedisSettings {
    pub(crate) connect_timeout: Duration,
    pub(crate) response_timeout: Duration,
    pub(crate) replica_sync: ReplicaSync,
    pub(crate) replica_timeout: Duration,
}

pub(super) struct Topology {
    form: Form,
    /// Address of the deployment, without anything that could be secret.
    address: String,
    publishing: PublishMode,
}

enum Form {
    Single(Arc<Node>),
    Sentinel(Arc<Node>, Arc<Sentinels>),
    Cluster(Arc<Cluster>),
}

impl RedisSettings {
    fn requirement(&self) -> Option<ReplicaRequirement> {
        let requirement = ReplicaRequirement {
            sync: self.replica_sync,
            timeout: self.replica_timeout,
            answer_timeout: self.response_timeout,
        };
        (self.replica_sync != ReplicaSync::Off).then_some(requirement)
    }
}

impl Topology {
    /// Connects, and checks that the servers are supported.
    pub(super) async fn connect(
        parsed: ParsedUrl,
        settings: RedisSettings,
        subscriber: SharedSubscriber,
        suspect_nodes: Arc<SuspectNodes>,
    ) -> Result<Topology> {
        let config = parsed.config;
        let settings = NodeSettings {
            connect_timeout: settings.connect_timeout,
            subscriber,
            suspect_nodes,
            subscription_mode: SubscriptionMode::Restored,
            requirement: settings.requirement(),
        };
        match parsed.deployment {
            Deployment::Single(addr) => Topology::single(addr, &config, settings).await,
            Deployment::Sentinel {
                sentinels,
                master,
                config: sentinel_config,
            } => {
                let limit = settings.connect_timeout;
                let sentinels =
                    Sentinels::new(&sentinels, &sentinel_config, master, config, limit)?;
                Topology::sentinel(sentinels, &settings).await
            }
            Deployment::Cluster(seeds) => Topology::cluster(seeds, config, settings).await,
        }
    }

    async fn single(
        addr: ConnectionAddr,
        config: &ConnectionConfig,
        mut settings: NodeSettings,
    ) -> Result<Topology> {
        let address = format!("{addr}/{}", config.db());
        let connector = config
            .connector_for_addr(addr)
            .map_err(ExchangeError::into_error)?;
        let target = || Ok(Target::Fixed(connector.clone()));
        let requirement = settings.requirement.take();
        let mut node = Node::new(&settings, target)?;
        ServerInfo::fetch(&node.commands)
            .await?
            .check_standalone()?;
        if let Some(requirement) = requirement
            && requirement.applies_to(&node.commands).await?
        {
            settings.requirement = Some(requirement);
            node = Node::new(&settings, target)?;
        }
        Ok(Topology {
            form: Form::Single(node),
            address,
            publishing: PublishMode::Global,
        })
    }

    async fn sentinel(sentinels: Arc<Sentinels>, settings: &NodeSettings) -> Result<Topology> {
        let node = Node::new(settings, || Ok(Target::CurrentMaster(sentinels.clone())))?;
        node.connections()
            .for_each(|connection| sentinels.track(connection));
        ServerInfo::fetch(&node.commands)
            .await?
            .check_standalone()?;
        Ok(Topology {
            address: sentinels.address(),
            form: Form::Sentinel(node, sentinels),
            publishing: PublishMode::Global,
        })
    }

    async fn cluster(
        seeds: Vec<Endpoint>,
        config: ConnectionConfig,
        mut settings: NodeSettings,
    ) -> Result<Topology> {
        let info = fetch_server_info(&seeds, &config, &settings).await?;
        info.check_cluster_node()?;
        let (publishing, subscription_mode) = match info.supports_sharded_pubsub() {
            true => (PublishMode::Sharded, SubscriptionMode::Sharded),
            false => (PublishMode::Global, SubscriptionMode::Unrestored),
        };
        settings.subscription_mode = subscription_mode;
        let cluster = Cluster::new(seeds, config, settings);
        if cluster.masters().await.is_empty() {
            return Err(Error::unavailable(
                "no node of the cluster reported its slots",
            ));
        }
        Ok(Topology {
            address: cluster.address(),
            form: Form::Cluster(cluster),
            publishing,
        })
    }

    pub(super) fn address(&self) -> String {
        self.address.clone()
    }

    /// Returns whether there is a single, fixed server.
    pub(super) fn is_single(&self) -> bool {
        matches!(self.form, Form::Single(_))
    }

    /// Returns how scripts publish in this deployment.
    pub(super) fn publishing(&self) -> PublishMode {
        self.publishing
    }

    /// Returns the cluster slot of a key. All keys of a script must be in the same slot.
    pub(super) fn slot(&self, key: &str) -> Option<u16> {
        matches!(self.form, Form::Cluster(_)).then(|| slot(key))
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
    pub(super) fn known_node(&self, key: &str) -> Option<NodeId> {
        match &self.form {
            Form::Single(node) | Form::Sentinel(node, _) => Some(node.id),
            Form::Cluster(cluster) => cluster.known_slot_owner(slot(key)).map(|node| node.id),
        }
    }

    /// Returns the limits of the node that serves a key.
    pub(super) fn limits(&self, key: &str) -> Arc<NodeLimits> {
        match &self.form {
            Form::Single(node) | Form::Sentinel(node, _) => node.limits.clone(),
            Form::Cluster(cluster) => cluster.limits(slot(key)),
        }
    }

    /// Returns a hint for the timeout error if there is not even a connection to the node of a key.
    pub(super) fn timeout_hint(&self, key: &str) -> Option<&'static str> {
        match &self.form {
            Form::Single(node) | Form::Sentinel(node, _) => node.timeout_hint(),
            Form::Cluster(cluster) => match cluster.known_slot_owner(slot(key)) {
                Some(node) => node.timeout_hint(),
                None => Some(""),
            },
        }
    }

    /// Returns all nodes that serve keys, in a stable order.
    pub(super) async fn masters(&self) -> Vec<Arc<Node>> {
        match &self.form {
            Form::Single(node) | Form::Sentinel(node, _) => vec![node.clone()],
            Form::Cluster(cluster) => cluster.masters().await,
        }
    }

    /// Returns the node that a node has redirected to (MOVED).
    pub(super) async fn handle_moved(&self, key: &str, to: &str) -> Option<Arc<Node>> {
        match &self.form {
            Form::Single(_) | Form::Sentinel(..) => None,
            Form::Cluster(cluster) => cluster.handle_moved(slot(key), to).await,
        }
    }

    /// The same for one command only (ASK).
    pub(super) fn handle_ask(&self, key: &str, to: &str) -> Option<Arc<Node>> {
        match &self.form {
            Form::Single(_) | Form::Sentinel(..) => None,
            Form::Cluster(cluster) => cluster.handle_ask(slot(key), to),
        }
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

/// Returns the server info of a cluster's nodes: the first answer of a node in the URL counts for all.
async fn fetch_server_info(
    seeds: &[Endpoint],
    config: &ConnectionConfig,
    settings: &NodeSettings,
) -> Result<ServerInfo> {
    let queries = seeds.iter().map(|seed| async move {
        let target = Target::Fixed(
            config
                .connector_for(seed)
                .map_err(ExchangeError::into_error)?,
        );
        let connection = ReconnectingConnection::new(
            target,
            settings.connect_timeout,
            settings.subscriber.clone(),
            SubscriptionMode::Unrestored,
            None,
        );
        ServerInfo::fetch(&connection).await
    });
    let enough =
        |answers: &[Option<Result<ServerInfo>>]| answers.iter().flatten().any(Result::is_ok);
    let answers = join_until(queries, enough, MIN_QUERY_TIME).await;
    let mut reason: Option<Error> = None;
    for answer in answers.into_iter().flatten() {
        match answer {
            Ok(info) => return Ok(info),
            // A permanent error is not hidden by a node that is down.
            Err(error) if reason.as_ref().is_none_or(Error::is_transient) => reason = Some(error),
            Err(_) => {}
        }
    }
    Err(reason.unwrap_or_else(|| Error::InvalidUrl {
        reason: "it contains no node".into(),
    }))
}
