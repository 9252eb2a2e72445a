//! Determines the server for a key: the single server, the master that the sentinels name, or the node of a
//! cluster that owns the slot.

use std::sync::Arc;
use std::time::Duration;

use redis::ConnectionAddr;

use super::access::{Access, Endpoint};
use super::cluster::Cluster;
use super::facts::Facts;
use super::fault::Fault;
use super::link::{Link, Whereabouts};
use super::listening::Listening;
use super::lookout::BRIEFLY;
use super::node::{self, Limits, Node};
use super::replicas::{Demand, ReplicaSync};
use super::sentinel::Sentinels;
use super::slot::slot;
use super::url::{Deployment, Target};
use crate::error::{Error, Result};
use crate::name::{SPANS_SLOTS, spans_slots};
use crate::several::{all, most};
use crate::step::Publishing;
use crate::store::{Doubts, NodeId, SharedEar};

/// Settings of a client's connections.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    pub(crate) connect_timeout: Duration,
    pub(crate) response_timeout: Duration,
    pub(crate) replica_sync: ReplicaSync,
    pub(crate) replica_timeout: Duration,
}

pub(super) struct Topology {
    form: Form,
    /// Address of the deployment, without anything that could be secret.
    name: String,
    publishing: Publishing,
}

enum Form {
    Single(Arc<Node>),
    Sentinel(Arc<Node>, Arc<Sentinels>),
    Cluster(Arc<Cluster>),
}

impl Settings {
    fn demand(&self) -> Option<Demand> {
        let demand = Demand {
            sync: self.replica_sync,
            timeout: self.replica_timeout,
            patience: self.response_timeout,
        };
        (self.replica_sync != ReplicaSync::Off).then_some(demand)
    }
}

impl Topology {
    /// Connects, and checks that the servers are supported.
    pub(super) async fn connect(
        target: Target,
        settings: Settings,
        ear: SharedEar,
        doubts: Arc<Doubts>,
    ) -> Result<Topology> {
        let access = target.access;
        let settings = node::Settings {
            connect_timeout: settings.connect_timeout,
            ear,
            doubts,
            listening: Listening::Restored,
            demand: settings.demand(),
        };
        match target.deployment {
            Deployment::Single(addr) => Topology::single(addr, &access, settings).await,
            Deployment::Sentinel {
                sentinels,
                master,
                access: to_sentinels,
            } => {
                let limit = settings.connect_timeout;
                let sentinels = Sentinels::new(&sentinels, &to_sentinels, master, access, limit)?;
                Topology::sentinel(sentinels, &settings).await
            }
            Deployment::Cluster(seeds) => Topology::cluster(seeds, access, settings).await,
        }
    }

    async fn single(
        addr: ConnectionAddr,
        access: &Access,
        mut settings: node::Settings,
    ) -> Result<Topology> {
        let name = format!("{addr}/{}", access.db());
        let dial = access.to(addr).map_err(Fault::into_error)?;
        let whereabouts = || Ok(Whereabouts::Fixed(dial.clone()));
        let demand = settings.demand.take();
        let mut node = Node::new(&settings, whereabouts)?;
        Facts::of(&node.commands).await?.check_alone()?;
        if let Some(demand) = demand
            && demand.applies_to(&node.commands).await?
        {
            settings.demand = Some(demand);
            node = Node::new(&settings, whereabouts)?;
        }
        Ok(Topology {
            form: Form::Single(node),
            name,
            publishing: Publishing::Everywhere,
        })
    }

    async fn sentinel(sentinels: Arc<Sentinels>, settings: &node::Settings) -> Result<Topology> {
        let node = Node::new(settings, || Ok(Whereabouts::Guided(sentinels.clone())))?;
        node.links().for_each(|link| sentinels.lead(link));
        Facts::of(&node.commands).await?.check_alone()?;
        Ok(Topology {
            name: sentinels.name(),
            form: Form::Sentinel(node, sentinels),
            publishing: Publishing::Everywhere,
        })
    }

    async fn cluster(
        seeds: Vec<Endpoint>,
        access: Access,
        mut settings: node::Settings,
    ) -> Result<Topology> {
        let facts = facts(&seeds, &access, &settings).await?;
        facts.check_cluster()?;
        let publishing = match facts.knows_sharded_channels() {
            true => Publishing::InSlot,
            false => Publishing::Everywhere,
        };
        settings.listening = match publishing {
            Publishing::InSlot => Listening::Sharded,
            Publishing::Everywhere => Listening::Unrestored,
        };
        let cluster = Cluster::new(seeds, access, settings);
        if cluster.masters().await.is_empty() {
            return Err(Error::Unavailable {
                reason: "no node of the cluster reported its slots".into(),
            });
        }
        Ok(Topology {
            name: cluster.name(),
            form: Form::Cluster(cluster),
            publishing,
        })
    }

    pub(super) fn name(&self) -> String {
        self.name.clone()
    }

    /// Returns whether there is a single, fixed server.
    pub(super) fn is_single(&self) -> bool {
        matches!(self.form, Form::Single(_))
    }

    /// Returns how scripts publish in this deployment.
    pub(super) fn publishing(&self) -> Publishing {
        self.publishing
    }

    /// Returns the cluster slot of a key. All keys of a script must be in the same slot.
    pub(super) fn slot(&self, key: &str) -> Option<u16> {
        match &self.form {
            Form::Single(_) | Form::Sentinel(..) => None,
            Form::Cluster(_) => Some(slot(key)),
        }
    }

    /// Checks that these keys can be used in one script.
    pub(super) fn check_together<'a>(
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
    pub(super) async fn node(&self, key: &str) -> Result<Arc<Node>, Fault> {
        match &self.form {
            Form::Single(node) | Form::Sentinel(node, _) => Ok(node.clone()),
            Form::Cluster(cluster) => cluster.owner(slot(key)).await,
        }
    }

    /// Returns the node that serves a key, as far as is known locally.
    pub(super) fn known_node(&self, key: &str) -> Option<NodeId> {
        match &self.form {
            Form::Single(node) | Form::Sentinel(node, _) => Some(node.id),
            Form::Cluster(cluster) => cluster.known_owner(slot(key)).map(|node| node.id),
        }
    }

    /// Returns the limits of the node that serves a key.
    pub(super) fn limits(&self, key: &str) -> Arc<Limits> {
        match &self.form {
            Form::Single(node) | Form::Sentinel(node, _) => node.limits.clone(),
            Form::Cluster(cluster) => cluster.limits(slot(key)),
        }
    }

    /// Returns a hint for the timeout error if there is not even a connection to the node of a key.
    pub(super) fn silence(&self, key: &str) -> Option<&'static str> {
        match &self.form {
            Form::Single(node) | Form::Sentinel(node, _) => node.silence(),
            Form::Cluster(cluster) => match cluster.known_owner(slot(key)) {
                Some(node) => node.silence(),
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
    pub(super) async fn moved(&self, key: &str, to: &str) -> Option<Arc<Node>> {
        match &self.form {
            Form::Single(_) | Form::Sentinel(..) => None,
            Form::Cluster(cluster) => cluster.moved(slot(key), to).await,
        }
    }

    /// The same for one command only (ASK).
    pub(super) fn asked(&self, key: &str, to: &str) -> Option<Arc<Node>> {
        match &self.form {
            Form::Single(_) | Form::Sentinel(..) => None,
            Form::Cluster(cluster) => cluster.asked(slot(key), to),
        }
    }

    /// Handles a sign that another server must be used.
    pub(super) fn suspect(&self) {
        match &self.form {
            Form::Single(_) => {}
            Form::Sentinel(_, sentinels) => sentinels.suspect(),
            Form::Cluster(cluster) => cluster.suspect(),
        }
    }

    /// Ends a subscription, wherever it is.
    pub(super) async fn unsubscribe(&self, channel: &str) -> Result<(), Fault> {
        match &self.form {
            Form::Single(node) | Form::Sentinel(node, _) => node.messages.unwant(channel).await,
            Form::Cluster(cluster) => {
                let nodes = cluster.nodes();
                // On several nodes, if a subscription was started and not confirmed before the slot moved.
                let ended = all(nodes.iter().map(|node| node.messages.unwant(channel))).await;
                ended.into_iter().collect()
            }
        }
    }
}

/// Returns the facts about the nodes of a cluster. One of the named nodes answers for all.
async fn facts(seeds: &[Endpoint], access: &Access, settings: &node::Settings) -> Result<Facts> {
    let asking = seeds.iter().map(|seed| async move {
        let whereabouts = Whereabouts::Fixed(access.to_endpoint(seed).map_err(Fault::into_error)?);
        let (limit, ear) = (settings.connect_timeout, settings.ear.clone());
        let link = Link::new(whereabouts, limit, ear, Listening::Unrestored, None);
        Facts::of(&link).await
    });
    let one = |said: &[Option<Result<Facts>>]| said.iter().flatten().any(Result::is_ok);
    let said = most(asking, one, BRIEFLY).await;
    let mut reason: Option<Error> = None;
    for said in said.into_iter().flatten() {
        match said {
            Ok(facts) => return Ok(facts),
            // A permanent error is not hidden by a node that is down.
            Err(error) if reason.as_ref().is_none_or(Error::is_transient) => reason = Some(error),
            Err(_) => {}
        }
    }
    Err(reason.unwrap_or_else(|| Error::InvalidUrl {
        reason: "it contains no node".into(),
    }))
}
