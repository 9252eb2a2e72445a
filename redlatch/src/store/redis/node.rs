//! One server that holds data, and the connections to it.

use std::sync::Arc;
use std::time::Duration;

use super::link::{Link, Whereabouts};
use super::listening::Listening;
use super::replicas::{Demand, Replicas};
use super::turns::Turns;
use crate::error::Error;
use crate::store::SharedEar;

/// What all nodes of a deployment have in common.
#[derive(Clone)]
pub(super) struct Settings {
    pub(super) connect_timeout: Duration,
    pub(super) ear: SharedEar,
    pub(super) listening: Listening,
    /// What is demanded of replicas, if anything.
    pub(super) demand: Option<Demand>,
}

pub(super) struct Node {
    /// For renewals, releases, looks.
    pub(super) commands: Arc<Link>,
    /// For attempts: the same, unless replicas are waited for.
    pub(super) attempts: Arc<Link>,
    /// For subscriptions: that of attempts, so that one can be sent right behind a subscription,
    /// unless channels are sharded (see [`Listening::Sharded`]).
    pub(super) messages: Arc<Link>,
    pub(super) replicas: Option<Arc<Replicas>>,
    /// Of the attempts that may be on their way to it.
    pub(super) turns: Arc<Turns>,
}

impl Node {
    /// `whereabouts` is asked once for each connection.
    pub(super) fn new(
        settings: &Settings,
        whereabouts: impl Fn() -> Result<Whereabouts, Error>,
    ) -> Result<Arc<Node>, Error> {
        let link = |listening| {
            let ear = settings.ear.clone();
            let link = Link::new(whereabouts()?, settings.connect_timeout, ear, listening);
            Ok::<_, Error>(link)
        };
        let messages = link(settings.listening)?;
        let attempts = match settings.listening {
            Listening::Sharded => link(Listening::Unrestored)?,
            Listening::Restored | Listening::Unrestored => messages.clone(),
        };
        let commands = match settings.demand {
            Some(_) => link(Listening::Unrestored)?,
            None => attempts.clone(),
        };
        Ok(Arc::new(Node {
            commands,
            attempts,
            messages,
            replicas: settings.demand.map(Replicas::new),
            turns: Turns::new(),
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
