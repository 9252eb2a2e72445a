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

/// What all nodes of a deployment have in common.
#[derive(Clone)]
pub(super) struct Settings {
    pub(super) connect_timeout: Duration,
    pub(super) ear: SharedEar,
    pub(super) doubts: Arc<Doubts>,
    pub(super) listening: Listening,
    /// What is demanded of replicas, if anything.
    pub(super) demand: Option<Demand>,
}

/// How many releases may be in flight at one node in the background. If thousands of attempts are
/// dropped at once, renewals must not wait behind them.
const SETTLINGS: usize = 64;

/// How much work may be in flight at one node at once. Every node has limits of its own, so that a node
/// that does not answer uses up no turns of the others.
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
    /// Never given to another node of this process.
    pub(super) id: NodeId,
    pub(super) limits: Arc<Limits>,
    /// For renewals, releases, looks.
    pub(super) commands: Arc<Link>,
    /// For attempts: the same, unless replicas are waited for.
    pub(super) attempts: Arc<Link>,
    /// For subscriptions: that of attempts, so that one can be sent right behind a subscription,
    /// unless channels are sharded (see [`Listening::Sharded`]).
    pub(super) messages: Arc<Link>,
    pub(super) replicas: Option<Arc<Replicas>>,
}

impl Node {
    /// `whereabouts` is asked once for each connection.
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

    /// All connections, some perhaps twice.
    pub(super) fn links(&self) -> impl Iterator<Item = &Arc<Link>> {
        [&self.commands, &self.attempts, &self.messages].into_iter()
    }

    /// If there is not even a connection, what to think of then.
    pub(super) fn silence(&self) -> Option<&'static str> {
        // Nothing, if one of them is connected.
        self.links().map(|link| link.silence()).min().flatten()
    }

    /// It is no longer one to ask.
    pub(super) fn give_up(&self) {
        self.links().for_each(|link| link.give_up());
    }
}
