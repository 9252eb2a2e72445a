//! How channels are listened to: what is said to a server about it, and what it answers.

use redis::aio::MultiplexedConnection;
use redis::{PushKind, RedisError, Value};

/// Channels per SUBSCRIBE: one command's size stays far from any limit.
pub(super) const BEGUN_AT_ONCE: usize = 1000;

/// How a link listens to channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Listening {
    /// With SUBSCRIBE, restored on every new connection.
    Restored,
    /// With SUBSCRIBE. A connection that ends takes its subscriptions with it: in a cluster the
    /// next one may have to be with another node.
    Unrestored,
    /// The same with SSUBSCRIBE.
    Sharded,
}

impl Listening {
    /// Begins or ends listening to a channel.
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

/// Subscribes to channels anew. One that is refused must not cost the others, nor the connection.
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

/// One command about one channel, and its confirmation.
///
/// A node that loses a slot ends the subscriptions there unasked, with the same words as it confirms
/// ours; the client library takes that for the answer to whatever was sent first. So on a connection
/// that listens to sharded channels nothing else is sent, and each answer is looked at.
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
        // Everything behind it would be out of step too.
        _ => Err(std::io::Error::other("a confirmation of another subscription").into()),
    }
}

/// Whether an error means that the connection is of no more use.
pub(super) fn breaks(error: &RedisError) -> bool {
    error.is_io_error() || error.is_unrecoverable_error()
}

/// The text that a push begins with.
pub(super) fn text(value: Option<&Value>) -> Option<&str> {
    match value {
        Some(Value::BulkString(text)) => std::str::from_utf8(text).ok(),
        _ => None,
    }
}
