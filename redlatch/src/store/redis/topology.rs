//! Which server to ask: the one there is, the master that the sentinels name, or the node of a
//! cluster that has the slot.

use std::sync::Arc;
use std::time::Duration;

use super::access::{Access, Endpoint};
use super::cluster::Cluster;
use super::facts::Facts;
use super::fault::Fault;
use super::link::{Link, Listening, Whereabouts};
use super::node::{self, Node};
use super::replicas::{Demand, ReplicaSync};
use super::sentinel::Sentinels;
use super::slot::{is_untidy, slot};
use super::url::{Deployment, Target};
use crate::error::{Error, Result};
use crate::several::most;
use crate::step::Publishing;
use crate::store::SharedEar;

/// What is set for the connections of a client.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    pub(crate) connect_timeout: Duration,
    pub(crate) replica_sync: ReplicaSync,
    pub(crate) replica_timeout: Duration,
}

pub(super) struct Topology {
    form: Form,
    /// What it was called by, without anything that could be secret.
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
        };
        (self.replica_sync != ReplicaSync::Off).then_some(demand)
    }
}

impl Topology {
    /// Connects, and sees whether the servers are such that we can work with.
    pub(super) async fn connect(
        target: Target,
        settings: Settings,
        ear: SharedEar,
    ) -> Result<Topology> {
        let access = target.access;
        let connect_timeout = settings.connect_timeout;
        let mut settings = node::Settings {
            connect_timeout,
            ear,
            listening: Listening::Restored,
            demand: settings.demand(),
        };
        let topology = |form, name, publishing| Topology {
            form,
            name,
            publishing,
        };
        match target.deployment {
            Deployment::Single(addr) => {
                let name = format!("{addr}/{}", access.db());
                let client = access.to(addr).map_err(Fault::into_error)?;
                let whereabouts = || Ok(Whereabouts::Fixed(client.clone()));
                let demand = settings.demand.take();
                let mut node = Node::new(&settings, whereabouts)?;
                Facts::of(&node.commands).await?.check_alone()?;
                if let Some(demand) = demand
                    && demand.applies_to(&node.commands).await?
                {
                    settings.demand = Some(demand);
                    node = Node::new(&settings, whereabouts)?;
                }
                Ok(topology(Form::Single(node), name, Publishing::Everywhere))
            }
            Deployment::Sentinel {
                sentinels,
                master,
                access: to_sentinels,
            } => {
                let sentinels =
                    Sentinels::new(&sentinels, &to_sentinels, master, access, connect_timeout)?;
                let master = || Ok(Whereabouts::Master(sentinels.clone()));
                let node = Node::new(&settings, master)?;
                node.links().for_each(|link| sentinels.lead(link));
                Facts::of(&node.commands).await?.check_alone()?;
                let name = sentinels.name();
                let form = Form::Sentinel(node, sentinels);
                Ok(topology(form, name, Publishing::Everywhere))
            }
            Deployment::Cluster(seeds) => {
                let facts = of_any(&seeds, &access, &settings).await?;
                facts.check_cluster()?;
                let sharded = facts.knows_sharded_channels();
                settings.listening = match sharded {
                    true => Listening::Sharded,
                    false => Listening::Lasting,
                };
                let cluster = Cluster::new(seeds, access, settings);
                // Also says now if none can be asked.
                cluster.owner(0).await.map_err(Fault::into_error)?;
                let name = cluster.name();
                let publishing = match sharded {
                    true => Publishing::InSlot,
                    false => Publishing::Everywhere,
                };
                Ok(topology(Form::Cluster(cluster), name, publishing))
            }
        }
    }

    pub(super) fn name(&self) -> String {
        self.name.clone()
    }

    /// How scripts publish here.
    pub(super) fn publishing(&self) -> Publishing {
        self.publishing
    }

    /// Which keys can be in one script: those with the same answer.
    pub(super) fn slot(&self, key: &str) -> Option<u16> {
        match &self.form {
            Form::Single(_) | Form::Sentinel(..) => None,
            Form::Cluster(_) => Some(slot(key)),
        }
    }

    /// Whether these keys can be in one script; not, if a name has braces that are no hash tag.
    pub(super) fn check_together<'a>(
        &self,
        key: &str,
        mut others: impl Iterator<Item = &'a str>,
    ) -> Result<()> {
        let Some(slot) = self.slot(key) else {
            return Ok(());
        };
        let fits = |other: &str| self.slot(other) == Some(slot) && !is_untidy(other);
        if !is_untidy(key) && others.all(fits) {
            return Ok(());
        }
        Err(Error::InvalidName {
            name: key.chars().take(64).collect(),
            reason: "it has a brace but no hash tag, so its keys would lie in different slots of \
                     the cluster",
        })
    }

    /// The node that has a key.
    pub(super) async fn node(&self, key: &str) -> Result<Arc<Node>, Fault> {
        match &self.form {
            Form::Single(node) | Form::Sentinel(node, _) => Ok(node.clone()),
            Form::Cluster(cluster) => cluster.owner(slot(key)).await,
        }
    }

    /// All nodes that have keys, in an order that stays.
    pub(super) async fn masters(&self) -> Vec<Arc<Node>> {
        match &self.form {
            Form::Single(node) | Form::Sentinel(node, _) => vec![node.clone()],
            Form::Cluster(cluster) => cluster.masters().await,
        }
    }

    /// The node that another has referred to.
    pub(super) fn moved(&self, key: &str, to: &str) -> Option<Arc<Node>> {
        match &self.form {
            Form::Single(_) | Form::Sentinel(..) => None,
            Form::Cluster(cluster) => cluster.moved(slot(key), to),
        }
    }

    /// The same, for one time only.
    pub(super) fn asked(&self, key: &str, to: &str) -> Option<Arc<Node>> {
        match &self.form {
            Form::Single(_) | Form::Sentinel(..) => None,
            Form::Cluster(cluster) => cluster.asked(slot(key), to),
        }
    }

    /// Something looks as if another server had to be asked.
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
                let wants = |node: &&Arc<Node>| node.messages.wants(channel);
                // One that was begun and not confirmed is with the owner of the slot, if anywhere.
                let node = match nodes.iter().find(wants) {
                    Some(node) => node.clone(),
                    None => cluster.owner(slot(channel)).await?,
                };
                node.messages.unwant(channel).await
            }
        }
    }
}

/// What one of the nodes says of itself: all are asked, because some may be gone or hang.
async fn of_any(seeds: &[Endpoint], access: &Access, settings: &node::Settings) -> Result<Facts> {
    let asking = seeds.iter().map(|seed| async move {
        let client = access.to_endpoint(seed).map_err(Fault::into_error)?;
        let ear = settings.ear.clone();
        let timeout = settings.connect_timeout;
        let link = Link::new(Whereabouts::Fixed(client), timeout, ear, Listening::Lasting);
        Facts::of(&link).await
    });
    let answered = |said: &[Option<Result<Facts>>]| said.iter().flatten().any(Result::is_ok);
    // One is enough, whichever: nobody is waited for beyond that.
    let said = most(asking, answered, Duration::ZERO).await;
    let mut said = said.into_iter().flatten();
    let first = said.next().unwrap_or_else(|| {
        Err(Error::InvalidUrl {
            reason: "it names no node".into(),
        })
    });
    match first {
        Ok(facts) => Ok(facts),
        Err(error) => said.find_map(Result::ok).ok_or(error),
    }
}
