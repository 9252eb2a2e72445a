//! What a store pushes to its client.

use std::sync::Arc;

use crate::metrics::Metrics;

/// Receives what the store pushes. Called from the connection's own task: must not block.
pub(crate) trait Subscriber: Send + Sync {
    /// A message was published to `channel`; empty if it came on a connection that was left.
    fn on_message(&self, channel: &str, message: &str);
    /// The connection broke: messages may have been missed since.
    fn on_disconnect(&self);
    /// A step of this client was answered, and `channel` subscribed to before it. `ends`: the
    /// [`subscription_ends`](Subscriber::subscription_ends) before it was sent.
    fn on_subscribed(&self, channel: &str, ends: u64) {
        let _ = (channel, ends);
    }
    /// Returns how often the subscription of `channel` has ended. An answer from before an end confirms nothing.
    fn subscription_ends(&self, channel: &str) -> u64 {
        let _ = channel;
        0
    }
    /// The subscription of `channel` has ended. Its messages are missed until it is subscribed to again.
    fn on_unsubscribed(&self, channel: &str);

    /// Returns the metrics of the client.
    fn metrics(&self) -> Metrics {
        Metrics::default()
    }

    /// A key has changed, or any: reported only on a connection of a [`Reporters`](super::redis::Reporters).
    fn on_changed(&self, key: Option<&str>) {
        let _ = key;
    }
}

/// Shared by the store and the wait queues. It exists before the store, so it misses no message.
pub(crate) type SharedSubscriber = Arc<dyn Subscriber>;
