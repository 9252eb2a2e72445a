//! One server that holds data, and the connections to it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::Semaphore;

use super::link::{Link, Whereabouts, Witness};
use super::listening::Listening;
use super::replicas::{Demand, Replicas};
use super::turns::Turns;
use crate::error::Error;
use crate::store::{Doubts, NodeId, SharedEar};

/// What all nodes of a deployment share.
#[derive(Clone)]
pub(super) struct Settings {
    pub(super) connect_timeout: Duration,
    pub(super) ear: SharedEar,
    pub(super) doubts: Arc<Doubts>,
    pub(super) listening: Listening,
    /// Requirements on replicas, if any.
    pub(super) demand: Option<Demand>,
}

/// Number of background releases in flight at one node. If thousands of attempts are dropped at once,
/// renewals must not wait behind their releases.
const SETTLINGS: usize = 64;

/// Limits of the work in flight at one node. Every node has its own, so that a node that does not answer
/// uses up no turns of the others.
pub(super) struct Limits {
    pub(super) turns: Arc<Turns>,
    pub(super) settlings: Arc<Semaphore>,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            turns: Turns::new(),
            settlings: Arc::new(Semaphore::new(SETTLINGS)),
        }
    }
}

pub(super) struct Node {
    /// Unique in this process.
    pub(super) id: NodeId,
    pub(super) limits: Arc<Limits>,
    /// For renewals, releases and inspections.
    pub(super) commands: Arc<Link>,
    /// For attempts: the same link, unless replicas are waited for.
    pub(super) attempts: Arc<Link>,
    /// For subscriptions: the link of the attempts, so that an attempt can follow its subscription
    /// directly, unless channels are sharded (see [`Listening::Sharded`]).
    pub(super) messages: Arc<Link>,
    pub(super) replicas: Option<Arc<Replicas>>,
}

impl Node {
    /// Calls `whereabouts` once for each connection.
    pub(super) fn new(
        settings: &Settings,
        whereabouts: impl Fn() -> Result<Whereabouts, Error>,
    ) -> Result<Arc<Node>, Error> {
        static NODES: AtomicU64 = AtomicU64::new(1);
        let id = NodeId(NODES.fetch_add(1, Ordering::Relaxed));
        let link = |listening, is_for_commands: bool| {
            let ear = settings.ear.clone();
            let witness = is_for_commands.then(|| Witness::new(id, settings.doubts.clone()));
            let limit = settings.connect_timeout;
            Ok::<_, Error>(Link::new(whereabouts()?, limit, ear, listening, witness))
        };
        let sharded = settings.listening == Listening::Sharded;
        let alone = settings.demand.is_none();
        let messages = link(settings.listening, alone && !sharded)?;
        let attempts = match settings.listening {
            Listening::Sharded => link(Listening::Unrestored, alone)?,
            Listening::Restored | Listening::Unrestored => messages.clone(),
        };
        let commands = match settings.demand {
            Some(_) => link(Listening::Unrestored, true)?,
            None => attempts.clone(),
        };
        Ok(Arc::new(Node {
            id,
            limits: Arc::default(),
            commands,
            attempts,
            messages,
            replicas: settings.demand.map(Replicas::new),
        }))
    }

    /// Returns all connections, possibly with duplicates.
    pub(super) fn links(&self) -> impl Iterator<Item = &Arc<Link>> {
        [&self.commands, &self.attempts, &self.messages].into_iter()
    }

    /// Returns a hint for the timeout error if there is not even a connection.
    pub(super) fn silence(&self) -> Option<&'static str> {
        // `None` if one of them is connected.
        self.links().map(|link| link.silence()).min().flatten()
    }

    /// Gives up all connections, because this node must not be used any more.
    pub(super) fn give_up(&self) {
        self.links().for_each(|link| link.give_up());
    }
}
