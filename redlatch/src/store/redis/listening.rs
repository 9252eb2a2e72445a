//! Subscriptions: the commands and the confirmations of the server.

use redis::aio::MultiplexedConnection;
use redis::{PushKind, RedisError, Value};

/// Channels per SUBSCRIBE: keeps the size of a command far from any limit.
pub(super) const BEGUN_AT_ONCE: usize = 1000;

/// How a link subscribes to channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Listening {
    /// With SUBSCRIBE, restored on every new connection.
    Restored,
    /// With SUBSCRIBE. Subscriptions end with their connection: in a cluster the next one may have to be at
    /// another node.
    Unrestored,
    /// Like `Unrestored`, with SSUBSCRIBE.
    Sharded,
}

impl Listening {
    /// Subscribes to a channel, or ends its subscription.
    pub(super) async fn change(
        self,
        connection: &mut MultiplexedConnection,
        begin: bool,
        channel: &str,
    ) -> Result<(), RedisError> {
        match (self, begin) {
            (Listening::Sharded, true) => {
                sharded(connection, "SSUBSCRIBE", PushKind::SSubscribe, channel).await
            }
            (Listening::Sharded, false) => {
                sharded(connection, "SUNSUBSCRIBE", PushKind::SUnsubscribe, channel).await
            }
            (_, true) => connection.subscribe(channel).await,
            (_, false) => connection.unsubscribe(channel).await,
        }
    }
}

/// Restores subscriptions. A refused one must affect neither the others nor the connection.
pub(super) async fn begin_again(
    connection: &mut MultiplexedConnection,
    channels: &[&String],
) -> Result<(), RedisError> {
    match connection.subscribe(channels).await {
        Err(error) if !breaks(&error) => {}
        done => return done,
    }
    for channel in channels {
        match connection.subscribe(channel.as_str()).await {
            Err(error) if !breaks(&error) => {
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
async fn sharded(
    connection: &mut MultiplexedConnection,
    command: &str,
    confirmed: PushKind,
    channel: &str,
) -> Result<(), RedisError> {
    let cmd = redis::cmd(command).arg(channel).take();
    match connection.send_packed_command(&cmd).await? {
        Value::Push { kind, data } if kind == confirmed && text(data.first()) == Some(channel) => {
            Ok(())
        }
        Value::ServerError(error) => Err(error.into()),
        // All later answers would be out of step, too.
        _ => Err(std::io::Error::other("a confirmation of another subscription").into()),
    }
}

/// Returns whether an error means that the connection cannot be used any more.
pub(super) fn breaks(error: &RedisError) -> bool {
    error.is_io_error() || error.is_unrecoverable_error()
}

/// Returns the text at the start of a push.
pub(super) fn text(value: Option<&Value>) -> Option<&str> {
    match value {
        Some(Value::BulkString(text)) => std::str::from_utf8(text).ok(),
        _ => None,
    }
}
