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

use redis::aio::MultiplexedConnection;
use redis::{PushKind, RedisError, Value};

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
    /// No subscriptions: the connection carries reports of changed keys. Its subscriber learns when it ends, so that is
    /// not logged.
    Reports,
}

/// Subscribes to a channel, or ends its subscription.
pub(super) async fn set_subscribed(
    connection: &mut MultiplexedConnection,
    subscribed: bool,
    channel: &str,
) -> Result<(), RedisError> {
    match subscribed {
        true => connection.subscribe(channel).await,
        false => connection.unsubscribe(channel).await,
    }
}

/// The same for a sharded channel.
pub(super) async fn set_subscribed_sharded(
    connection: &mut MultiplexedConnection,
    subscribed: bool,
    channel: &str,
) -> Result<(), RedisError> {
    match subscribed {
        true => send_sharded(connection, "SSUBSCRIBE", PushKind::SSubscribe, channel).await,
        false => send_sharded(connection, "SUNSUBSCRIBE", PushKind::SUnsubscribe, channel).await,
    }
}

/// Returns whether the server does not know the command.
pub(super) fn is_unknown_command(error: &RedisError) -> bool {
    let detail = error.detail();
    detail.is_some_and(|detail| detail.starts_with("unknown command"))
}

/// Restores subscriptions. A refused one must affect neither the others nor the connection.
pub(super) async fn resubscribe(
    connection: &mut MultiplexedConnection,
    channels: &[&String],
) -> Result<(), RedisError> {
    match connection.subscribe(channels).await {
        Err(error) if !breaks_connection(&error) => {}
        done => return done,
    }
    for channel in channels {
        match connection.subscribe(channel.as_str()).await {
            Err(error) if !breaks_connection(&error) => {
                tracing::warn!(%channel, %error, "a subscription was refused");
            }
            done => done?,
        }
    }
    Ok(())
}

/// Sends one command about one channel, and checks its confirmation.
///
/// A node that loses a slot ends the subscriptions there by itself, with the same message that confirms a
/// request. The client library takes that for the answer to the oldest command in flight. So a connection
/// with sharded channels carries nothing else, and each answer is checked.
async fn send_sharded(
    connection: &mut MultiplexedConnection,
    command: &str,
    confirmed: PushKind,
    channel: &str,
) -> Result<(), RedisError> {
    let cmd = redis::cmd(command).arg(channel).take();
    match connection.send_packed_command(&cmd).await? {
        Value::Push { kind, data }
            if kind == confirmed && as_text(data.first()) == Some(channel) =>
        {
            Ok(())
        }
        Value::ServerError(error) => Err(error.into()),
        // All later answers would be matched to the wrong commands, too.
        _ => Err(std::io::Error::other("a confirmation of another subscription").into()),
    }
}

/// Returns whether an error means that the connection cannot be used any more.
pub(super) fn breaks_connection(error: &RedisError) -> bool {
    error.is_io_error() || error.is_unrecoverable_error()
}

/// Returns the text of a field of a map.
pub(super) fn text_field<'v>(map: &'v Value, name: &str) -> Option<&'v str> {
    let mut fields = map.as_map_iter()?;
    let (_, value) = fields.find(|(other, _)| as_text(Some(other)) == Some(name))?;
    as_text(Some(value))
}

/// Returns the text of a value, such as the channel at the start of a push message.
pub(super) fn as_text(value: Option<&Value>) -> Option<&str> {
    match value {
        Some(Value::BulkString(text)) => std::str::from_utf8(text).ok(),
        _ => None,
    }
}
