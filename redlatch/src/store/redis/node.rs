//! One server that holds data, and the connections to it.

use std::sync::Arc;
use std::time::Duration;

use super::link::{Link, Listening, Whereabouts};
use crate::error::Error;
use crate::store::SharedEar;

/// What all nodes of a deployment have in common.
#[derive(Clone)]
pub(super) struct Settings {
    pub(super) connect_timeout: Duration,
    pub(super) ear: SharedEar,
    pub(super) listening: Listening,
}

pub(super) struct Node {
    /// For commands.
    pub(super) commands: Arc<Link>,
    /// For subscriptions: the same, so that a step can be sent right behind one, unless channels
    /// are sharded (see [`Listening::Sharded`]).
    pub(super) messages: Arc<Link>,
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
        let commands = match settings.listening {
            Listening::Sharded => link(Listening::Lasting)?,
            Listening::Restored | Listening::Lasting => messages.clone(),
        };
        Ok(Arc::new(Node { commands, messages }))
    }

    pub(super) fn links(&self) -> impl Iterator<Item = &Arc<Link>> {
        [&self.commands, &self.messages].into_iter()
    }

    /// It is no longer one to ask.
    pub(super) fn give_up(&self) {
        self.links().for_each(|link| link.give_up());
    }
}
