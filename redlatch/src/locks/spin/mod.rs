//! The spin lock (Redisson: `RSpinLock`, `RedissonSpinLock`): the re-entrant lock without messages.
//! It has no steps of its own; it only adds the pauses between attempts.

use std::sync::Arc;

use crate::backoff::Backoff;
use crate::hold::Spec;
use crate::locks::reentrant::ReentrantKind;
use crate::locks::{HasMinimum, Lock, OwnedKind};
use crate::metrics::Kind;
use crate::name::{KeyLayout, ObjectKeys};

/// A lock whose waiters poll with growing pauses (Redisson: `RSpinLock`).
///
/// It neither subscribes nor publishes on release, so thousands of short-lived names cost the store
/// no subscriptions. Of the waiters of one client only the first polls. It is the same lock in the
/// store as [`Client::lock`](crate::Client::lock): both exclude each other. But a spin lock's
/// release does not wake waiters of that handle; they retry when the lease would have ended. An
/// owner that holds the lock through one of the two handles and requests it through the other gets
/// [`Error::WrongKind`](crate::Error::WrongKind): both would share one hold, and only one of them wakes waiters.
///
/// When not to use it: where a lock is held for longer than some milliseconds or many processes
/// wait for it. Each of them sends up to 1000 requests a second, later 8 a second; a waiter that is
/// woken sends one.
///
/// ```
/// use std::time::Duration;
/// use redlatch::Backoff;
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
/// let client = redlatch::Client::embedded(); // or Client::connect("redis://127.0.0.1").await?
/// let lock = client
///     .spin_lock("counter:7")
///     .backoff(Backoff::constant(Duration::from_millis(2)));
/// let guard = lock.lock().await?;
/// guard.unlock().await
/// # }
/// ```
pub type SpinLock = Lock<Spin>;

/// Makes a [`Lock`] a [`SpinLock`], as its type parameter.
#[derive(Debug, Clone)]
pub struct Spin {
    object: Arc<ObjectKeys>,
    /// The client's wait queue, separate from that of the re-entrant lock of this name. It cannot equal a
    /// channel, because no name has a NUL.
    queue: Arc<str>,
    backoff: Backoff,
}

impl OwnedKind for Spin {}
impl HasMinimum for Lock<Spin> {}

impl Lock<Spin> {
    /// Sets the pause between attempts. Default [`Backoff::default`].
    #[must_use]
    pub fn backoff(self, backoff: Backoff) -> Lock<Spin> {
        let kind = Spin {
            backoff,
            ..(*self.kind).clone()
        };
        self.with_kind(kind)
    }
}

impl Spin {
    pub(crate) fn new(prefix: &str, name: &str) -> Spin {
        let object = ObjectKeys::new(KeyLayout::Spin, prefix, name);
        Spin {
            queue: format!("\0{}", object.key()).into(),
            object: object.into(),
            backoff: Backoff::default(),
        }
    }
}

impl ReentrantKind for Spin {
    fn keys(&self) -> &Arc<ObjectKeys> {
        &self.object
    }

    fn spec(&self) -> Spec {
        Spec::of(Kind::SpinLock)
    }

    /// No messages are sent on the channel with this name.
    fn polling(&self) -> Option<(&str, &Backoff)> {
        Some((&self.queue, &self.backoff))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_queue_is_named_like_no_channel() {
        let spin = Spin::new("shop:", "a");
        assert!(spin.queue.ends_with("shop:a"));
        let named = ObjectKeys::new(KeyLayout::Lock, "", &spin.queue);
        assert!(named.check().is_err());
    }
}
