//! Subscriptions: the commands and the confirmations of the server.
//!
//! Nodes of a cluster have sharded channels from Redis 7.0 on. During an update some have them, and a node gets
//! them while clients are connected. So nothing is concluded from versions, or from other nodes:
//!
//! 1. A script publishes with SPUBLISH where its node knows that command, else with PUBLISH
//!    ([`PublishMode`](crate::step::PublishMode)).
//! 2. A waiter subscribes at the node that runs these scripts: with SSUBSCRIBE where the node knows that command,
//!    else with SUBSCRIBE. Each connection finds out anew.
//! 3. If the slot moves to another node, subscriptions end, and waiters ask again: a server ends a sharded one by
//!    itself; for the others the client does it when it learns of the move, so within seconds.
//!
//! **Must not happen:** a waiter sleeps on a free lock, because it listens in another way or elsewhere than the
//! release publishes. Feared most: a waiter has subscribed with SUBSCRIBE before the update of its node. The
//! update ends its connection. And: the slot moves from a node that is not updated, and continues, to one that
//! is. A message of the release there is missed; rule 3 limits how long the waiter sleeps.

use super::wire::{Cmd, Expects};
use crate::step::ScriptReply;

/// Channels per SUBSCRIBE: keeps the size of a command far from any limit.
pub(super) const CHANNELS_PER_SUBSCRIBE: usize = 1000;

/// How a connection subscribes to channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SubscriptionMode {
    /// With SUBSCRIBE, restored on every new connection.
    Restored,
    /// With SUBSCRIBE. Subscriptions end with their connection: in a cluster the next one may have to be at
    /// another node.
    Unrestored,
    /// Like `Unrestored`, with SSUBSCRIBE where the server has it, else with SUBSCRIBE.
    Sharded,
    /// Like `Unrestored`, on a connection that carries nothing else, because the server permits nothing else (RESP2). Replies
    /// can be messages.
    Apart,
    /// No subscriptions: the connection carries reports of changed keys. Its subscriber learns when it ends, so that is
    /// not logged.
    Reports,
}

/// Returns the command that begins or ends subscriptions, and how it is answered.
pub(super) fn subscribing(
    subscribed: bool,
    mode: SubscriptionMode,
    channels: &[&str],
) -> (Cmd, Expects) {
    use SubscriptionMode::{Apart, Sharded};
    // The messages that confirm it are of this kind.
    let (command, confirmed) = match (subscribed, mode) {
        (true, Sharded) => ("SSUBSCRIBE", Some("ssubscribe")),
        (true, _) => ("SUBSCRIBE", Some("subscribe")),
        (false, Sharded) => ("SUNSUBSCRIBE", None),
        (false, Apart) => ("UNSUBSCRIBE", Some("unsubscribe")),
        (false, _) => ("UNSUBSCRIBE", None),
    };
    let mut cmd = Cmd::of(&[command]);
    channels.iter().for_each(|channel| cmd.text(channel));
    let confirmations = |kind| Expects::Confirmations(kind, channels.len());
    (cmd, confirmed.map_or(Expects::End, confirmations))
}

/// Returns the text of a field of a map, which is a list of names and values in turn.
pub(super) fn text_field<'v>(map: &'v ScriptReply, name: &str) -> Option<&'v str> {
    let mut fields = map.elements()?.chunks_exact(2);
    let field = fields.find(|field| field[0].as_text() == Some(name))?;
    field[1].as_text()
}
